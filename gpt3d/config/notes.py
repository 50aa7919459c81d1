"""What a user should know about a configuration that runs: choices with their reasons, settings without effect here."""

from __future__ import annotations

from collections.abc import Iterator

from gpt3d.config.arithmetic import World, available_ranks, device_of, num_microbatches, resolve_dp, total_ranks
from gpt3d.config.schema import RunConfig
from gpt3d.pipeline.describe import ideal_bubble
from gpt3d.planner.memory import GB, size, worst_rank
from gpt3d.planner.traffic import zero_cost


def batch_in_words(config: RunConfig, dp: int) -> str:
    """The batch arithmetic of one step."""
    trainer, count = config.trainer, num_microbatches(config, dp)
    tokens = trainer.global_batch_size * config.data.seq_len
    return (
        f"{trainer.global_batch_size} sequences a step = {trainer.micro_batch_size} a microbatch x {count} "
        f"microbatch{'es' if count != 1 else ''} x {dp} model cop{'ies' if dp != 1 else 'y'}; "
        f"{tokens:,} tokens of {config.data.seq_len} a sequence"
    )


def notes(config: RunConfig, world: World) -> list[str]:
    """Lines for the start banner. For a configuration that has passed the rules."""
    return [*_choices(config, world), *_debugging(config), *_without_effect(config, world)]


def _choices(config: RunConfig, world: World) -> Iterator[str]:
    model, parallel, dp = config.model, config.parallel, resolve_dp(config, world)
    available, device = available_ranks(config, world), device_of(config.cluster, world)
    if parallel.dp is None and available is not None:
        yield f"dp {dp}: {available} ranks / (tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp})"
    if available is not None and available > total_ranks(config, world):
        yield f"{available - total_ranks(config, world)} of {available} GPUs stay idle; parallel.dp=null takes them all"
    if parallel.tp > model.num_kv_heads:
        copies = parallel.tp // model.num_kv_heads
        yield f"each of the {model.num_kv_heads} KV heads is copied to {copies} ranks, since tp is {parallel.tp}"
    if (rows := model.padded_vocab_size - model.vocab_size) > 0:
        yield f"{rows} padding rows bring the vocabulary to {model.padded_vocab_size} (model.vocab_multiple)"
    if parallel.pp > 1:
        count, bubble = num_microbatches(config, dp), ideal_bubble(config, dp)
        yield f"pipeline bubble {bubble:.0%} of a step: {count} microbatches over {parallel.pp} stages; more shrink it"
    yield from zero_cost(config, dp)
    if device == "cuda" and config.cluster.gpu_memory_gb:
        need = worst_rank(config, dp).total
        full = " and may not fit" if need > config.cluster.gpu_memory_gb * GB else ""
        yield f"about {size(need)} of {config.cluster.gpu_memory_gb:g} GB on the fullest GPU{full}"
    if device == "cpu" and config.precision.dtype == "bf16":
        yield "bf16 on a CPU without AMX is many times slower than fp32; it is meant for tests"
    if device == "cuda" and config.precision.dtype == "fp32":
        yield "precision fp32 leaves the tensor cores' bf16 rate unused; precision=bf16 is the usual choice on a GPU"
    if model.position == "rope" and config.data.seq_len > model.max_seq_len:
        yield f"sequences of {config.data.seq_len} tokens are longer than model.max_seq_len={model.max_seq_len}"
    if (warmup := config.lr.warmup_steps) >= (steps := config.trainer.steps) > 0:
        yield f"the run ends inside the warm-up: lr.warmup_steps={warmup}, trainer.steps={steps}"


def _debugging(config: RunConfig) -> Iterator[str]:
    debug = config.debug
    if debug.repeat_batch:
        yield "debug.repeat_batch: every step sees the first batch; the loss must go towards 0, validation will not"
    if debug.find_nan:
        fp16 = config.precision.dtype == "fp16"
        only = "; gradients are left alone, since fp16's loss scaling overflows them" if fp16 else ""
        yield f"debug.find_nan: each module's output and gradient is read back, which slows every step down{only}"
    if debug.profile:
        yield "debug.profile: the profiled steps are slower, do not take their tokens/s"
    if debug.deterministic:
        yield (
            "debug.deterministic: repetitions are bit-equal on the same GPUs and layout; slower where atomics would be "
            "faster (attention's backward, scatters), and 24 MB for cuBLAS; operations without such a version warn"
        )


def _without_effect(config: RunConfig, world: World) -> Iterator[str]:
    parallel, zero, dp = config.parallel, config.zero, resolve_dp(config, world)
    if parallel.sequence_parallel and parallel.tp == 1:
        yield "no effect: parallel.sequence_parallel=true, since tp is 1"
    if parallel.pp == 1 and config.pipeline.schedule != "1f1b":
        yield f"no effect: pipeline.schedule={config.pipeline.schedule}, since pp is 1"
    if zero.stage > 0 and dp == 1:
        yield f"no effect: zero.stage={zero.stage} has nothing to share, since dp is 1"
    if config.lr.schedule == "constant" and config.lr.decay_steps is not None:
        yield "no effect: lr.decay_steps, since lr.schedule is constant"
    if config.optimizer.grad_clip == 0:
        yield "no clipping: optimizer.grad_clip=0"
    if parallel.allow_cross_node_tp and config.cluster.nodes == 1:
        yield "no effect: parallel.allow_cross_node_tp=true, since there is one node"
    for key in ("search", "plan_tokens", "plan_json", "plan_pictures"):
        if getattr(config, key):
            yield f"no effect: {key}, which is for python -m gpt3d.plan"
