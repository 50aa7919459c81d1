"""Memory a rank needs, from the configuration alone, part by part.

Model state: Rajbhandari et al. 2020 (ZeRO), section 3, with what DeepSpeed keeps beyond it. Activations: Korthikanti et
al. 2022, table 2, corrected to what this model's layers really save. GB is 2^30 bytes, as GPU vendors count memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from gpt3d.config.arithmetic import num_microbatches, stage_layers
from gpt3d.config.schema import RunConfig
from gpt3d.model.flops import layer_parameters, norm_parameters
from gpt3d.pipeline.check import check
from gpt3d.pipeline.schedule import all_ranks
from gpt3d.planner.activations import Rank, fullest_moment, largest_weight, layer_activations
from gpt3d.planner.dtypes import BYTES
from gpt3d.planner.partition import gradient_bytes, has_bf16_optimizer, has_own_type, host_bytes, largest

__all__ = ["layer_activations"]  # for those who import all of memory from here

GB = 2**30

# The margin: what no count of tensors shows. Rounded up from what is usually seen on A100 and H100 nodes; not measured.
CONTEXT_GB = 0.75  # CUDA context with its kernels, and cuBLAS's workspaces
NCCL_GB = 0.4  # buffers of one communicator over NVLink or InfiniBand
FRAGMENTATION = 0.04  # holes in the caching allocator's blocks, of everything that comes and goes within a step


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. All on the device but `host`, which is what offloading puts into its machine's memory."""

    parameters: int  # their number, before ZeRO shards them
    weights: int
    gradients: int  # when the rank holds most: of a step with few microbatches that may be before all have come
    optimizer: int
    activations: int
    logits: int
    work: int  # messages, gathered parameters, and what a layer needs beside its activations while it computes
    buffers: int  # buckets of gradients on their way
    buffers_stay: bool  # whether they are there in the optimizer step as well
    margin: int
    update: int  # what the optimizer step needs beyond the state, when activations, logits and work are gone
    missing: int  # gradients that come after that
    host: int

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer states on the device: exact, whatever the batch."""
        return self.weights + self.gradients + self.missing + self.optimizer

    @property
    def step(self) -> int:
        """What the optimizer step needs beyond the memory of what is gone by then: activations, logits, work."""
        gone = self.activations + self.logits + self.work + (0 if self.buffers_stay else self.buffers)
        return max(0, self.update + self.missing - gone)

    @property
    def device(self) -> int:
        """Every tensor on the device at the peak."""
        parts = (self.activations, self.logits, self.work, self.step, self.buffers)
        return self.state - self.missing + sum(parts)

    @property
    def total(self) -> int:
        """What a GPU must have: all tensors, and the margin for the CUDA context, NCCL and fragmentation."""
        return self.device + self.margin


@dataclass(frozen=True)
class StateBytes:
    """Bytes a parameter of weights, gradients and optimizer states on a rank; `shared` are divided by dp."""

    weights: int
    gradients: int
    optimizer: int
    shared: tuple[bool, bool, bool]

    @property
    def whole(self) -> int:
        """Bytes a parameter that every copy of the model holds."""
        return sum(size for size, cut in zip(self._sizes, self.shared, strict=True) if not cut)

    @property
    def divided(self) -> int:
        """Bytes a parameter that the copies divide among them."""
        return sum(self._sizes) - self.whole

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.weights, self.gradients, self.optimizer


def state_bytes(dtype: str, grad_dtype: str, zero_stage: int) -> StateBytes:
    """Mixed-precision Adam: 2 + 2 + 12 with bf16 gradients. ZeRO 1, 2, 3 divide the 12, then the gradient, then all.

    The 12 are fp32 master and two moments. DeepSpeed keeps the master even where the parameter is fp32 already.
    """
    optimizer = 8 if dtype == "fp32" and zero_stage == 0 else 12
    cut = (zero_stage >= 3, zero_stage >= 2, zero_stage >= 1)
    return StateBytes(BYTES[dtype], BYTES[grad_dtype], optimizer, cut)


def stage_parameters(config: RunConfig, stage: int) -> int:
    """Parameters on one rank of this pipeline stage before ZeRO shards them, with padded vocabulary and tied copy."""
    return sum(piece_parameters(config)[stage :: config.parallel.pp])


def piece_parameters(config: RunConfig) -> list[int]:
    """The same for each of the pp x chunks pieces, in model order; a head tied on the embedding's rank is no copy."""
    model, tp = config.model, config.parallel.tp
    rows, layer = model.padded_vocab_size // tp * model.hidden_size, layer_parameters(model, tp)
    counts = [layers * layer for layers in stage_layers(config)]
    counts[0] += rows + (model.max_seq_len * model.hidden_size if model.position == "learned" else 0)
    counts[-1] += norm_parameters(model)
    counts[-1] += 0 if model.tied_embeddings and config.parallel.pp == 1 else rows
    return counts


@cache
def pairs_in_flight(schedule: str, pp: int, chunks: int, microbatches: int) -> list[int]:
    """(microbatch, chunk) pairs whose activations each stage holds at its peak, counted on the schedule itself.

    All schedules but GPipe hold no more after 4 pp microbatches: longer steps are not unrolled.
    """
    if schedule == "gpipe":
        return [microbatches * chunks] * pp
    if pp == 1:
        return [chunks]
    if schedule == "interleaved" and chunks == 1:
        schedule = "1f1b"
    return check(all_ranks(schedule, pp, chunks, min(microbatches, 4 * pp)), pp, chunks).in_flight


def layers_in_flight(config: RunConfig, dp: int, stage: int) -> float:
    """Layers x microbatches whose activations this stage holds at its peak.

    On the first stage of 1F1B all L layers' worth, of the interleaved schedule L (1 + (p-1)/(pv)).
    """
    pp, chunks = config.parallel.pp, config.pipeline.chunks
    count = max(1, num_microbatches(config, dp))  # a batch that doesn't divide is another rule's matter
    held = pairs_in_flight(config.pipeline.schedule, pp, chunks, count)[stage]
    return sum(stage_layers(config)[stage::pp]) * held / chunks


def stage_memory(
    config: RunConfig, dp: int, stage: int, on_cpu: bool = False, flash: bool = True, copy: int | None = None
) -> RankMemory:
    """Bytes of one rank of this pipeline stage: of data-parallel rank `copy`, by default the last, which has most."""
    copy = dp - 1 if copy is None else copy
    zero, precision = config.zero, config.precision
    parameters = stage_parameters(config, stage)
    kinds = state_bytes(precision.dtype, precision.grad_dtype, zero.stage)

    def held(size: int, cut: bool) -> int:
        return -(-parameters * size // dp) if cut else parameters * size

    weights, _, optimizer = map(held, (kinds.weights, kinds.gradients, kinds.optimizer), kinds.shared)
    gradients, update = gradient_bytes(config, dp, parameters), _update(config, dp, stage, on_cpu)
    if zero.offload_optimizer == "cpu":
        optimizer = update = 0
    if zero.offload_param == "cpu":
        weights = 0
    activations, logits, work, missing = fullest_moment(Rank(config, dp, stage, copy, on_cpu, flash))
    work, buffers = work + gathered_parameters(config, dp, stage), zero_buckets(config)
    if zero.offload_optimizer == "cpu" and zero.stage < 3:
        work += largest(config, stage) * BYTES[precision.dtype]  # through which gradients go to the host
    axes = (config.parallel.tp, config.parallel.pp, dp)
    fixed = CONTEXT_GB + NCCL_GB * sum(axis > 1 for axis in axes)
    margin = int(fixed * GB + FRAGMENTATION * (activations + logits + work + buffers))
    return RankMemory(
        parameters, weights, gradients - missing, optimizer, activations, logits, work, buffers, zero.stage == 3,
        margin, update, missing, host_bytes(config, dp, stage, parameters, copy),
    )  # fmt: skip


def _update(config: RunConfig, dp: int, stage: int, on_cpu: bool) -> int:
    """Bytes beyond weights, gradients and optimizer that the optimizer step needs at its peak.

    On CUDA Adam is one kernel; on a CPU torch's goes through the parameters with two fp32 temporaries, which under
    ZeRO are as large as all that this rank updates.
    """
    zero, parameters, grad = config.zero.stage, stage_parameters(config, stage), BYTES[config.precision.grad_dtype]
    if zero == 0:
        temporaries = 8 * largest_weight(config, stage) if on_cpu else 0
        copies = 4 * parameters if grad < 4 else 0  # fp32 gradients; those that are fp32 serve as they are
        return max(parameters * grad if dp > 1 else 0, copies + temporaries)  # replicas reduce one flat copy
    own = -(-parameters // dp)
    temporaries = 8 * own if on_cpu else 0
    if zero < 3 and not has_own_type(config):
        return temporaries  # the fp32 gradients are one flat buffer already
    # Otherwise the rank's part of them is flattened in fp32; of stage 1's whole gradients only that part is left.
    flat = max(4 * own, temporaries) if grad == 4 else 4 * own + temporaries
    return flat - (parameters - own) * grad if zero == 1 else flat


def zero_buckets(config: RunConfig) -> int:
    """Bytes in which DeepSpeed collects gradients before it reduces them.

    Stages 1 and 2 have one during backwards, two with overlap, stage 2's of the parameters' type; stage 3 has one all
    the time. BF16_Optimizer has none.
    """
    zero, precision = config.zero, config.precision
    if zero.stage == 0 or has_bf16_optimizer(config):
        return 0
    size = zero.reduce_bucket_size * BYTES[precision.dtype if zero.stage == 2 else precision.grad_dtype]
    return size * (2 if zero.overlap_comm and zero.stage < 3 else 1)


def gathered_parameters(config: RunConfig, dp: int, stage: int) -> int:
    """Bytes of parameters that are whole under ZeRO-3 while a part of the model computes."""
    zero, p, model = config.zero, config.parallel, config.model
    if zero.stage < 3 or dp == 1:
        return 0
    layer, rows = layer_parameters(model, p.tp), model.padded_vocab_size // p.tp * model.hidden_size
    gathered = layer + max(layer, rows if stage in (0, p.pp - 1) else 0)  # a part at work and the next one
    if p.pp == 1:  # DeepSpeed knows the order of the layers and keeps what is used again soon
        kept = min(zero.max_live_parameters, zero.max_reuse_distance, stage_parameters(config, stage))
        gathered = max(gathered, kept)
    return gathered * BYTES[config.precision.dtype]


def memory_by_stage(config: RunConfig, dp: int, on_cpu: bool = False) -> list[RankMemory]:
    """Bytes of one rank of each pipeline stage."""
    return [stage_memory(config, dp, stage, on_cpu) for stage in range(config.parallel.pp)]


def worst_rank(config: RunConfig, dp: int) -> RankMemory:
    """The rank that needs most on its device."""
    return max(memory_by_stage(config, dp), key=lambda memory: memory.device)


def ranks_a_stage(config: RunConfig, dp: int) -> int:
    """Ranks that hold the same pipeline stage: tp x cp x dp."""
    return config.parallel.tp * config.parallel.cp * dp


def host_by_node(config: RunConfig, dp: int, ranks_a_node: int) -> int:
    """Bytes that offloading puts into the fullest machine. Ranks are numbered stage after stage."""
    stages = [memory.host for memory in memory_by_stage(config, dp) for _ in range(ranks_a_stage(config, dp))]
    return max(sum(stages[first : first + ranks_a_node]) for first in range(0, len(stages), ranks_a_node))


def run_memory(config: RunConfig, dp: int) -> int:
    """Bytes of all ranks together, device and host: what a CPU run takes from its machines' memory."""
    return ranks_a_stage(config, dp) * sum(cpu_bytes_by_stage(config, dp))


def cpu_bytes_by_stage(config: RunConfig, dp: int) -> list[int]:
    """Bytes of one CPU rank of each pipeline stage, without the buckets, whose unwritten part takes no memory."""
    buckets = zero_buckets(config)
    return [memory.device - buckets + memory.host for memory in memory_by_stage(config, dp, on_cpu=True)]


def size(count: float) -> str:
    """Bytes as text: GB of 2^30, MB of 2^20."""
    return f"{count / GB:,.1f} GB" if count >= GB / 10 else f"{count / 2**20:,.1f} MB"
