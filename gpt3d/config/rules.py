"""Rules over the whole configuration. All run, all problems are reported together, nothing is changed.

Each rule yields Problems. A rule whose question makes no sense until another one passes (there is no number of
microbatches while the ranks don't divide) yields nothing then.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from gpt3d.config.arithmetic import (
    World,
    available_ranks,
    device_of,
    even_split,
    legal_tp,
    model_ranks,
    multiples_around,
    num_microbatches,
    resolve_dp,
    stage_layers,
    total_ranks,
    tp_splits_heads,
)
from gpt3d.config.auto import AUTO, auto_keys
from gpt3d.config.deepspeed import contradictions, extra_keys
from gpt3d.config.problems import ConfigError, Problem, nearest
from gpt3d.config.schema import ParallelConfig, RunConfig, leaves
from gpt3d.planner.memory import GB, run_memory, size, worst_rank
from gpt3d.planner.need import describe_need

MOST_NAME_BYTES = 200  # file systems take 255, and a date and a number are added

Rule = Callable[[RunConfig, World], Iterator[Problem]]


def check(config: RunConfig, world: World, leave_out: Sequence[Rule] = ()) -> list[Problem]:
    """Every reason why this configuration can't run in this world; empty if it can."""
    broken = [*limits(config), *left_to_planner(config)]
    usable = _neutral(config, broken)
    found = [problem for rule in RULES if rule not in leave_out for problem in rule(usable, world)]
    return broken + [problem for problem in found if not any(wrong.key in str(problem) for wrong in broken)]


def require_valid(config: RunConfig, world: World) -> None:
    """Raise one ConfigError with every problem."""
    if problems := check(config, world):
        raise ConfigError(problems)


def check_vocabulary(config: RunConfig, largest_id: int) -> list[Problem]:
    """The largest token id that tokenizer or prepared data can give, added tokens included, must have a row."""
    if largest_id < config.model.vocab_size:
        return []
    why = f"the data can hold the token id {largest_id:,}, and ids must be below the vocabulary size"
    return [Problem("model.vocab_size", config.model.vocab_size, why, f"model.vocab_size={largest_id + 1} or more")]


def _neutral(config: RunConfig, broken: list[Problem]) -> RunConfig:
    """A copy to calculate with, in which values out of their limits are replaced by legal ones."""
    usable = copy.deepcopy(config)
    legal = {
        leaf.key: None if leaf.is_optional else leaf.metadata.get("choices", [leaf.metadata.get("low")])[0]
        for leaf in leaves()
    }
    for problem in broken:
        parent, _, name = problem.key.rpartition(".")
        setattr(attrgetter(parent)(usable) if parent else usable, name, legal[problem.key])
    return usable


def limits(config: RunConfig) -> Iterator[Problem]:
    """Choices and ranges from the schema's metadata."""
    for leaf in leaves():
        value = attrgetter(leaf.key)(config)
        if value is None or value == AUTO.get(leaf.key):
            continue
        choices, low, high = (leaf.metadata.get(name) for name in ("choices", "low", "high"))
        if choices and value not in choices:
            close = nearest(value, choices)
            fix = (f"did you mean {close[0]}? " if close else "") + "one of: " + ", ".join(choices)
            yield Problem(leaf.key, value, "is not a choice", fix)
        elif isinstance(value, float) and not math.isfinite(value):
            yield Problem(leaf.key, value, "is not a finite number")
        elif low is not None and value < low:
            yield Problem(leaf.key, value, "is too small", f"{low:g} or more")
        elif high is not None and value > high:
            yield Problem(leaf.key, value, "is too large", f"{high:g} or less")


def left_to_planner(config: RunConfig) -> Iterator[Problem]:
    """Keys that nobody has chosen: gpt3d.train and gpt3d.plan do that before they check, the other commands don't."""
    for key in auto_keys(config):
        fix = "a value; python -m gpt3d.plan with the same words names one"
        yield Problem(key, AUTO[key], "is left to the planner, which this command doesn't ask", fix)


def names(config: RunConfig, world: World) -> Iterator[Problem]:
    """The run's name is part of a folder name."""
    if not config.run_name.strip() or "/" in config.run_name or config.run_name in (".", ".."):
        yield Problem("run_name", config.run_name, "is the name of a folder", "a name without '/'")
    elif len(config.run_name.encode()) > MOST_NAME_BYTES:
        why = f"is part of a folder's name, which has room for {MOST_NAME_BYTES} bytes of it"
        yield Problem("run_name", config.run_name[:20] + "...", why, "a shorter name")


def model_shape(config: RunConfig, world: World) -> Iterator[Problem]:
    """What holds in every layout."""
    model = config.model
    if model.num_heads % model.num_kv_heads:
        divisors = [n for n in range(1, model.num_heads + 1) if model.num_heads % n == 0]
        why = f"must divide model.num_heads={model.num_heads}"
        yield Problem("model.num_kv_heads", model.num_kv_heads, why, f"one of {divisors}")
    if model.position == "rope" and model.head_dim % 2:
        why = "rotary embeddings turn pairs, so it must be even"
        yield Problem("model.head_dim", model.head_dim, why, f"{model.head_dim - 1} or {model.head_dim + 1}")
    low, high = model.rope_scaling.low_freq_factor, model.rope_scaling.high_freq_factor
    if model.position == "rope" and model.rope_scaling.factor != 1 and high <= low:
        why = f"must be above model.rope_scaling.low_freq_factor={low:g}: wavelengths between them are blended"
        yield Problem("model.rope_scaling.high_freq_factor", high, why, f"{4 * max(low, 1):g}")
    if model.position == "learned" and config.data.seq_len > model.max_seq_len:
        why = f"the model has {model.max_seq_len} learned positions (model.max_seq_len)"
        yield Problem("data.seq_len", config.data.seq_len, why, f"{model.max_seq_len} or less")


def tensor_parallel(config: RunConfig, world: World) -> Iterator[Problem]:
    """Heads, MLP, vocabulary and sequence split into tp equal parts."""
    model, tp = config.model, config.parallel.tp
    if model.num_heads % model.num_kv_heads:
        return
    reasons = []
    if not tp_splits_heads(model, tp):
        reasons.append(
            f"model.num_heads={model.num_heads} and model.num_kv_heads={model.num_kv_heads} don't split over it "
            "(it must divide the heads, and divide or be a multiple of the KV heads)"
        )
    if model.ffn_hidden_size % tp:
        reasons.append(f"model.ffn_hidden_size={model.ffn_hidden_size} doesn't divide by it")
    if model.padded_vocab_size % tp:
        padded = f"{model.padded_vocab_size} (model.vocab_size={model.vocab_size} padded to {model.vocab_multiple})"
        reasons.append(f"the vocabulary of {padded} doesn't divide by it")
    if reasons:
        yield Problem("parallel.tp", tp, "; ".join(reasons), f"parallel.tp can be {legal_tp(model)} for this model")
    if config.parallel.sequence_parallel and config.data.seq_len % tp:
        why = f"parallel.sequence_parallel splits it over parallel.tp={tp}"
        around = " or ".join(map(str, multiples_around(config.data.seq_len, tp)))
        yield Problem("data.seq_len", config.data.seq_len, why, f"{around}, or parallel.sequence_parallel=false")


def pipeline(config: RunConfig, world: World) -> Iterator[Problem]:
    """Layers over stages and chunks; microbatches of the interleaved schedule."""
    layers, pp = config.model.num_layers, config.parallel.pp
    chunks, schedule, given = config.pipeline.chunks, config.pipeline.schedule, config.parallel.layers_per_stage
    if chunks > 1 and schedule != "interleaved":
        fix = "pipeline=interleaved or pipeline.chunks=1"
        yield Problem("pipeline.chunks", chunks, f"pipeline.schedule={schedule} has one chunk a stage", fix)
        return
    if schedule == "interleaved" and chunks == 1:
        why = "the interleaved schedule alternates between the chunks of a stage, and one has nothing to alternate with"
        yield Problem("pipeline.chunks", chunks, why, "pipeline.chunks=2 or more, or pipeline=1f1b")
    if chunks > 1 and pp == 1:
        why = "the whole model is on one stage, so there is nothing to interleave"
        yield Problem("pipeline.chunks", chunks, why, "parallel.pp=2 or more, or pipeline=1f1b")
    pieces = pp * chunks
    product = f"parallel.pp={pp}" + (f" x pipeline.chunks={chunks}" if chunks > 1 else "")
    if given is not None:
        for key in ("embedding_layers", "head_layers"):
            if weight := getattr(config.parallel, key):
                why = "has no effect beside parallel.layers_per_stage, which says everything"
                yield Problem(f"parallel.{key}", weight, why, f"parallel.{key}=0 or parallel.layers_per_stage=null")
        if len(given) != pieces or sum(given) != layers or min(given, default=0) < 1:
            why = f"needs {pieces} numbers of at least 1 ({product}) that sum up to model.num_layers={layers}"
            yield Problem("parallel.layers_per_stage", given, why, _even_split(layers, pieces))
    elif layers < pieces or (layers % pieces and not _may_be_uneven(config.parallel)):
        why = f"model.num_layers={layers} doesn't divide into {pieces} equal pieces ({product})"
        legal = [n for n in range(1, layers // chunks + 1) if layers % (n * chunks) == 0]
        yield Problem("parallel.pp", pp, why, f"parallel.pp can be {legal}; {_even_split(layers, pieces)}")
    dp = _known_dp(config, world)
    if schedule == "interleaved" and pp > 1 and dp is not None and _batch_divides(config, dp):
        count = num_microbatches(config, dp)
        if count % pp:
            why = f"gives {count} microbatches; the interleaved schedule needs a multiple of parallel.pp={pp}"
            step = config.trainer.micro_batch_size * dp * pp
            around = " or ".join(map(str, multiples_around(config.trainer.global_batch_size, step)))
            yield Problem("trainer.global_batch_size", config.trainer.global_batch_size, why, around)


def _may_be_uneven(parallel: ParallelConfig) -> bool:
    """Stages that differ were asked for."""
    return parallel.allow_uneven_stages or parallel.embedding_layers + parallel.head_layers > 0


def _even_split(layers: int, pieces: int) -> str:
    """The most even uneven split, as an override."""
    if layers < pieces:
        return f"at most {layers} pieces, since each needs a layer"
    split = ",".join(map(str, even_split(layers, pieces)))
    return f"for unequal stages parallel.allow_uneven_stages=true or parallel.layers_per_stage=[{split}]"


def ranks(config: RunConfig, world: World) -> Iterator[Problem]:
    """tp x cp x pp x dp is the number of ranks."""
    parallel, available, one = config.parallel, available_ranks(config, world), model_ranks(config)
    if parallel.cp > 1:
        yield Problem("parallel.cp", parallel.cp, "context parallelism is not available", "use 1")
    if available is None:
        return
    product = f"parallel.tp={parallel.tp} x cp={parallel.cp} x pp={parallel.pp}"
    source = "the launcher started" if world.ranks is not None else "there are"
    if parallel.dp is None:
        if available % one and not (available < one and _too_few(config, world)):
            why = f"{product} = {one} ranks a model copy, and {source} {available}: dp would be {available / one:g}"
            fix = " or ".join(map(str, multiples_around(available, one))) + " ranks, or another tp and pp"
            yield Problem("parallel", None, why, fix)
        return
    wanted = one * parallel.dp
    must_fill = world.ranks is not None or config.cluster.nodes > 1
    if wanted != available and (must_fill or (wanted > available and not _too_few(config, world))):
        why = f"{product} x dp={parallel.dp} = {wanted} ranks, and {source} {available}"
        fix = f"parallel.dp={available // one} or null" if available % one == 0 else f"start {wanted} ranks"
        yield Problem("parallel.dp", parallel.dp, why, fix)


def _too_few(config: RunConfig, world: World) -> bool:
    """The ranks will be started here, on GPUs, and there aren't enough."""
    if world.ranks is not None or world.gpus is None or device_of(config.cluster, world) != "cuda":
        return False
    return world.gpus < total_ranks(config, world)


def machine(config: RunConfig, world: World) -> Iterator[Problem]:
    """Enough GPUs and memory where the ranks will run; TP inside a node."""
    parallel = config.parallel
    if _too_few(config, world):
        why = f"the run wants {total_ranks(config, world)} GPUs and this machine has {world.gpus}"
        if _sizes_divide(config, world):
            why += ".\n    " + describe_need(config, resolve_dp(config, world))
        fix = "torchrun or srun on enough machines, or a layout for this one" + (
            " (parallel=single is one rank)" if world.gpus else ""
        )
        yield Problem("parallel", None, why, fix + ", or cluster.device=cpu")
    here = world.ranks is None and world.device is not None
    if here and config.cluster.nodes > 1 and device_of(config.cluster, world) == "cpu":
        why = "without a launcher all ranks start on this machine"
        yield Problem("cluster.nodes", config.cluster.nodes, why, "torchrun, srun or mpirun on all nodes, or 1")
    per_node = world.ranks_per_node or config.cluster.gpus_per_node
    if per_node is None and device_of(config.cluster, world) == "cuda" and world.ranks is None:
        per_node = world.gpus
    crosses = per_node is not None and total_ranks(config, world) > per_node and per_node % parallel.tp != 0
    if crosses and not parallel.allow_cross_node_tp and not _too_few(config, world):
        why = f"a node has {per_node} ranks, so tp groups would span nodes and every layer would wait for the network"
        legal = [tp for tp in legal_tp(config.model) if per_node and per_node % tp == 0]
        yield Problem("parallel.tp", parallel.tp, why, f"one of {legal}, or parallel.allow_cross_node_tp=true")


def memory(config: RunConfig, world: World) -> Iterator[Problem]:
    """What won't fit by the planner's count: a rank on its GPU, all ranks in a CPU machine's memory."""
    if config.allow_oom or not _sizes_divide(config, world) or _too_few(config, world):
        return
    dp, device = resolve_dp(config, world), device_of(config.cluster, world)
    need, cluster = worst_rank(config, dp), config.cluster
    gpu_gb = cluster.gpu_memory_gb or world.gpu_memory_gb
    if device == "cuda" and gpu_gb is not None and need.total > gpu_gb * GB:
        alone = need.state > gpu_gb * GB
        what = "weights, gradients and optimizer alone" if alone else f"the {size(need.total)} of a rank"
        why = f"{what} don't fit into {gpu_gb:g} GB.\n    "
        fix = "parallel=auto takes one that fits, python -m gpt3d.plan search=true finds all; allow_oom=true starts it"
        yield Problem("model", None, why + describe_need(config, dp), fix)
    local_nodes = 1 if world.ranks is None or not world.ranks_per_node else world.ranks // world.ranks_per_node
    if device == "cpu" and world.host_memory_gb is not None:
        total = run_memory(config, dp) / max(1, local_nodes)
        if total > world.host_memory_gb * GB:
            has = size(world.host_memory_gb * GB)
            why = f"the ranks on this machine need about {size(total)} and it has {has}.\n    "
            yield Problem(
                "model",
                None,
                why + describe_need(config, dp),
                "a smaller model; for GPUs, start it on them (cluster=..., precision=bf16); allow_oom=true starts it",
            )


def batch(config: RunConfig, world: World) -> Iterator[Problem]:
    """global = micro x microbatches x dp, over all machines."""
    dp = _known_dp(config, world)
    if dp is None or _batch_divides(config, dp):
        return
    total, micro = config.trainer.global_batch_size, config.trainer.micro_batch_size
    why = (
        f"must be trainer.micro_batch_size={micro} x microbatches x dp={dp} over all ranks, "
        f"and {total} / ({micro} x {dp}) = {total / (micro * dp):g} microbatches"
    )
    around = " or ".join(f"trainer.global_batch_size={value}" for value in multiples_around(total, micro * dp))
    legal = [m for m in range(1, total + 1) if total % (m * dp) == 0]
    fix = around + (f"; or a micro batch of {', '.join(map(str, legal[:8]))}" if legal else "")
    yield Problem("trainer.global_batch_size", total, why, fix)


def zero(config: RunConfig, world: World) -> Iterator[Problem]:
    """Offloading needs something sharded to offload; the pass-through node says nothing else than we do."""
    stage = config.zero.stage
    if config.zero.offload_optimizer != "none" and stage == 0:
        why = "zero.stage=0 keeps the optimizer states on every rank; offloading needs them sharded"
        yield Problem("zero.offload_optimizer", config.zero.offload_optimizer, why, "zero=1, 2 or 3, or none")
    if config.zero.offload_param != "none" and stage != 3:
        why = f"zero.stage={stage} doesn't shard parameters; offloading them needs stage 3"
        yield Problem("zero.offload_param", config.zero.offload_param, why, "zero=3_offload, or none")
    if config.optimizer.name == "cpu_adamw" and config.zero.offload_optimizer == "none":
        why = "it updates states in host memory, and zero.offload_optimizer=none keeps them on the device"
        yield Problem("optimizer.name", "cpu_adamw", why, "optimizer=adamw, or zero.offload_optimizer=cpu")
    yield from contradictions(config, _known_dp(config, world) if _batch_ok(config, world) else None)


def deepspeed_keys(config: RunConfig, world: World) -> Iterator[Problem]:
    """What is passed through to DeepSpeed must be something that it knows."""
    if extra_keys(config) and not contradictions(config, None):  # only then: DeepSpeed takes seconds to import
        from gpt3d.zero.ds_config import refused_keys

        yield from refused_keys(config, device_of(config.cluster, world) or "cpu")


def precision(config: RunConfig, world: World) -> Iterator[Problem]:
    """Number formats the device has and that fit together."""
    dtype, grad = config.precision.dtype, config.precision.grad_dtype
    if dtype == "fp16" and device_of(config.cluster, world) == "cpu":
        yield Problem("precision.dtype", dtype, "fp16 training needs a GPU", "precision=fp32 or precision=bf16")
    if grad not in ("fp32", dtype):
        legal = "fp32" if dtype == "fp32" else f"fp32 or {dtype}"
        yield Problem("precision.grad_dtype", grad, f"doesn't go with precision.dtype={dtype}", legal)
    scale, least = config.precision.initial_loss_scale, config.precision.min_loss_scale
    if dtype == "fp16" and not math.log2(scale).is_integer():
        around = " or ".join(f"{2.0 ** math.floor(math.log2(scale) + i):g}" for i in (0, 1))
        yield Problem("precision.initial_loss_scale", scale, "must be a power of two, so that scaling is exact", around)
    if dtype == "fp16" and least > scale:
        why = f"is above precision.initial_loss_scale={scale:g}, which it starts from"
        yield Problem("precision.min_loss_scale", least, why, f"{scale:g} or less")
    if config.cluster.device == "cuda" and world.ranks is not None and world.gpus == 0:
        yield Problem("cluster.device", "cuda", "this machine has no GPU", "cluster.device=auto or cpu")


def learning_rate(config: RunConfig, world: World) -> Iterator[Problem]:
    """A decay that ends before the warm-up does is a typing error."""
    decay, warmup = config.lr.decay_steps, config.lr.warmup_steps
    if config.lr.schedule in ("cosine", "linear") and decay is not None and decay <= warmup:
        yield Problem(
            "lr.decay_steps", decay, f"must be later than lr.warmup_steps={warmup}", f"{warmup + 1} or more, or null"
        )


def timeline(config: RunConfig, world: World) -> Iterator[Problem]:
    """Pictures need a library that training does not."""
    if config.trainer.timeline and importlib.util.find_spec("matplotlib") is None:
        fix = "pip install 'gpt3d[plot]', or trainer.timeline=false"
        yield Problem("trainer.timeline", config.trainer.timeline, "pictures need matplotlib, which is missing", fix)
    if config.plan_pictures is not None and importlib.util.find_spec("matplotlib") is None:
        fix = "pip install 'gpt3d[plot]', or plan_pictures=null"
        yield Problem("plan_pictures", config.plan_pictures, "pictures need matplotlib, which is missing", fix)


def tensorboard(config: RunConfig, world: World) -> Iterator[Problem]:
    """An optional package."""
    if config.tracking.tensorboard and importlib.util.find_spec("tensorboard") is None:
        fix = "pip install 'gpt3d[tensorboard]', or tracking.tensorboard=false"
        yield Problem("tracking.tensorboard", True, "needs the package tensorboard, which is missing", fix)


def checkpoints(config: RunConfig, world: World) -> Iterator[Problem]:
    """`auto` looks in this run's folder, so that must be a lasting one."""
    if config.checkpoint.resume == "auto" and config.run_dir is None:
        why = "continues the run in run_dir, but without run_dir every start makes a new folder"
        yield Problem("checkpoint.resume", "auto", why, "run_dir=PATH beside it, or checkpoint.resume=PATH")


def debugging(config: RunConfig, world: World) -> Iterator[Problem]:
    """What is asked for must come to pass."""
    debug, dp, steps = config.debug, _known_dp(config, world), config.trainer.steps
    last = debug.profile_first_step + debug.profile_steps - 1
    if debug.profile and last > steps:
        why = f"the profiled steps end at step {last}, and the run at trainer.steps={steps}"
        fix = f"{max(1, steps - debug.profile_steps + 1)} or less, or trainer.steps={last}"
        yield Problem("debug.profile_first_step", debug.profile_first_step, why, fix)
    if debug.fault != "none" and debug.fault_step >= steps:
        yield Problem(
            "debug.fault_step", debug.fault_step, f"the run has trainer.steps={steps}", f"{steps - 1} or less"
        )
    if dp is None:
        return
    count = model_ranks(config) * dp
    if debug.fault != "none" and debug.fault_rank >= count:
        yield Problem("debug.fault_rank", debug.fault_rank, f"the run has {count} ranks", f"{count - 1} or less")
    if debug.profile and (wrong := [rank for rank in debug.profile_ranks if not 0 <= rank < count]):
        why = f"the run has {count} ranks, and rank {wrong[0]} is none of them"
        yield Problem("debug.profile_ranks", debug.profile_ranks, why, f"numbers below {count}, or [] for all ranks")


def dry_run(config: RunConfig, world: World) -> Iterator[Problem]:
    """A rank that exists, of a run that isn't started."""
    if config.rank is not None and not config.dry_run:
        yield Problem("rank", config.rank, "chooses the rank of a dry run, and this is none", "dry_run=true beside it")
    if config.dry_run and world.ranks is not None:
        fix = "python -m gpt3d.train ... dry_run=true, without torchrun, srun or mpirun"
        yield Problem("dry_run", True, "a dry run is one process, and a launcher has started more", fix)
    dp = _known_dp(config, world)
    if config.rank is None or dp is None or config.rank < (count := model_ranks(config) * dp):
        return
    p = config.parallel
    why = f"tp={p.tp} x pp={p.pp} x dp={dp} is {count} ranks, and they are numbered from 0"
    yield Problem("rank", config.rank, why, f"0 to {count - 1}; rank=null is the one that needs most memory")


# What a layout decides, and what it does not.
LAYOUT_RULES: tuple[Rule, ...] = (tensor_parallel, pipeline, ranks, machine, memory, batch, zero)
OTHER_RULES: tuple[Rule, ...] = (
    names, model_shape, deepspeed_keys, precision, learning_rate, timeline, tensorboard, checkpoints, debugging,
    dry_run,
)  # fmt: skip
RULES = OTHER_RULES[:2] + LAYOUT_RULES + OTHER_RULES[2:]


def _known_dp(config: RunConfig, world: World) -> int | None:
    """dp, if the ranks divide."""
    if config.parallel.dp is None:
        available = available_ranks(config, world)
        if available is not None and available % model_ranks(config):
            return None
    return resolve_dp(config, world)


def _batch_divides(config: RunConfig, dp: int) -> bool:
    return config.trainer.global_batch_size % (config.trainer.micro_batch_size * dp) == 0


def _batch_ok(config: RunConfig, world: World) -> bool:
    dp = _known_dp(config, world)
    return dp is not None and _batch_divides(config, dp)


def _sizes_divide(config: RunConfig, world: World) -> bool:
    """Heads, MLP, vocabulary and layers divide, so that the bytes of a rank can be counted."""
    return not [*tensor_parallel(config, world), *pipeline(config, world)] and sum(stage_layers(config)) > 0
