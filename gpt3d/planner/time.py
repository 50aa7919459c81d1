"""Time of one step, from the configuration and the cluster's data sheet alone. An estimate, not a measurement.

Every operation takes the longer of its arithmetic and its memory traffic; collectives take ring bytes over bandwidth,
less what the runtime hides under compute. The constants are in `machine.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import NamedTuple

from gpt3d.config.arithmetic import num_microbatches, stage_layers
from gpt3d.config.schema import RunConfig
from gpt3d.model.flops import hardware_flops_per_token, model_flops_per_token
from gpt3d.pipeline.schedule import all_ranks
from gpt3d.pipeline.simulate import Timeline, simulate
from gpt3d.planner.dtypes import BYTES
from gpt3d.planner.machine import EXPOSED, HIDDEN, HOP, HOST_ADAM, LATENCY, MEMORY, PASSES, PCIE, Machine
from gpt3d.planner.memory import piece_parameters
from gpt3d.planner.partition import has_own_type
from gpt3d.planner.traffic import sent, zero_traffic

SIMULATED = 20_000  # actions up to which the schedule itself is simulated; beyond that its closed form is used


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by cause, on its slowest stage. They add up: what is hidden under compute is not counted."""

    compute: float
    recompute: float
    bubble: float
    tensor_parallel: float  # exposed collectives over tp, as are the next three
    messages: float  # between pipeline stages
    data_parallel: float  # reduction of gradients
    zero: float  # gathers of parameters
    optimizer: float
    offload: float
    tp_hidden: float = 0.0  # collectives under compute, not part of the total
    dp_hidden: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self)) - self.tp_hidden - self.dp_hidden

    @property
    def exposed(self) -> float:
        """Communication that no compute hides."""
        return self.tensor_parallel + self.messages + self.data_parallel + self.zero + self.offload


@dataclass(frozen=True)
class Work:
    """One layer, or the head, on one tensor-parallel rank for one microbatch: its shape, hashable."""

    tokens: int
    seq_len: int
    hidden: int
    query: int  # of this rank, as are the next three
    kv: int
    ffn: int
    vocab: int
    gated: bool
    tp: int
    sequence_parallel: bool
    split: bool  # zb_h1: the weight gradient comes later than the input gradient
    element: int
    head_dim: int


def work_of(config: RunConfig) -> Work:
    """The shape of this configuration's layers."""
    m, tp = config.model, config.parallel.tp
    return Work(
        config.trainer.micro_batch_size * config.data.seq_len, config.data.seq_len, m.hidden_size,
        m.num_heads * m.head_dim // tp, max(m.num_kv_heads // tp, 1) * m.head_dim, m.ffn_hidden_size // tp,
        m.padded_vocab_size // tp, m.activation == "swiglu", tp, config.parallel.sequence_parallel,
        config.pipeline.schedule == "zb_h1" and config.parallel.pp > 1, BYTES[config.precision.dtype], m.head_dim,
    )  # fmt: skip


def gemm_time(machine: Machine, rows: int, columns: int, depth: int, element: int) -> float:
    """Seconds of a matrix product [rows, depth] x [depth, columns]."""
    efficiency = machine.gemm
    for dim in (rows, columns, depth):
        efficiency *= dim / (dim + machine.gemm_half)
    moved = element * (rows * columns + rows * depth + depth * columns)
    return max(2 * rows * columns * depth / (machine.flops * efficiency), moved / (machine.memory * MEMORY))


class LayerTime(NamedTuple):
    """Seconds of one layer and microbatch."""

    plain: float  # forward compute but for attention's core; the backward takes twice as long
    core: float
    tp_forward: float  # exposed collectives
    tp_backward: float
    tp_hidden: float  # under compute

    @property
    def forward(self) -> float:
        return self.plain + self.core


@cache
def layer_time(machine: Machine, work: Work) -> LayerTime:
    """One layer on its own."""
    w, t = work, work.tokens
    gates = 2 if w.gated else 1
    entrances = [gemm_time(machine, t, width, w.hidden, w.element) for width in (w.query + 2 * w.kv, gates * w.ffn)]
    exits = [gemm_time(machine, t, w.hidden, width, w.element) for width in (w.query, w.ffn)]
    outside = PASSES * w.hidden / (w.tp if w.sequence_parallel else 1)
    # The activation and the rotation read and write theirs once.
    elementwise = t * w.element * (outside + (gates + 1) * w.ffn + 2 * (w.query + w.kv)) / (machine.memory * MEMORY)
    plain = sum(entrances) + sum(exits) + elementwise
    return LayerTime(plain, _core(machine, w), *_collectives(machine, w, entrances))


def _collectives(machine: Machine, work: Work, entrances: list[float]) -> tuple[float, float, float]:
    """Seconds of a layer's collectives over tp: exposed in forward and in backward, and hidden.

    Forward: an all-reduce behind each exit of a parallel region (with SP an all-gather before its entrance and a
    reduce-scatter behind its exit). Backward: the mirror image, at the entrance while the weight gradient is computed.
    SP gathers the entrance's input once more, under the product for the input gradient.
    """
    whole = ring(machine, work)
    half = whole / 2
    if work.tp == 1:
        return 0.0, 0.0, 0.0
    again = half if work.sequence_parallel else 0.0
    if not machine.software.overlaps_tp or work.split:
        return 2 * whole, 2 * (whole + (again if work.split else 0.0)), 0.0
    exposed = hidden = 0.0
    for product in entrances:
        at_exit, at_entrance = (half, half) if work.sequence_parallel else (0.0, whole)
        seen = sum(max(0.0, part - HIDDEN * product) for part in (again, at_entrance))
        exposed += at_exit + seen
        hidden += again + at_entrance - seen
    return 2 * whole, exposed, hidden


def _core(machine: Machine, work: Work) -> float:
    """Seconds of softmax(q k) v, forward: fused, or written out as before FlashAttention."""
    square = 4 * work.tokens * work.seq_len * work.query
    if machine.attention:
        return square / 2 / (machine.flops * machine.attention)  # the causal half
    # The scores are written by the product, read and written by softmax and by dropout, and read by the second product.
    scores = work.tokens * work.seq_len * (work.query // work.head_dim)
    return square / (machine.flops * machine.gemm / 2) + 6 * work.element * scores / (machine.memory * MEMORY)


def ring(machine: Machine, work: Work) -> float:
    """Seconds of one all-reduce over tp of a layer's output, or of the equal reduce-scatter and all-gather."""
    if work.tp == 1:
        return 0.0
    return (
        sent("all-reduce", work.tokens * work.hidden * work.element, work.tp)
        / machine.link(work.tp, machine.gpus_per_node)
        + 2 * LATENCY
    )


@cache
def head_forward(machine: Machine, work: Work) -> float:
    """Seconds of the output layer and the loss, forward."""
    product = gemm_time(machine, work.tokens, work.vocab, work.hidden, work.element)
    return product + 12 * work.tokens * work.vocab / (machine.memory * MEMORY)


@dataclass(frozen=True)
class Pace:
    """Seconds of one layer's forward and backward, recompute and exposed collectives included, and of the head's."""

    forward: float
    backward: float
    head: float
    recompute: float  # part of `backward`
    collectives: float  # part of both
    hidden: float  # collectives under the backward, part of neither


def pace_of(config: RunConfig, machine: Machine) -> Pace:
    """How fast this layout computes."""
    work = work_of(config)
    layer = layer_time(machine, work)
    again = {"none": 0.0, "selective": layer.core, "full": layer.forward}[config.recompute]
    repeated = layer.tp_forward if config.recompute == "full" else 0.0  # the forward's collectives come a second time
    forward = layer.forward + layer.tp_forward
    backward = 2 * layer.forward + again + layer.tp_backward + repeated
    collectives = layer.tp_forward + layer.tp_backward + repeated
    return Pace(forward, backward, head_forward(machine, work), again, collectives, layer.tp_hidden)


def step_time(config: RunConfig, dp: int, machine: Machine, exact: bool = False) -> StepTime:
    """Seconds of one optimizer step. `exact` simulates the schedule action by action where that is small enough."""
    pp, chunks, count = config.parallel.pp, config.pipeline.chunks, num_microbatches(config, dp)
    work, pace, layers = work_of(config), pace_of(config, machine), stage_layers(config)
    one = pace.forward + pace.backward
    loads = [sum(layers[stage::pp]) * one for stage in range(pp)]
    loads[-1] += 3 * pace.head
    slowest = max(loads)
    mine = max(range(pp), key=loads.__getitem__)
    share = count * sum(layers[mine::pp])
    timeline = step_timeline(config, count, pace) if exact else None
    if timeline is not None:
        bubble = timeline.makespan - count * slowest
    else:
        bubble = (sum(loads) - slowest) / chunks * (0.5 if config.pipeline.schedule == "zb_h1" else 1)
    message = 0.0
    if pp > 1:
        sent = work.tokens * work.hidden * work.element / (work.tp if work.sequence_parallel else 1)
        message = sent / machine.link(work.tp * dp * 2) + LATENCY
    compute = share * (one - pace.recompute - pace.collectives) + (3 * count * pace.head if mine == pp - 1 else 0)
    reduced, gathered, hidden = _data_parallel(config, dp, machine, compute)
    optimizer, offload = _update(config, dp, machine, count)
    return StepTime(
        compute=compute,
        recompute=share * pace.recompute,
        bubble=max(0.0, bubble),
        tensor_parallel=share * pace.collectives,
        # Receives are posted one action early and hide in part, but not while the pipeline fills.
        messages=2 * message * (pp - 1 + EXPOSED * count * chunks) if pp > 1 else 0.0,
        data_parallel=reduced,
        zero=gathered,
        optimizer=optimizer,
        offload=offload,
        tp_hidden=share * pace.hidden,
        dp_hidden=hidden,
    )


def step_timeline(config: RunConfig, count: int, pace: Pace, limit: int | None = SIMULATED) -> Timeline | None:
    """The schedule that the executor runs, with the time of each piece on it; None if it is too long to unroll."""
    kind, pp, chunks = config.pipeline.schedule, config.parallel.pp, config.pipeline.chunks
    if pp == 1 or (limit is not None and count * pp * chunks > limit):
        return None
    pieces = stage_layers(config)
    forwards, backwards = [n * pace.forward for n in pieces], [n * pace.backward for n in pieces]
    forwards[-1], backwards[-1] = forwards[-1] + pace.head, backwards[-1] + 2 * pace.head
    kind = "1f1b" if kind == "interleaved" and chunks == 1 else kind
    return simulate(all_ranks(kind, pp, chunks, count), forwards, backwards)


def _data_parallel(config: RunConfig, dp: int, machine: Machine, compute: float) -> tuple[float, float, float]:
    """Seconds of gradient reduction and of parameter gathers that are exposed, and of both that ZeRO-2 and 3 hide."""
    if dp == 1:
        return 0.0, 0.0, 0.0
    stage, tp, pieces = config.zero.stage, config.parallel.tp, piece_parameters(config)
    parameters = max(sum(pieces[rank :: config.parallel.pp]) for rank in range(config.parallel.pp))
    passes = list(zero_traffic(config, dp, stage, parameters))
    moved = {kind: sent(kind, times * each, dp) for kind, each, times in passes}
    total, local = sum(moved.values()), max(1, machine.gpus_per_node // tp)
    # A ring goes around all nodes for each bucket; in an all-reduce twice.
    rings = sum(times * (2 if kind == "all-reduce" else 1) for kind, _, times in passes)
    rounds = -(-parameters // config.zero.reduce_bucket_size) * rings * (dp // local)
    seconds = total / machine.link(dp * tp, local) + HOP * rounds
    hidden = min(seconds, HIDDEN * compute) if stage >= 2 and config.zero.overlap_comm else 0.0
    share = 1 - moved.get("all-gather", 0) / total
    return (seconds - hidden) * share, (seconds - hidden) * (1 - share), hidden


def _update(config: RunConfig, dp: int, machine: Machine, count: int) -> tuple[float, float]:
    """Seconds of the optimizer, and of what offloading adds."""
    zero, pp = config.zero, config.parallel.pp
    pieces = piece_parameters(config)
    held = max(sum(pieces[stage::pp]) for stage in range(pp)) / (dp if zero.stage >= 1 else 1)
    weight, gradient = BYTES[config.precision.dtype], BYTES[config.precision.grad_dtype]
    optimizer, offload = held * 2 * (12 + gradient) / (machine.memory * MEMORY), 0.0
    if zero.offload_optimizer == "cpu":
        optimizer, offload = 0.0, held * ((gradient + weight) / PCIE + 28 / HOST_ADAM)
        # DeepSpeed adds each microbatch to the sum on the host, there and back; stage 2's fp32 sums stay on the GPU.
        summed = held if zero.stage == 3 or (zero.stage == 2 and has_own_type(config)) else 0
        offload += 2 * (count - 1) * summed * gradient / PCIE
    if zero.offload_param == "cpu":
        offload += 2 * count * held * weight / PCIE
    return optimizer, offload


def mfu(config: RunConfig, ranks: int, seconds: float, machine: Machine, causal_half: bool = False) -> float:
    """Model FLOPs over the peak of all GPUs, counting attention's full square (Narayanan et al. 2021) or half."""
    return _flops(config, model_flops_per_token(config.model, config.data.seq_len, causal_half)) / (
        seconds * ranks * machine.flops
    )


def hfu(config: RunConfig, ranks: int, seconds: float, machine: Machine, causal_half: bool = False) -> float:
    """The same with what recompute does again."""
    each = hardware_flops_per_token(config.model, config.data.seq_len, config.recompute, causal_half)
    return _flops(config, each) / (seconds * ranks * machine.flops)


def _flops(config: RunConfig, per_token: int) -> int:
    return per_token * config.trainer.global_batch_size * config.data.seq_len
