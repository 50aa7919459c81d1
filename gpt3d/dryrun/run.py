"""One step of one rank, without the others and without a device: the same layers, executor and collectives as training.

Tensors are on torch's meta device and the process group is torch's fake one: every operation only works out shapes.
What DeepSpeed does under ZeRO 1 to 3 is not run; it is taken from the planner's arithmetic and named as derived.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gpt3d.config.arithmetic import num_microbatches
from gpt3d.config.schema import RunConfig
from gpt3d.dryrun.engine import ForwardBackwardEngine, MetaEngine
from gpt3d.dryrun.kernels import fused_kernels
from gpt3d.dryrun.tracker import Product, Tracker, module_name
from gpt3d.dryrun.world import fake_world
from gpt3d.model.build import build_chunks
from gpt3d.parallel.layout import Layout, Sizes, create_layout
from gpt3d.parallel.placement import placement_of
from gpt3d.pipeline.executor import Executor, Microbatch
from gpt3d.pipeline.recorder import Recorder
from gpt3d.pipeline.schedule import Action, Kind
from gpt3d.pipeline.transport import connect
from gpt3d.planner.dtypes import BYTES
from gpt3d.planner.memory import gathered_parameters, stage_memory, zero_buckets
from gpt3d.planner.partition import largest
from gpt3d.planner.traffic import Call, step_traffic
from gpt3d.zero.engine import DTYPES, Chunks

META = torch.device("meta")
Key = TypeVar("Key")


@dataclass(frozen=True)
class DryRun:
    """What one rank does in one step: FLOPs, and bytes. `counted` of its `microbatches` were run; the rest repeat."""

    rank: int
    stage: int
    dp: int
    zero: int
    device: str
    parameters: int
    microbatches: int
    counted: int
    flops: dict[Product, int]
    calls: dict[Call, int]
    bytes: dict[Call, int]
    memory: dict[str, int]  # live tensors by kind, when they are most
    peak_phase: str
    seconds: float

    @property
    def peak(self) -> int:
        return sum(self.memory.values())


def dry_run(config: RunConfig, dp: int, rank: int) -> DryRun:
    """Run one step of `rank` of tp x dp x pp ranks. For a configuration that has passed the rules."""
    begun, p, total = time.perf_counter(), config.parallel, num_microbatches(config, dp)
    sizes = Sizes(tp=p.tp, cp=p.cp, dp=dp, pp=p.pp)
    device, counted = "cpu" if config.cluster.device == "cpu" else "cuda", microbatches_to_run(config, dp)
    tracker = Tracker("meta")
    with fake_world(rank, sizes.world), fused_kernels(device), tracker:
        layout = create_layout(
            sizes, META, sequence_parallel=p.sequence_parallel, num_kv_heads=config.model.num_kv_heads
        )
        one = _Rank(config, layout, tracker, fused=device == "cuda")
        one.forward_backward(counted)
        flops, calls, moved = (_times(c, total, counted) for c in (tracker.flops, tracker.calls, tracker.bytes))
        stage, memory = layout.at.pp, tracker.at_peak
        if config.zero.stage == 0:
            tracker.forget_counts()
            one.engine.step(0.0)
            calls, moved, memory = calls + tracker.calls, moved + tracker.bytes, tracker.at_peak
        else:
            derived = step_traffic(config, dp, stage)
            calls, moved = calls + derived.calls, moved + derived.bytes
            memory |= _deepspeed(config, dp, stage, layout.at.dp, memory)
        return DryRun(
            rank, stage, dp, config.zero.stage, device, one.parameters, total, counted, dict(flops), dict(calls),
            dict(moved), {k: v for k, v in memory.items() if v}, tracker.peak_phase, time.perf_counter() - begun,
        )  # fmt: skip


def _deepspeed(config: RunConfig, dp: int, stage: int, copy: int, memory: dict[str, int]) -> dict[str, int]:
    """What DeepSpeed holds by the planner's arithmetic, beside what was counted."""
    state = stage_memory(config, dp, stage, on_cpu=config.cluster.device == "cpu", copy=copy)
    gathered = gathered_parameters(config, dp, stage)
    buckets = zero_buckets(config) if config.zero.stage == 3 else 0  # the others' are counted
    passing = gathered + sum(memory.get(kind, 0) for kind in ("activations", "logits", "work", "messages"))
    offloads = config.zero.offload_optimizer == "cpu" and config.zero.stage < 3
    return {
        "offload buffer": largest(config, stage) * BYTES[config.precision.dtype] if offloads else 0,
        "weights": state.weights, "gradients": state.gradients, "optimizer": state.optimizer,
        "buckets": buckets, "gathered": gathered, "optimizer step": max(0, state.update + state.missing - passing),
    }  # fmt: skip


def microbatches_to_run(config: RunConfig, dp: int) -> int:
    """Enough to reach the steady state, which repeats. GPipe has none: all of them."""
    count, pp = num_microbatches(config, dp), config.parallel.pp
    steady = {"1f1b": pp + 1, "gpipe": count}.get(config.pipeline.schedule, 2 * pp)
    return min(count, steady)


def _times(counter: Counter[Key], numerator: int, denominator: int) -> Counter[Key]:
    """Every microbatch does the same."""
    return Counter({key: count * numerator // denominator for key, count in counter.items()})


class _Phases(Recorder):
    """Tells the tracker which action the executor runs."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def begin(self, action: Action) -> None:
        self.tracker.phase = "forward" if action.kind is Kind.FORWARD else "backward"

    def end(self) -> None:
        self.tracker.phase = "between actions"


class _Rank:
    """The parts of a training rank, built as the trainer builds them, with the tracker told what is what."""

    def __init__(self, config: RunConfig, layout: Layout, tracker: Tracker, fused: bool) -> None:
        self.config, self.tracker = config, tracker
        module = Chunks(build_chunks(config, layout))
        self.parameters = sum(p.numel() for p in module.parameters())
        make = MetaEngine if config.zero.stage == 0 else ForwardBackwardEngine
        self.engine = make(config, layout, module, fused)
        dtype, chunks = DTYPES[config.precision.dtype], config.pipeline.chunks
        s, b, model = config.data.seq_len, config.trainer.micro_batch_size, config.model
        shape = (s // (layout.tp.size if layout.sequence_parallel else 1), b, model.hidden_size)
        transport = connect(layout, shape, dtype, ring=chunks > 1)
        self.executor = Executor(layout, self.engine, transport, config.pipeline.schedule, chunks)
        self.executor.recorder = _Phases(tracker)
        axes = {"tp": layout.tp, "dp": layout.dp, "model": layout.model, "kv": layout.kv, "ends": layout.ends}
        handles = [(group.handle, axis) for axis, group in axes.items()]
        for channel in (transport.send_activation, transport.receive_activation, transport.send_gradient,
                        transport.receive_gradient):  # fmt: skip
            handles.append((channel.handle if channel else None, "pp"))
        tracker.groups = {handle.group_name: axis for handle, axis in handles if handle is not None}
        rows = model.padded_vocab_size // layout.tp.size
        tracker.logits = (s * b * rows, rows)
        for p in module.parameters():
            tracker.tag(p, "weights")
            if p.dim() == 2:
                tracker.know(p, module_name(placement_of(p).name))
            if config.zero.stage == 0:
                p.register_post_accumulate_grad_hook(lambda p: tracker.tag(p.grad, "gradients"))
        for x in self.engine.optimizer_tensors():
            tracker.tag(x, "optimizer")
        tracker.rename("work", "inputs")

    def forward_backward(self, microbatches: int) -> None:
        """The step up to the optimizer."""
        shape = (self.config.trainer.micro_batch_size, self.config.data.seq_len)

        def ids() -> Tensor:
            return torch.empty(shape, dtype=torch.long, device=META)

        rows = [Microbatch(ids(), ids(), seed) for seed in range(microbatches)]
        self.tracker.rename("work", "inputs")
        self.tracker.start_peak()
        with saved_tensors_hooks(self.tracker.saved, lambda x: x):
            self.executor.train(rows, 1.0)
        self.tracker.phase = "optimizer"
