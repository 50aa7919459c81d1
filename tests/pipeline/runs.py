"""Bodies that train a tiny model on ranks while something is observed or disturbed."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpt3d.learner import Learner, Rows
from gpt3d.parallel.layout import Sizes, create_layout
from gpt3d.verification.cases import LR, SEQ, VOCAB, Case
from tests.settled import settled


def new_learner(case: Case, num_layers: int = 4) -> Learner:
    config = case.config()
    config.model.num_layers = num_layers
    layout = create_layout(
        Sizes(case.tp, 1, case.dp, case.pp),
        torch.device("cpu"),
        sequence_parallel=case.sp,
        num_kv_heads=config.model.num_kv_heads,
    )
    return Learner(config, layout)


def rows(count: int, micro: int = 1, step: int = 0) -> list[Rows]:
    """`count` microbatches; row i of the step is filled with token i and asks for token i + 1."""
    first = torch.arange(count * micro) + step
    tokens = (first % VOCAB)[:, None].expand(-1, SEQ).contiguous()
    labels = ((first + 1) % VOCAB)[:, None].expand(-1, SEQ).contiguous()
    return [
        Rows(tokens[i : i + micro], labels[i : i + micro], step * count * micro + i)
        for i in range(0, count * micro, micro)
    ]


def wrap(target: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace method `name` of an object by `wrapper(original, *args)`."""
    original = getattr(target, name)
    setattr(target, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def losses_with_delay(
    case: Case, counts: tuple[int, ...], num_layers: int, slow_rank: int, delay: float
) -> list[float]:
    """Loss of one step for each number of microbatches; every forward and backward of one rank is late by `delay`."""
    learner = new_learner(case, num_layers)

    def late(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        time.sleep(delay)
        return original(*args, **kwargs)

    if learner.layout.rank == slow_rank:
        for name in ("forward", "backward", "backward_input", "backward_weight"):
            wrap(learner.engine, name, late)
    losses = []
    for count in counts:
        outcome = learner.step(rows(count, case.micro), LR)
        losses.append(learner.total(outcome.loss_sum) / outcome.tokens)
    return losses


def microbatch_losses(case: Case, count: int, steps: tuple[int, ...]) -> list[list[float]]:
    """Losses of the single microbatches after some numbers of steps; every rank returns those of its last stage."""
    learner = new_learner(case)
    seen: list[float] = []

    def listen(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        out = original(*args, **kwargs)
        if out.dim() == 0:
            seen.append(float(out))
        return out

    wrap(learner.engine, "forward", listen)
    recorded = []
    for step in range(1, max(steps) + 1):
        seen.clear()
        learner.step(rows(count, case.micro, step), LR)
        if step in steps:
            recorded.append(list(seen))
    return recorded


def memory(case: Case, counts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """For each number of microbatches: most stage inputs alive, most stage outputs alive, peak bytes kept for backward.

    Counted whenever a forward begins; outputs are those of earlier forwards.
    """
    learner = new_learner(case)
    inputs: list[weakref.ref[Tensor]] = []
    outputs: list[weakref.ref[Any]] = []
    peaks = [0, 0, 0]
    kept = 0

    class Kept:
        """A tensor that autograd keeps."""

        def __init__(self, value: Tensor) -> None:
            nonlocal kept
            self.value, self.bytes = value, value.nbytes
            kept += self.bytes
            peaks[2] = max(peaks[2], kept)

        def __del__(self) -> None:
            nonlocal kept
            kept -= self.bytes

    def forward(original: Callable[..., Any], chunk: int, x: Tensor, *args: Any) -> Tensor:
        peaks[1] = max(peaks[1], sum(ref() is not None for ref in outputs))
        out = original(chunk, x, *args)
        if x.is_floating_point():
            inputs.append(weakref.ref(x))
        peaks[0] = max(peaks[0], sum(ref() is not None for ref in inputs))
        outputs.append(weakref.ref(out.untyped_storage()))
        return out

    wrap(learner.engine, "forward", forward)
    found = []
    for count in counts:
        data = rows(count, case.micro)
        learner.step(data, LR)  # optimizer state and buffers come with the first step
        inputs.clear()
        outputs.clear()
        peaks[:] = 0, 0, 0
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.value):
            learner.step(data, LR)
        found.append((peaks[0], peaks[1], peaks[2]))
    return found


def live_tensors(case: Case, steps: tuple[int, ...]) -> list[tuple[int, int]]:
    """Number and bytes of the tensors alive after some numbers of steps, as the garbage collector sees them."""

    def sizes() -> list[int]:
        return [x.nbytes for x in gc.get_objects() if issubclass(type(x), Tensor)]

    learner = new_learner(case)
    found = []
    for step in range(1, max(steps) + 1):
        learner.step(rows(4, case.micro, step), LR)
        if step in steps:
            gc.collect()
            found.append((settled(lambda: len(sizes())), settled(lambda: sum(sizes()))))
    return found


def bytes_sent(case: Case, count: int) -> int:
    """Bytes that this rank sends to other stages in one step."""
    learner = new_learner(case)
    total = 0
    send = dist.isend

    def counted(message: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal total
        total += message.nbytes
        return send(message, *args, **kwargs)

    dist.isend = counted  # type: ignore[assignment]
    learner.step(rows(count, case.micro), LR)
    return total


def ragged_evaluation(case: Case, counts: tuple[int, ...]) -> list[tuple[float, int]]:
    """Validation loss [nats] and targets for numbers of batches that suit no schedule, none included."""
    learner = new_learner(case)
    return [learner.evaluate(rows(count, case.micro)) for count in counts]


def overflow_on_last_stage(case: Case, bad_step: int, steps: int) -> list[tuple[bool, float, bool]]:
    """Skipped, loss scale and whether weights moved, by step; activations of the last stage overflow in one step."""
    learner = new_learner(case)
    now = 0

    def overflow(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        return out * float("inf") if now == bad_step else out

    if learner.layout.is_last_stage:
        final_norm: Any = learner.engine.module.get_submodule("chunks.0.head.norm")
        final_norm.register_forward_hook(overflow)
    found = []
    for now in range(1, steps + 1):
        before = [w.clone() for _, w in learner.engine.master_weights()]
        outcome = learner.step(rows(4, case.micro, now), LR)
        after = [w for _, w in learner.engine.master_weights()]
        moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        found.append((outcome.skipped, learner.engine.loss_scale, moved))
    return found


def damaged_copies(case: Case, rank: int, name: str | None) -> None:
    """Move one number of a parameter on one rank by one unit in the last place, and compare copies."""
    learner = new_learner(case)
    learner.step(rows(2 * case.dp, case.micro)[:2], LR)
    for place, weight in learner.engine.held_weights():
        if learner.layout.rank == rank and place.name == name:
            flat = weight.view(-1)
            flat[0] = torch.nextafter(flat[0], torch.tensor(float("inf")))
    learner.check_copies()


def connected_at_first_use(case: Case, counts: tuple[int, ...]) -> list[float]:
    """Losses where, as with NCCL, the first message of a group holds up a rank until its peer sends or receives it."""
    connected = set[Any]()

    def meeting(original: Callable[..., Any], message: Tensor, peer: int, group: Any) -> Any:
        if group not in connected:
            connected.add(group)
            dist.barrier(group=group)
        return original(message, peer, group=group)

    for name in ("send", "recv", "isend", "irecv"):
        wrap(dist, name, meeting)
    learner = new_learner(case)
    outcomes = [learner.step(rows(count, case.micro), LR) for count in counts]
    return [learner.total(outcome.loss_sum) / outcome.tokens for outcome in outcomes]
