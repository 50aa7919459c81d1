"""All layouts of a model on some GPUs that are legal and fit, the fastest first by the time model.

Searched: TP x PP x chunks x micro batch x recompute x ZeRO x offload; DP is what remains. What changes the training
(global batch, sequence, precision) stays as given, and is only touched by the advice when nothing fits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from gpt3d.config.arithmetic import World, available_ranks, even_split, legal_tp, num_microbatches, total_ranks
from gpt3d.config.problems import ConfigError, Problem
from gpt3d.config.rules import check, memory
from gpt3d.config.schema import PipelineConfig, RunConfig
from gpt3d.planner.memory import GB, stage_memory
from gpt3d.planner.report import gpu_memory, memory_plan
from gpt3d.planner.machine import Machine, machine_of
from gpt3d.planner.time import StepTime, step_time

BEST = 10
MICRO_BATCHES = (1, 2, 4, 8, 16)
OFFLOADS = {0: [("none", "none")], 1: [("none", "none"), ("cpu", "none")]}
OFFLOADS |= {2: OFFLOADS[1], 3: [*OFFLOADS[1], ("cpu", "cpu")]}


@dataclass(frozen=True)
class Plan:
    """A layout that fits: its configuration, its data-parallel degree, its step, and GB of its fullest rank."""

    config: RunConfig
    dp: int
    time: StepTime
    gb: float


@dataclass(frozen=True)
class Found:
    """The best plans, fastest first, each with the best chunks, ZeRO and offload of its tp, pp, micro batch, recompute.

    `own` is the user's own layout, or why it is none; `changes`, if there is no plan, are overrides that make one.
    """

    config: RunConfig
    ranks: int
    machine: Machine
    plans: list[Plan]
    legal: int
    fitting: int
    own: Plan | str
    changes: list[str]


def search(config: RunConfig) -> Found:
    """Search around `config`. ConfigError if the cluster's figures aren't known."""
    machine, gpu_gb = require_known(config)
    ranks = available_ranks(config, World()) or total_ranks(config, World())
    best: dict[tuple[int, int, int, str], tuple[float, RunConfig, int]] = {}
    legal = fitting = 0
    for candidate, dp in candidates(config, ranks):
        legal += 1
        if largest(candidate, dp) > gpu_gb * GB or not _host_holds(candidate, dp, machine):
            continue
        fitting += 1
        seconds = step_time(candidate, dp, machine).total
        key = (candidate.parallel.tp, candidate.parallel.pp, candidate.trainer.micro_batch_size, candidate.recompute)
        if key not in best or seconds < best[key][0]:
            best[key] = (seconds, candidate, dp)
    plans: list[Plan] = []
    for _, candidate, dp in sorted(best.values(), key=lambda entry: entry[0]):
        if len(plans) < BEST and not check(candidate, World(ranks, machine.gpus_per_node)):
            plans.append(Plan(candidate, dp, step_time(candidate, dp, machine), largest(candidate, dp) / GB))
    changes = [] if plans else list(_changes(config, ranks))
    return Found(config, ranks, machine, plans, legal, fitting, _own(config, machine), changes)


def require_known(config: RunConfig) -> tuple[Machine, float]:
    """The cluster's figures and GB of one GPU. ConfigError if they aren't known."""
    machine, gpu_gb = machine_of(config), gpu_memory(config.cluster)
    if machine is None or gpu_gb is None:
        why = "the search needs the GPU's memory and peak, its links and the GPUs of a node, and not all are known"
        fix = "a named cluster (cluster=h100, cluster.nodes=8); or set cluster.gpu and cluster.*_gb_per_s"
        raise ConfigError([Problem("cluster", config.cluster.name, why, fix)])
    return machine, gpu_gb


def candidates(config: RunConfig, ranks: int, leanest: bool = False) -> Iterator[tuple[RunConfig, int]]:
    """Legal layouts of `ranks` GPUs with their dp; `leanest`: only the settings of each that need the least memory."""
    zeros = [3] if leanest else range(4)
    for tp, pp, chunks, dp in _axes(config, ranks):
        each = config.trainer.global_batch_size // dp
        pieces = even_split(config.model.num_layers, pp * chunks)
        parallel = replace(
            config.parallel, tp=tp, pp=pp, dp=dp, layers_per_stage=pieces, embedding_layers=0.0, head_layers=0.0,
            sequence_parallel=tp > 1 and config.data.seq_len % tp == 0,
        )  # fmt: skip
        pipeline = PipelineConfig("interleaved" if chunks > 1 else "1f1b", chunks)
        for micro in MICRO_BATCHES[:1] if leanest else MICRO_BATCHES:
            if each % micro or (chunks > 1 and each // micro % pp):
                continue
            trainer = replace(config.trainer, micro_batch_size=micro)
            recomputes = ["full"] if leanest else ["none", "selective", "full"]
            for recompute, stage in product(recomputes, zeros):
                if dp == 1 and stage > 1 and not leanest:
                    continue  # nothing to shard: stage 1 is there for its offload
                for optimizer, parameters in OFFLOADS[stage][-1:] if leanest else OFFLOADS[stage]:
                    zero = replace(
                        config.zero, stage=stage, offload_optimizer=optimizer, offload_param=parameters
                    )  # fmt: skip
                    yield (
                        replace(
                            config,
                            parallel=parallel,
                            pipeline=pipeline,
                            trainer=trainer,
                            zero=zero,
                            recompute=recompute,
                        ),
                        dp,
                    )


def _axes(config: RunConfig, ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """(tp, pp, chunks, dp): tp groups lie within a node, every piece has a layer, and the batch divides."""
    layers, per_node = config.model.num_layers, config.cluster.gpus_per_node or ranks
    for tp in legal_tp(config.model):
        if ranks % tp or (not config.parallel.allow_cross_node_tp and (per_node % tp and ranks > per_node)):
            continue
        for pp in range(1, min(layers, ranks // tp) + 1):
            dp = ranks // tp // pp
            if ranks // tp % pp or config.trainer.global_batch_size % dp:
                continue
            for chunks in range(1, layers // pp + 1 if pp > 1 else 2):
                if chunks == 1 or -layers % (pp * chunks) <= 2:  # equal pieces, or only the two ends a layer short
                    yield tp, pp, chunks, dp


def largest(config: RunConfig, dp: int) -> int:
    """Bytes of the rank that needs the largest GPU. The ends hold more parameters, earlier stages more activations, and
    of those between the first with the most layers holds most: the others needn't be counted."""
    pp, pieces = config.parallel.pp, config.parallel.layers_per_stage or []
    sizes = [sum(pieces[stage::pp]) for stage in range(pp)]
    stages = {0, pp - 1, min(1, pp - 1), sizes.index(max(sizes))}
    return max(stage_memory(config, dp, stage).total for stage in stages)


def _host_holds(config: RunConfig, dp: int, machine: Machine) -> bool:
    """The machine's memory takes what its ranks offload."""
    if config.cluster.host_memory_gb is None or config.zero.offload_optimizer == config.zero.offload_param == "none":
        return True
    host = max(stage_memory(config, dp, stage).host for stage in {0, config.parallel.pp - 1})
    return host * machine.gpus_per_node <= config.cluster.host_memory_gb * GB


def _own(config: RunConfig, machine: Machine) -> Plan | str:
    """The user's own layout as a plan, or why it is none."""
    if problems := check(config, World(), leave_out=[memory]):
        return str(problems[0]).splitlines()[0]
    plan = memory_plan(config)
    if not plan.fits:
        return f"needs {plan.fullest.total / GB:,.1f} GB on a GPU of {plan.gpu_gb:g} GB"
    return Plan(config, plan.dp, step_time(config, plan.dp, machine), plan.fullest.total / GB)


def exists(config: RunConfig, ranks: int) -> bool:
    """Whether any layout fits."""
    machine, gpu_gb = require_known(config)
    lean = candidates(config, ranks, leanest=True)
    return any(largest(c, dp) <= gpu_gb * GB and _host_holds(c, dp, machine) for c, dp in lean)


def _changes(config: RunConfig, ranks: int) -> Iterator[str]:
    """Single changes that make something fit, those first that cost nothing; at most three."""
    found = (text for text, changed, size in _variants(config, ranks) if exists(changed, size))
    seen: set[str] = set()
    for text in found:
        if (key := text.partition("=")[0]) not in seen:  # of each key the smallest step
            seen.add(key)
            yield text
        if len(seen) == 3:
            return


def _variants(config: RunConfig, ranks: int) -> Iterator[tuple[str, RunConfig, int]]:
    """(override, configuration with it, ranks), the cheapest first."""

    def changed(key: str, value: object) -> RunConfig:
        other = copy.deepcopy(config)
        group, _, name = key.partition(".")
        setattr(getattr(other, group), name, value)
        return other

    if config.precision.dtype == "fp32":
        yield "precision=bf16", changed("precision.dtype", "bf16"), ranks
    elif config.precision.grad_dtype == "fp32":
        yield "precision.grad_dtype=bf16", changed("precision.grad_dtype", "bf16"), ranks
    batch, nodes, seq = config.trainer.global_batch_size, config.cluster.nodes, config.data.seq_len
    for factor in (2**i for i in range(1, 12)):
        yield f"trainer.global_batch_size={batch * factor}", changed("trainer.global_batch_size", batch * factor), ranks
    for name, gb in (("h200", 141.0), ("b200", 180.0)):
        if gb > (gpu_memory(config.cluster) or gb):
            yield f"cluster={name}", changed("cluster.gpu_memory_gb", gb), ranks
    for factor in (2, 4, 8, 16, 32, 64):
        yield f"cluster.nodes={nodes * factor}", changed("cluster.nodes", nodes * factor), ranks * factor
    for factor in (2, 4, 8):
        yield f"data.seq_len={seq // factor}", changed("data.seq_len", seq // factor), ranks


def microbatches(plan: Plan) -> int:
    """Microbatches of one step on each model copy."""
    return num_microbatches(plan.config, plan.dp)
