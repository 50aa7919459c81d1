"""Memory a rank needs, from the configuration alone, part by part.

Model state: Rajbhandari et al. 2020 (ZeRO), section 3, with what DeepSpeed keeps beyond it. Activations: Korthikanti et
al. 2022, table 2, corrected to what this model's layers really save. GB is 2^30 bytes, as GPU vendors count memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from gpt3d.config.arithmetic import num_microbatches, stage_layers
from gpt3d.config.schema import ModelConfig, RunConfig
from gpt3d.model.flops import layer_parameters, norm_parameters
from gpt3d.pipeline.check import check
from gpt3d.pipeline.schedule import all_ranks

GB = 2**30
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

# The margin: what no count of tensors shows. Rounded up from what is usually seen on A100 and H100 nodes; not measured.
CONTEXT_GB = 0.75  # CUDA context with its kernels, and cuBLAS's workspaces
NCCL_GB = 0.4  # buffers of one communicator over NVLink or InfiniBand
FRAGMENTATION = 0.04  # holes in the caching allocator's blocks, of everything that comes and goes within a step


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. All on the device but `host`, which is what offloading puts into its machine's memory."""

    parameters: int  # their number, before ZeRO shards them
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    margin: int
    update: int  # fp32 copies of gradients while the optimizer steps, when activations and logits are gone
    host: int

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer states on the device: exact, whatever the batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def step(self) -> int:
        """What the optimizer step needs beyond the memory of the activations and logits, which are gone by then."""
        return max(0, self.update - self.activations - self.logits)

    @property
    def device(self) -> int:
        """Every tensor on the device at the peak."""
        return self.state + self.activations + self.logits + self.step + self.buffers

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


def layer_activations(
    model: ModelConfig,
    micro_batch: int,
    seq_len: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    element: int = 2,
    flash: bool = True,
    on_cpu: bool = False,
) -> int:
    """Bytes that one layer keeps of one microbatch for its backward pass; `element` is the size of a number.

    With 2-byte numbers, ffn 4h, dropout and no flash attention this is sbh(34 + 5as/h); flash attention never holds the
    5as/h part, the attention matrix and its dropout mask.
    """
    tokens, h = micro_batch * seq_len, model.hidden_size
    outside = tp if sequence_parallel else 1
    if recompute == "full":
        return tokens * h * element // outside
    query, kv = model.num_heads * model.head_dim // tp, max(model.num_kv_heads // tp, 1) * model.head_dim
    # Inputs of two norms, of QKV and of the MLP, and two 1-byte dropout masks: whole on every tp rank without SP.
    whole = 2 * (h * element + _norm(model, element, on_cpu)) + (2 * h if model.hidden_dropout else 0)
    # The output of QKV, in one piece, and the core's output; the fused kernel keeps rotated queries and keys as well.
    rotated = query + kv if model.position == "rope" and recompute == "none" else 0
    attention = (2 * query + 2 * kv + rotated) * element
    # GELU keeps its input and output; SwiGLU gate, up, silu(gate) and their product.
    mlp = (4 if model.activation == "swiglu" else 2) * model.ffn_hidden_size // tp * element
    matrix = 0
    if not flash and recompute == "none":
        scores = model.num_heads // tp * seq_len
        matrix = scores * (2 * element + 1 if model.attention_dropout else element)
    return tokens * (whole // outside + attention + mlp + matrix)


def _norm(model: ModelConfig, element: int, on_cpu: bool) -> int:
    """Bytes a token that a norm keeps: its input; torch's RMSNorm on a CPU keeps that and the result, both in fp32."""
    return model.hidden_size * (8 if on_cpu and model.norm == "rmsnorm" else element)


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


def stage_memory(config: RunConfig, dp: int, stage: int, on_cpu: bool = False, flash: bool = True) -> RankMemory:
    """Bytes of one rank of this pipeline stage."""
    zero, precision = config.zero, config.precision
    parameters = stage_parameters(config, stage)
    kinds = state_bytes(precision.dtype, precision.grad_dtype, zero.stage)

    def held(size: int, cut: bool) -> int:
        return -(-parameters * size // dp) if cut else parameters * size

    weights, gradients, optimizer = map(held, (kinds.weights, kinds.gradients, kinds.optimizer), kinds.shared)
    # The update works on fp32 gradients of what this rank updates; an fp32 accumulator that isn't sharded serves as is.
    update = 0 if kinds.gradients == 4 and zero.stage < 2 else held(4, zero.stage >= 1)
    host = 0
    if zero.offload_optimizer == "cpu":
        host, optimizer, update = optimizer, 0, 0
        # From stage 2 on the reduced gradients go to the host as well, where the update happens.
        if zero.stage >= 2:
            host, gradients = host + gradients, 0
    if zero.offload_param == "cpu":
        host, weights = host + weights, 0
    activations = _activations(config, dp, stage, on_cpu, flash)
    logits = _logits(config, dp, stage)
    buffers = _buffers(config, stage)
    axes = (config.parallel.tp, config.parallel.pp, dp)
    fixed = CONTEXT_GB + NCCL_GB * sum(axis > 1 for axis in axes)
    margin = int(fixed * GB + FRAGMENTATION * (activations + logits + buffers))
    return RankMemory(
        parameters, weights, gradients, optimizer, activations, logits, buffers, margin, update, host
    )  # fmt: skip


def _activations(config: RunConfig, dp: int, stage: int, on_cpu: bool, flash: bool) -> int:
    """What the layers keep of the microbatches in flight, and the layer that is being computed again."""
    tp, element = config.parallel.tp, BYTES[config.precision.dtype]
    micro, seq, sp = config.trainer.micro_batch_size, config.data.seq_len, config.parallel.sequence_parallel and tp > 1

    def one_layer(recompute: str) -> int:
        return layer_activations(config.model, micro, seq, tp, sp, recompute, element, flash, on_cpu)

    kept = int(layers_in_flight(config, dp, stage) * one_layer(config.recompute))
    kept += one_layer("none") if config.recompute == "full" else 0
    if stage < config.parallel.pp - 1:
        return kept
    # The final norm's input and output.
    norm = config.model.hidden_size * element + _norm(config.model, element, on_cpu)
    return kept + (1 + _heads_in_flight(config, dp)) * (micro * seq * norm // (tp if sp else 1))


def _heads_in_flight(config: RunConfig, dp: int) -> int:
    """Microbatches beyond the one at work whose head still holds something: all under GPipe, which keeps the logits;
    those whose weight gradient is to come under zb_h1, which keeps the logits' gradient."""
    others, kind = max(0, num_microbatches(config, dp) - 1), config.pipeline.schedule
    return others if kind == "gpipe" else min(config.parallel.pp - 1, others) if kind == "zb_h1" else 0


def _logits(config: RunConfig, dp: int, stage: int) -> int:
    """Logits on the last stage: in fp32, and beside that in the compute type while they are made or differentiated."""
    if stage < config.parallel.pp - 1:
        return 0
    element, tokens = BYTES[config.precision.dtype], config.trainer.micro_batch_size * config.data.seq_len
    numbers = tokens * (config.model.padded_vocab_size // config.parallel.tp)
    kept = 4 if config.pipeline.schedule == "gpipe" else element
    return numbers * (4 + (element if element < 4 else 0) + _heads_in_flight(config, dp) * kept)


def zero_buffers(config: RunConfig, stage: int) -> int:
    """What ZeRO keeps for moving: its buckets, and the parameters that are gathered while they compute."""
    model, zero, element = config.model, config.zero, BYTES[config.precision.dtype]
    buckets = zero.reduce_bucket_size * element * (2 if zero.overlap_comm else 1) if zero.stage >= 2 else 0
    if zero.stage < 3:
        return buckets
    tp, ends = config.parallel.tp, stage in (0, config.parallel.pp - 1)
    layer, rows = layer_parameters(model, tp), model.padded_vocab_size // tp * model.hidden_size
    return buckets + (layer + max(layer, rows if ends else 0)) * element


def _buffers(config: RunConfig, stage: int) -> int:
    """What is there for moving or making something else: ZeRO's buckets and gathered parameters, pipeline messages, and
    the gradients inside the layer that runs its backward (with SP, also its gathered input and output gradient)."""
    model, pp, tp = config.model, config.parallel.pp, config.parallel.tp
    element, tokens = BYTES[config.precision.dtype], config.trainer.micro_batch_size * config.data.seq_len
    sp = tp if config.parallel.sequence_parallel else 1
    messages = 4 * tokens * model.hidden_size // sp * element if pp > 1 else 0  # two each way, one on its way
    width = (4 if model.activation == "swiglu" else 2) * model.ffn_hidden_size // tp + 2 * model.hidden_size
    return zero_buffers(config, stage) + messages + tokens * width * element


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
    """Bytes of all ranks together, device and host: what a CPU run takes from its machines' memory.

    Without the buckets: on a CPU the part of them that is never written takes no memory.
    """
    zero = config.zero
    unwritten = zero.reduce_bucket_size * BYTES[config.precision.dtype] * (2 if zero.overlap_comm else 1)
    buckets = unwritten if zero.stage >= 2 else 0
    per_stage = (memory.device - buckets + memory.host for memory in memory_by_stage(config, dp, on_cpu=True))
    return ranks_a_stage(config, dp) * sum(per_stage)


def size(count: float) -> str:
    """Bytes as text: GB of 2^30, MB of 2^20."""
    return f"{count / GB:,.1f} GB" if count >= GB / 10 else f"{count / 2**20:,.1f} MB"
