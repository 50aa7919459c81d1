"""Time of one step, from the configuration and the cluster's data sheet alone. An estimate, not a measurement.

Every operation takes the longer of its arithmetic and its memory traffic; collectives take ring bytes over bandwidth.
The constants below have a physical meaning and hold for all models and layouts alike. Those without another source were
set on every second of the published A100 and H100 runs of 2021 to 2024 that `benchmarks/planner.py` reads; it judges
them by the others. Newer kernels than those runs had are faster, attention on Hopper most of all.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

from gpt3d.config.arithmetic import num_microbatches, stage_layers
from gpt3d.config.schema import RunConfig
from gpt3d.model.flops import model_flops_per_token
from gpt3d.pipeline.schedule import all_ranks
from gpt3d.pipeline.simulate import simulate
from gpt3d.planner.hardware import lookup
from gpt3d.planner.memory import BYTES, piece_parameters
from gpt3d.planner.traffic import zero_bytes

# Of the dense peak, what a large matrix product and fused attention reach: on Ampere, and on Hopper and later, whose
# clocks fall under load and whose peak torch's attention kernels are further from.
GEMM, HOPPER_GEMM = 0.80, 0.61
ATTENTION, HOPPER_ATTENTION = 0.30, 0.17
HOPPER_TFLOPS = 500  # peaks above this are Hopper's or later
GEMM_HALF = 230  # a dim this long (rows, columns or depth) halves what a product reaches: tiles are not filled
PASSES = 12  # times that norms and residual sums of a layer move an activation of the hidden size
MEMORY = 0.73  # of the data sheet's memory bandwidth
LINK = 0.80  # of the data sheet's bandwidth per direction, for a ring over large buffers
LATENCY = 12e-6  # assumed: seconds until a collective or message starts to move
EXPOSED = 0.12  # part of a pipeline message in the steady state that no compute hides
HIDDEN = 0.7  # part of the compute under which overlapped ZeRO traffic can hide
PCIE = 25e9  # PCIe 4.0 x16, 32 GB/s, less protocol: bytes/s between a GPU and its host, in one direction
HOST_ADAM = 20e9  # assumed: bytes/s of states that a GPU's share of its host can update
SIMULATED = 20_000  # actions up to which the schedule itself is simulated; beyond that its closed form is used


@dataclass(frozen=True)
class Machine:
    """Figures of one GPU and its links: FLOP/s and bytes/s."""

    flops: float
    memory: float
    intra: float
    inter: float
    gpus_per_node: int
    gemm: float
    attention: float

    def link(self, group: int) -> float:
        """Bytes/s of a ring over ranks that span `group` consecutive GPUs."""
        return LINK * (self.intra if group <= self.gpus_per_node else self.inter)


def machine_of(config: RunConfig) -> Machine | None:
    """The cluster's figures; None if one is not known."""
    cluster = config.cluster
    gpu = lookup(cluster.gpu) if cluster.gpu else None
    peak = cluster.peak_tflops or (gpu.bf16_tflops if gpu else None)
    intra, inter, count = cluster.intra_node_gb_per_s, cluster.inter_node_gb_per_s, cluster.gpus_per_node
    if gpu is None or peak is None or intra is None or inter is None or count is None:
        return None
    rate = peak * 1e12 / (2 if config.precision.dtype == "fp32" else 1)  # TF32 runs at half the bf16 rate
    reached = (HOPPER_GEMM, HOPPER_ATTENTION) if peak > HOPPER_TFLOPS else (GEMM, ATTENTION)
    return Machine(rate, gpu.memory_gb_per_s * 1e9, intra * 1e9, inter * 1e9, count, *reached)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by cause. They add up: what is hidden under compute is not counted."""

    compute: float
    recompute: float
    tensor_parallel: float
    bubble: float
    messages: float
    data_parallel: float
    optimizer: float
    offload: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


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
    element: int
    head_dim: int
    flash: bool


def work_of(config: RunConfig, flash: bool = True) -> Work:
    """The shape of this configuration's layers."""
    m, tp = config.model, config.parallel.tp
    return Work(
        config.trainer.micro_batch_size * config.data.seq_len, config.data.seq_len, m.hidden_size,
        m.num_heads * m.head_dim // tp, max(m.num_kv_heads // tp, 1) * m.head_dim, m.ffn_hidden_size // tp,
        m.padded_vocab_size // tp, m.activation == "swiglu", tp, config.parallel.sequence_parallel,
        BYTES[config.precision.dtype], m.head_dim, flash,
    )  # fmt: skip


def gemm_time(machine: Machine, rows: int, columns: int, depth: int, element: int) -> float:
    """Seconds of a matrix product [rows, depth] x [depth, columns]."""
    efficiency = machine.gemm
    for dim in (rows, columns, depth):
        efficiency *= dim / (dim + GEMM_HALF)
    moved = element * (rows * columns + rows * depth + depth * columns)
    return max(2 * rows * columns * depth / (machine.flops * efficiency), moved / (machine.memory * MEMORY))


@cache
def layer_forward(machine: Machine, work: Work) -> tuple[float, float, float]:
    """Seconds of one layer's forward: (compute without attention's core, the core, tensor-parallel communication)."""
    w, t = work, work.tokens
    gates = 2 if w.gated else 1
    products = (
        (t, w.query + 2 * w.kv, w.hidden), (t, w.hidden, w.query), (t, gates * w.ffn, w.hidden), (t, w.hidden, w.ffn),
    )  # fmt: skip
    matrices = sum(gemm_time(machine, *shape, w.element) for shape in products)
    outside = PASSES * w.hidden / (w.tp if w.sequence_parallel else 1)
    # The activation and the rotation read and write theirs once.
    elementwise = t * w.element * (outside + (gates + 1) * w.ffn + 2 * (w.query + w.kv)) / (machine.memory * MEMORY)
    return matrices + elementwise, _core(machine, w), 2 * ring(machine, w)


def _core(machine: Machine, work: Work) -> float:
    """Seconds of softmax(q k) v, forward: fused, or written out as before FlashAttention."""
    square = 4 * work.tokens * work.seq_len * work.query
    if work.flash:
        return square / 2 / (machine.flops * machine.attention)  # the causal half
    # The scores are written by the product, read and written by softmax and by dropout, and read by the second product.
    scores = work.tokens * work.seq_len * (work.query // work.head_dim)
    return square / (machine.flops * machine.gemm / 2) + 6 * work.element * scores / (machine.memory * MEMORY)


def ring(machine: Machine, work: Work) -> float:
    """Seconds of one all-reduce over tp of a layer's output, or of the equal reduce-scatter and all-gather."""
    if work.tp == 1:
        return 0.0
    bytes_sent = 2 * (work.tp - 1) / work.tp * work.tokens * work.hidden * work.element
    return bytes_sent / machine.link(work.tp) + 2 * LATENCY


@cache
def head_forward(machine: Machine, work: Work) -> float:
    """Seconds of the output layer and the loss, forward."""
    product = gemm_time(machine, work.tokens, work.vocab, work.hidden, work.element)
    return product + 12 * work.tokens * work.vocab / (machine.memory * MEMORY)


def step_time(config: RunConfig, dp: int, machine: Machine, exact: bool = False, flash: bool = True) -> StepTime:
    """Seconds of one optimizer step. `exact` simulates the schedule action by action where that is small enough.

    Without `flash` attention is not fused, as in runs of before 2022.
    """
    pp, chunks, count = config.parallel.pp, config.pipeline.chunks, num_microbatches(config, dp)
    work = work_of(config, flash)
    plain, core, communication = layer_forward(machine, work)
    again = {"none": 0.0, "selective": core, "full": plain + core}[config.recompute]
    layers = stage_layers(config)
    head = head_forward(machine, work)
    # The backward takes twice the forward, and under full recompute the forward's collectives come a third time.
    rings = 3 if config.recompute == "full" else 2
    one = 3 * (plain + core) + again + rings * communication
    loads = [sum(layers[stage::pp]) * one for stage in range(pp)]
    loads[-1] += 3 * head
    slowest = max(loads)
    busy = count * slowest
    mine = max(range(pp), key=loads.__getitem__)
    share = sum(layers[mine::pp])
    message = 0.0
    if pp > 1:
        sent = work.tokens * work.hidden * work.element / (work.tp if work.sequence_parallel else 1)
        message = sent / machine.link(work.tp * dp * 2) + LATENCY
    if exact and pp > 1 and count * pp * chunks <= SIMULATED:
        bubble = _simulated(config, count, plain + core + communication, one, head) - busy
    else:
        bubble = (sum(loads) - slowest) / chunks * (0.5 if config.pipeline.schedule == "zb_h1" else 1)
    compute = count * (3 * (plain + core) * share + (3 * head if mine == pp - 1 else 0))
    return StepTime(
        compute=compute,
        recompute=count * again * share,
        tensor_parallel=count * rings * communication * share,
        bubble=max(0.0, bubble),
        # Receives are posted one action early and hide in part, but not while the pipeline fills.
        messages=2 * message * (pp - 1 + EXPOSED * count * chunks) if pp > 1 else 0.0,
        data_parallel=_data_parallel(config, dp, machine, compute),
        **_update(config, dp, machine, count),
    )


def _simulated(config: RunConfig, count: int, forward: float, one: float, head: float) -> float:
    """Makespan of the schedule that the executor runs, with the times of each piece."""
    pieces = stage_layers(config)
    forwards, backwards = [n * forward for n in pieces], [n * (one - forward) for n in pieces]
    forwards[-1], backwards[-1] = forwards[-1] + head, backwards[-1] + 2 * head
    kind, pp, chunks = config.pipeline.schedule, config.parallel.pp, config.pipeline.chunks
    kind = "1f1b" if kind == "interleaved" and chunks == 1 else kind
    return simulate(all_ranks(kind, pp, chunks, count), forwards, backwards).makespan


def _data_parallel(config: RunConfig, dp: int, machine: Machine, compute: float) -> float:
    """Exposed seconds of gradient reduction and parameter gathers."""
    if dp == 1:
        return 0.0
    span = dp * config.parallel.tp
    # The GPUs of a node share out a ring that leaves it: each carries its own tp rank's part.
    seconds = zero_bytes(config, dp, config.zero.stage) / machine.link(span)
    overlapped = config.zero.stage >= 2 and config.zero.overlap_comm
    return max(0.0, seconds - HIDDEN * compute) if overlapped else seconds


def _update(config: RunConfig, dp: int, machine: Machine, count: int) -> dict[str, float]:
    """Seconds of the optimizer and of what offloading adds."""
    zero, pp = config.zero, config.parallel.pp
    pieces = piece_parameters(config)
    held = max(sum(pieces[stage::pp]) for stage in range(pp)) / (dp if zero.stage >= 1 else 1)
    weight, gradient = BYTES[config.precision.dtype], BYTES[config.precision.grad_dtype]
    optimizer, offload = held * 2 * (12 + gradient) / (machine.memory * MEMORY), 0.0
    if zero.offload_optimizer == "cpu":
        optimizer, offload = 0.0, held * ((gradient + weight) / PCIE + 28 / HOST_ADAM)
    if zero.offload_param == "cpu":
        offload += 2 * count * held * weight / PCIE
    return {"optimizer": optimizer, "offload": offload}


def mfu(config: RunConfig, ranks: int, seconds: float, machine: Machine, causal_half: bool = False) -> float:
    """Model FLOPs over the peak of all GPUs, counting attention's full square (Narayanan et al. 2021) or half."""
    tokens = config.trainer.global_batch_size * config.data.seq_len
    flops = model_flops_per_token(config.model, config.data.seq_len, causal_half) * tokens
    return flops / (seconds * ranks * machine.flops)
