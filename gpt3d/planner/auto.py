"""`parallel=auto` and its like: the keys left to the planner, chosen for the ranks there are, as overrides."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpt3d.config.arithmetic import World, available_ranks, device_of
from gpt3d.config.auto import AUTO, auto_keys
from gpt3d.config.problems import ConfigError, Problem, show
from gpt3d.config.rules import LAYOUT_RULES, check, limits
from gpt3d.config.schema import ClusterConfig, RunConfig
from gpt3d.planner.machine import machine_of
from gpt3d.planner.remedies import changed, for_model
from gpt3d.planner.report import gpu_memory
from gpt3d.planner.search import Plan, Room, best_plans
from gpt3d.planner.time import mfu

PLACEHOLDERS = dict(zip(AUTO, (1, 1, "1f1b", 1, "none", 1), strict=True))


@dataclass(frozen=True)
class Choice:
    """What to type instead of auto, and one line that says so."""

    overrides: list[str]
    text: str


def choose(config: RunConfig, world: World) -> Choice | None:
    """The best layout over the keys left to the planner; None if there are none. ConfigError if nothing fits."""
    free = auto_keys(config)
    if not free:
        return None
    given = changed(config, {key: PLACEHOLDERS[key] for key in free})
    others = check(given, world, leave_out=LAYOUT_RULES)
    if list(limits(given)):
        raise ConfigError(others)  # nothing can be counted with them
    asked = replace(config, cluster=_known_cluster(config, world))
    room = _room(asked, world)
    plans, legal, fitting = best_plans(asked, room, free)
    if not plans:
        raise ConfigError([_nothing(asked, room, free, legal), *others])
    best = plans[0]
    overrides = list(_overrides(config, best, free, known=available_ranks(config, world) is not None))
    return Choice(overrides, _text(best, room, free, overrides, legal, fitting))


def _known_cluster(config: RunConfig, world: World) -> ClusterConfig:
    """The cluster with what its machines say of themselves; on a CPU each core is a rank."""
    cluster, count = config.cluster, available_ranks(config, world)
    if count is None and device_of(cluster, world) == "cpu":
        fixed = max(1, config.parallel.tp) * max(1, config.parallel.pp) * (config.parallel.dp or 1)
        count = max(fixed, len(os.sched_getaffinity(0)) // fixed * fixed)
    if count is None:
        why = "the planner chooses a layout for a number of GPUs, and that is not known"
        fix = "cluster=h100 cluster.nodes=8, or cluster.gpus_per_node=8"
        raise ConfigError([Problem("cluster", cluster.name, why, fix)])
    per_node = world.ranks_per_node or cluster.gpus_per_node or world.gpus or count
    return replace(
        cluster,
        gpus_per_node=per_node,
        nodes=max(1, count // per_node),
        gpu=cluster.gpu or world.gpu_name,
        gpu_memory_gb=gpu_memory(cluster) or world.gpu_memory_gb,
        host_memory_gb=cluster.host_memory_gb or world.host_memory_gb,
    )


def _room(config: RunConfig, world: World) -> Room:
    """The ranks there are and their memory; with allow_oom all that one could wish for."""
    cluster, on_cpu = config.cluster, device_of(config.cluster, world) == "cpu"
    per_node = cluster.gpus_per_node or 1
    machine = None if on_cpu else machine_of(config)
    gpu_gb, host_gb = (None, None) if config.allow_oom else (cluster.gpu_memory_gb, cluster.host_memory_gb)
    return Room(world.ranks or cluster.nodes * per_node, per_node, machine, gpu_gb, host_gb, on_cpu)


def _overrides(config: RunConfig, plan: Plan, free: Sequence[str], known: bool) -> Iterator[str]:
    """The free keys and those that follow from them, as they would be typed."""
    chosen, p = plan.config, plan.config.parallel
    values: dict[str, object] = {}
    if "parallel.tp" in free:
        values |= {"parallel.tp": p.tp, "parallel.sequence_parallel": p.sequence_parallel}
    if "parallel.pp" in free:
        values |= {"parallel.pp": p.pp}
        pieces = p.layers_per_stage
        if pieces != config.parallel.layers_per_stage and len(set(pieces or [])) > 1:
            values |= {"parallel.layers_per_stage": p.layers_per_stage}
    if not known:
        values |= {"parallel.dp": plan.dp}
    if "pipeline.schedule" in free:
        values |= {"pipeline.schedule": chosen.pipeline.schedule, "pipeline.chunks": chosen.pipeline.chunks}
    if "trainer.micro_batch_size" in free:
        values |= {"trainer.micro_batch_size": chosen.trainer.micro_batch_size}
    if "recompute" in free:
        values |= {"recompute": chosen.recompute}
    if "zero.stage" in free:
        zero = chosen.zero
        values |= {"zero.stage": zero.stage, "zero.offload_optimizer": zero.offload_optimizer}
        values |= {"zero.offload_param": zero.offload_param}
    return (f"{key}={show(value)}" for key, value in values.items())


def _text(plan: Plan, room: Room, free: Sequence[str], overrides: list[str], legal: int, fitting: int) -> str:
    """The choice, and by what it was made."""
    ranks = f"{room.ranks:,} rank{'s' if room.ranks > 1 else ''}"
    if room.machine is not None and plan.time is not None:
        share = mfu(plan.config, room.ranks, plan.seconds, room.machine)
        why = f"the fastest by estimate: {plan.seconds:.3g} s a step, MFU {share:.1%}, {plan.gb:.1f} GB on a GPU"
    else:
        why = (
            "this hardware has no figures, so by preference: no offload, then ZeRO below 3, few stages, little "
            "recompute, small tp"
        )
    return f"auto    {' '.join(overrides)}\n        of {legal:,} layouts of {ranks} that divide, {fitting:,} fit; {why}"


def _nothing(config: RunConfig, room: Room, free: Sequence[str], legal: int) -> Problem:
    """Why there is no layout, and what would make one."""
    left = ", ".join(free)
    if not legal:
        why = (
            f"{left} can't be chosen: with what is fixed, no layout of {room.ranks:,} ranks divides the model and "
            f"trainer.global_batch_size={config.trainer.global_batch_size}"
        )
    else:
        has = room.host_gb if room.on_cpu else room.gpu_gb
        why = f"none of {legal:,} layouts of {room.ranks:,} ranks fits into {has:,.0f} GB (free: {left})"
    changes = for_model(config, room, free) if room.machine is not None else []
    fix = (
        "one of: " + "; ".join(map(str, changes))
        if changes
        else "leave more to the planner, more ranks, or a smaller model"
    )
    return Problem("auto", None, why, fix + "; allow_oom=true starts one all the same")
