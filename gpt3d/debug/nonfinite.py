"""Finds the module where the first NaN or infinity comes from, forward or backward, and ends the run with its name.

Every module's output is looked at as it appears, and every gradient on its way back, so the first bad tensor that a
rank meets was made there: all that went in was finite. A bad message from the next stage is that stage's to report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gpt3d.parallel.layout import Layout
from gpt3d.parallel.placement import placement_of
from gpt3d.pipeline.schedule import Action, Kind

PEER_SECONDS = 2.0  # the rank with the bad weight speaks before its TP peers, who see the same sum
NEIGHBOUR_SECONDS = 5.0  # a stage that sent something bad and knows it ends the run within this time


class NonFiniteFound(RuntimeError):
    """The message names module, kind, step, microbatch and rank."""

    show_traceback = False


class NonFiniteFinder:
    """Hooks on all modules of this rank; `step` (from 1) and the running action are for the message.

    Without `backward` gradients are left alone: fp16's loss scaling overflows them on purpose.
    """

    def __init__(self, module: nn.Module, layout: Layout, backward: bool) -> None:
        self.layout, self.backward = layout, backward
        self.step, self.action = 0, Action(Kind.FORWARD, 0, 0)
        for chunk in module.chunks:  # type: ignore[union-attr]
            chunk.register_forward_pre_hook(self._check_received, prepend=True)
            for path, part in chunk.named_modules():
                name, leaf = canonical_name(path, part), not any(part.children())
                part.register_forward_hook(self._after_forward(name, path, part), prepend=True)
                if leaf and backward:
                    part.register_forward_pre_hook(self._watch_inputs(name))
            if backward:
                for p in chunk.parameters():
                    p.register_hook(self._weight_gradient(placement_of(p).name))

    def begin(self, action: Action) -> None:
        """An action of the pipeline begins."""
        self.action = action

    def end(self) -> None:
        """It is over."""

    def _check_received(self, chunk: nn.Module, inputs: Any) -> None:
        for x in _tensors(inputs):
            if _bad(x):
                self._neighbour("activation")

    def _after_forward(self, name: str, path: str, part: nn.Module) -> Callable[..., None]:
        own = list(part.named_parameters(recurse=False))

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if _bad(tensor):
                    weights = [f"{placement_of(p).name} holds {_count(p)}" for _, p in own if _bad(p)]
                    self._found(f"{name} gave {_count(tensor)} in its output, from finite input", weights)
                if self.backward and tensor.requires_grad:
                    self._watch(tensor, "output", name if path else "")

        return hook

    def _watch_inputs(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            for tensor in _tensors(inputs):
                if tensor.requires_grad:
                    self._watch(tensor, "input", name)

        return hook

    def _watch(self, tensor: Tensor, side: str, name: str) -> None:
        """Look at the gradient of `tensor`, which is a module's `side`; one look, however many modules it passes."""
        roles: list[tuple[str, str]] | None = getattr(tensor, "_nonfinite_roles", None)
        if roles is not None:
            roles.append((side, name))
            return
        roles = tensor._nonfinite_roles = [(side, name)]  # type: ignore[attr-defined]
        tensor.register_hook(lambda grad: self._gradient(grad, roles))

    def _gradient(self, grad: Tensor, roles: list[tuple[str, str]]) -> None:
        if not _bad(grad):
            return
        if ("output", "") in roles:  # of the whole stage: it came from the next one
            self._neighbour("gradient")
        consumers = [name for side, name in roles if side == "input"]
        if consumers:
            self._found(f"{consumers[-1]} gave {_count(grad)} in the gradient of its input", [])
        after = next(name for side, name in roles if side == "output")
        parent = after.rpartition(".")[0] or "the stage"
        self._found(f"{parent} gave {_count(grad)} in the gradient of what it computes from {after}", [])

    def _weight_gradient(self, name: str) -> Callable[[Tensor | None], None]:
        def hook(grad: Tensor | None) -> None:  # None in the first half of a split backward
            if grad is not None and _bad(grad):
                module = name.rpartition(".")[0]
                self._found(f"{module} gave {_count(grad)} in the gradient of its weight {name}", [])

        return hook

    def _found(self, what: str, weights: list[str]) -> None:
        tp = self.layout.tp
        if tp.size > 1 and not weights:
            time.sleep(PEER_SECONDS)
            what += f"; TP sums over ranks {', '.join(map(str, tp.ranks))}, so it may be another one's part"
        raise NonFiniteFound(f"{self._place()}: {what}" + "".join(f"; {weight}" for weight in weights))

    def _neighbour(self, message: str) -> None:
        time.sleep(NEIGHBOUR_SECONDS)
        raise NonFiniteFound(
            f"{self._place()}: the {message} received from the neighbouring stage is not finite, and that stage found "
            "nothing: it was damaged on the way"
        )

    def _place(self) -> str:
        at, action = self.layout.at, self.action
        phase = "forward" if action.kind is Kind.FORWARD else "backward"
        return (
            f"debug.find_nan: step {self.step}, {phase} of microbatch {action.microbatch}, rank {self.layout.rank} "
            f"(TP {at.tp}, DP {at.dp}, PP stage {at.pp}, chunk {action.chunk})"
        )


def canonical_name(path: str, part: nn.Module) -> str:
    """A module's name as in checkpoints: the same on every rank, in every layout."""
    parameters = list(part.parameters(recurse=False))
    if parameters and not any(part.children()):
        return placement_of(parameters[0]).name.rpartition(".")[0]
    return path or "the stage"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _bad(tensor: Tensor) -> bool:
    return not bool(torch.isfinite(tensor.detach()).all())


def _count(tensor: Tensor) -> str:
    nan, inf = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
    parts = [f"{n:,} {name}" for n, name in ((nan, "NaN"), (inf, "infinite")) if n]
    return f"{' and '.join(parts)} of {tensor.numel():,} numbers"
