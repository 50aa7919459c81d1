"""Memory a rank needs, from the configuration alone: model state by ZeRO stage, activations, logits.

Model state: Rajbhandari et al. 2020 (ZeRO), section 3. Activations: Korthikanti et al. 2022, table 2. Not counted: the
CUDA context, NCCL's buffers and the allocator's fragmentation, together some GB a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from gpt3d.config.arithmetic import num_microbatches, stage_layers
from gpt3d.config.schema import ModelConfig, RunConfig
from gpt3d.model.flops import layer_parameters, norm_parameters

GB = 2**30
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. All on the device but `host`, which is what offloading puts into its machine's memory."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    buckets: int
    activations: int
    logits: int
    host: int

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer states on the device: exact, whatever the batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def device(self) -> int:
        """Everything on the device at the peak."""
        return self.state + self.gathered + self.buckets + self.activations + self.logits


def stage_parameters(config: RunConfig, stage: int) -> int:
    """Parameters on one rank of this pipeline stage before ZeRO shards them, with padded vocabulary and tied copy."""
    return sum(piece_parameters(config)[stage :: config.parallel.pp])


def piece_parameters(config: RunConfig) -> list[int]:
    """The same for each of the pp x chunks pieces, in model order; a head tied on the embedding's rank is no copy."""
    model, tp = config.model, config.parallel.tp
    rows = model.padded_vocab_size // tp * model.hidden_size
    counts = [layers * layer_parameters(model, tp) for layers in stage_layers(config)]
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
) -> int:
    """Bytes that one layer keeps of one microbatch for its backward pass; `element` is the size of a number.

    With 2-byte numbers, ffn 4h, dropout and no flash attention this is sbh(34 + 5as/h); flash attention never holds the
    5as/h part, the attention matrix and its dropout mask.
    """
    tokens, h = micro_batch * seq_len, model.hidden_size
    outside = tp if sequence_parallel else 1
    if recompute == "full":
        return tokens * h * element // outside
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # Inputs of two norms, of QKV and of the MLP, and two 1-byte dropout masks: whole on every tp rank without SP.
    whole = 4 * h * element + (2 * h if model.hidden_dropout else 0)
    # Query, the copied or split keys and values, and the input of the output projection.
    attention = (2 * query // tp + 2 * max(kv // tp, model.head_dim)) * element
    # GELU keeps its input and output; SwiGLU gate, up, silu(gate) and their product.
    mlp = (4 if model.activation == "swiglu" else 2) * model.ffn_hidden_size // tp * element
    matrix = 0
    if not flash and recompute == "none":
        scores = model.num_heads // tp * seq_len
        matrix = scores * (2 * element + 1 if model.attention_dropout else element)
    return tokens * (whole // outside + attention + mlp + matrix)


def layers_in_flight(config: RunConfig, dp: int, stage: int) -> float:
    """Layers x microbatches whose activations this stage holds at its peak.

    GPipe: every microbatch. 1F1B: stage i holds min(pp - i, m) of them. Interleaved: its warm-up chunks and one more
    (Narayanan et al. 2021), on the first stage L (1 + (p-1)/(pv)) layers.
    """
    pp, chunks, m = config.parallel.pp, config.pipeline.chunks, num_microbatches(config, dp)
    layers = sum(stage_layers(config)[stage::pp])
    if config.pipeline.schedule == "gpipe":
        return layers * m
    if config.pipeline.schedule == "interleaved":
        held = min(2 * (pp - stage - 1) + (chunks - 1) * pp + 1, m * chunks)
        return layers * held / chunks
    return layers * min(pp - stage, m)


def stage_memory(config: RunConfig, dp: int, stage: int) -> RankMemory:
    """Bytes of one rank of this pipeline stage."""
    zero, model, tp = config.zero, config.model, config.parallel.tp
    parameters = stage_parameters(config, stage)
    compute = _BYTES[config.precision.dtype]

    def shard(size: int, from_stage: int) -> int:
        return -(-size // dp) if zero.stage >= from_stage else size

    weights = shard(parameters * compute, 3)
    gradients = shard(parameters * _BYTES[config.precision.grad_dtype], 2)
    # Adam's two fp32 moments, and fp32 master weights: kept by DeepSpeed even where the parameters are fp32 already.
    optimizer = shard(parameters * (8 if compute == 4 and zero.stage == 0 else 12), 1)
    host = 0
    if zero.offload_optimizer == "cpu":
        # From stage 2 on the reduced gradients go to the host as well, where the update happens.
        host, optimizer = host + optimizer, 0
        if zero.stage >= 2:
            host, gradients = host + gradients, 0
    if zero.offload_param == "cpu":
        host, weights = host + weights, 0

    # Stage 3 gathers a layer while it computes and the next one ahead.
    gathered = 2 * layer_parameters(model, tp) * compute if zero.stage == 3 else 0
    buckets = zero.reduce_bucket_size * compute * (2 if zero.overlap_comm else 1) if zero.stage >= 2 else 0

    batch, seq = config.trainer.micro_batch_size, config.data.seq_len
    sp = config.parallel.sequence_parallel and tp > 1
    one_layer = layer_activations(model, batch, seq, tp, sp, config.recompute, compute)
    activations = int(layers_in_flight(config, dp, stage) * one_layer)
    if config.recompute == "full":
        activations += layer_activations(model, batch, seq, tp, sp, "none", compute)
    last = stage == config.parallel.pp - 1
    logits = 4 * batch * seq * (model.padded_vocab_size // tp) if last else 0
    return RankMemory(weights, gradients, optimizer, gathered, buckets, activations, logits, host)


def memory_by_stage(config: RunConfig, dp: int) -> list[RankMemory]:
    """Bytes of one rank of each pipeline stage."""
    return [stage_memory(config, dp, stage) for stage in range(config.parallel.pp)]


def worst_rank(config: RunConfig, dp: int) -> RankMemory:
    """The rank that needs most on its device."""
    return max(memory_by_stage(config, dp), key=lambda memory: memory.device)


def run_memory(config: RunConfig, dp: int) -> int:
    """Bytes of all ranks together, device and host: what a CPU run takes from its machines' memory.

    Without the buckets: on a CPU the part of them that is never written takes no memory.
    """
    ranks_per_stage = config.parallel.tp * config.parallel.cp * dp
    per_stage = (memory.device - memory.buckets + memory.host for memory in memory_by_stage(config, dp))
    return ranks_per_stage * sum(per_stage)


def size(count: float) -> str:
    """Bytes as text: GB of 2^30, MB of 2^20."""
    return f"{count / GB:,.1f} GB" if count >= GB / 10 else f"{count / 2**20:,.1f} MB"


def describe_need(config: RunConfig, dp: int) -> str:
    """One sentence: how many ranks this layout wants and what the fullest of them needs."""
    need, parallel = worst_rank(config, dp), config.parallel
    ranks = parallel.tp * parallel.cp * parallel.pp * dp
    parts = {field.name: getattr(need, field.name) for field in fields(need) if field.name != "host"}
    return (
        f"{config.model.name} with tp {parallel.tp}, pp {parallel.pp}, dp {dp}, {config.precision.dtype}, "
        f"ZeRO {config.zero.stage} wants {ranks} GPU{'s' if ranks > 1 else ''} of at least {size(need.device)} ("
        + ", ".join(f"{name} {size(value)}" for name, value in parts.items() if value)
        + ")"
        + (f" and {size(need.host)} of host memory a rank" if need.host else "")
    )
