"""All layouts of a model on some GPUs that are legal and fit, the best first.

By the time model where the machines are known; elsewhere by a preference (`preference`). Nothing that changes the
training is touched; only the advice when nothing fits does that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from gpt3d.config.arithmetic import World, available_ranks, num_microbatches, stage_layers, total_ranks
from gpt3d.config.auto import auto_keys
from gpt3d.config.problems import ConfigError, Problem
from gpt3d.config.rules import OTHER_RULES, check, memory, ranks
from gpt3d.config.schema import RunConfig
from gpt3d.planner.candidates import ALL, MICRO_BATCHES, candidates
from gpt3d.planner.machine import Machine, machine_of
from gpt3d.planner.memory import GB, run_memory, stage_memory
from gpt3d.planner.report import gpu_memory, memory_plan
from gpt3d.planner.time import StepTime, step_time

BEST = 10


@dataclass(frozen=True)
class Room:
    """What a layout must fit into, in GB of 2^30 bytes; None: not known, so anything fits. `machine` gives it time."""

    ranks: int
    per_node: int
    machine: Machine | None
    gpu_gb: float | None
    host_gb: float | None
    on_cpu: bool = False

    def holds(self, config: RunConfig, dp: int) -> bool:
        """Whether every GPU and every machine has the memory."""
        if self.on_cpu:
            nodes = max(1, self.ranks // self.per_node)
            return self.host_gb is None or run_memory(config, dp) / nodes <= self.host_gb * GB
        if self.gpu_gb is not None and largest(config, dp) > self.gpu_gb * GB:
            return False
        if self.host_gb is None or config.zero.offload_optimizer == config.zero.offload_param == "none":
            return True
        host = max(stage_memory(config, dp, stage).host for stage in {0, config.parallel.pp - 1})
        return host * min(self.per_node, self.ranks) <= self.host_gb * GB


@dataclass(frozen=True)
class Plan:
    """A layout that fits: its configuration, its data-parallel degree, its step if the machine is known, and GB of its
    fullest rank."""

    config: RunConfig
    dp: int
    time: StepTime | None
    gb: float

    @property
    def seconds(self) -> float:
        """Estimated seconds of a step; infinite if the machine is not known."""
        return self.time.total if self.time else float("inf")

    @property
    def microbatches(self) -> int:
        """Microbatches of one step on each model copy."""
        return num_microbatches(self.config, self.dp)


@dataclass(frozen=True)
class Found:
    """The best plans, each with the best schedule, ZeRO and offload of its tp, pp, micro batch and recompute.

    `own` is the user's own layout, or why it is none; `left_out` says which axes were not searched, and why.
    """

    config: RunConfig
    room: Room
    plans: list[Plan]
    legal: int
    fitting: int
    own: Plan | str
    left_out: list[str]


def search(config: RunConfig) -> Found:
    """Search around `config` on the cluster it names. ConfigError if the cluster's figures aren't known."""
    room = require_known(config)
    plans, legal, fitting = best_plans(config, room)
    return Found(config, room, plans, legal, fitting, _own(config, room), list(_left_out(config, room)))


def require_known(config: RunConfig) -> Room:
    """The cluster as room for a layout. ConfigError if its figures aren't known."""
    machine, gpu_gb = machine_of(config), gpu_memory(config.cluster)
    if machine is None or gpu_gb is None:
        why = "the search needs the GPU's memory and peak, its links and the GPUs of a node, and not all are known"
        fix = "a named cluster (cluster=h100, cluster.nodes=8); or set cluster.gpu and cluster.*_gb_per_s"
        raise ConfigError([Problem("cluster", config.cluster.name, why, fix)])
    count = available_ranks(config, World()) or total_ranks(config, World())
    return Room(count, machine.gpus_per_node, machine, gpu_gb, config.cluster.host_memory_gb)


def best_plans(config: RunConfig, room: Room, free: Collection[str] = ALL) -> tuple[list[Plan], int, int]:
    """The best plans over the free keys, and how many layouts are legal, and fit."""
    best: dict[tuple[int, int, int, str], tuple[tuple[float, ...], RunConfig, int]] = {}
    legal = fitting = 0
    for candidate, dp in candidates(config, room.ranks, free):
        legal += 1
        if not room.holds(candidate, dp):
            continue
        fitting += 1
        cost = (step_time(candidate, dp, room.machine).total,) if room.machine else preference(candidate)
        key = (candidate.parallel.tp, candidate.parallel.pp, candidate.trainer.micro_batch_size, candidate.recompute)
        if key not in best or cost < best[key][0]:
            best[key] = (cost, candidate, dp)
    plans: list[Plan] = []
    world = World(room.ranks, room.per_node)
    for _, candidate, dp in sorted(best.values(), key=lambda entry: entry[0]):
        if len(plans) < BEST and not check(candidate, world, leave_out=[*OTHER_RULES, memory]):
            plans.append(plan_of(candidate, dp, room))
    return plans, legal, fitting


def plan_of(config: RunConfig, dp: int, room: Room) -> Plan:
    """This layout with its time and size."""
    time = step_time(config, dp, room.machine) if room.machine else None
    return Plan(config, dp, time, largest(config, dp) / GB)


def preference(config: RunConfig) -> tuple[float, ...]:
    """What to prefer, smaller first, where nothing is known of the machine: no offload, parameters not sharded, few
    stages, little recompute, a small tp, a low ZeRO stage but not 0, few chunks, large microbatches."""
    zero, pipeline = config.zero, config.pipeline
    offloaded = (zero.offload_optimizer == "cpu") + (zero.offload_param == "cpu")
    return (
        offloaded,
        zero.stage == 3,
        config.parallel.pp,
        ["none", "selective", "full"].index(config.recompute),
        config.parallel.tp,
        [1, 0, 2, 3][zero.stage],
        ["1f1b", "interleaved", "zb_h1", "gpipe"].index(pipeline.schedule),
        pipeline.chunks,
        -config.trainer.micro_batch_size,
    )


def largest(config: RunConfig, dp: int) -> int:
    """Bytes of the rank that needs the largest GPU. The ends hold more parameters; of the others earlier stages hold
    more activations, later ones more postponed weight gradients (zb_h1): only the outermost are counted."""
    pp, pieces = config.parallel.pp, stage_layers(config)
    sizes = [sum(pieces[stage::pp]) for stage in range(pp)]
    fullest = [stage for stage, size in enumerate(sizes) if size == max(sizes)]
    stages = {0, min(1, pp - 1), fullest[0], fullest[-1], max(0, pp - 2), pp - 1}
    return max(stage_memory(config, dp, stage).total for stage in stages)


def _own(config: RunConfig, room: Room) -> Plan | str:
    """The user's own layout as a plan, or why it is none."""
    if left := auto_keys(config):
        return f"{', '.join(left)} left to the planner"
    if problems := check(config, World(), leave_out=[memory]):
        return str(problems[0]).splitlines()[0]
    plan = memory_plan(config)
    if not plan.fits:
        return f"needs {plan.fullest.total / GB:,.1f} GB on a GPU of {plan.gpu_gb:g} GB"
    return plan_of(config, plan.dp, room)


def _left_out(config: RunConfig, room: Room) -> Iterator[str]:
    """Axes that were not searched."""
    with_cp = replace(config, parallel=replace(config.parallel, cp=2))
    for problem in ranks(with_cp, World()):
        if problem.key == "parallel.cp":
            yield f"cp above 1: {problem.why}"
    if not config.parallel.allow_cross_node_tp and room.ranks > room.per_node:
        yield f"tp beyond the {room.per_node} GPUs of a node (parallel.allow_cross_node_tp=true searches them too)"
    yield f"micro batches other than {', '.join(map(str, MICRO_BATCHES))}"
