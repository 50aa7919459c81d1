"""What would make a layout, or a model on some GPUs, fit: the three cheapest changes, each planned, with its cost."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from operator import attrgetter
from typing import Any

from gpt3d.config.arithmetic import World
from gpt3d.config.problems import show
from gpt3d.config.rules import OTHER_RULES, check, memory
from gpt3d.config.schema import RunConfig
from gpt3d.planner.candidates import ALL, candidates
from gpt3d.planner.machine import machine_of
from gpt3d.planner.report import gpu_memory
from gpt3d.planner.search import Plan, Room, best_plans, plan_of
from gpt3d.planner.time import step_time

MOST = 3
Changes = dict[str, Any]
_FIGURES = ("cluster.gpu", "cluster.gpu_memory_gb", "cluster.peak_tflops")  # what a named cluster stands for


@dataclass(frozen=True)
class Remedy:
    """Overrides that make it fit, the layout that then does, and GPU-seconds a token against those of before (None: not
    known)."""

    overrides: list[str]
    plan: Plan
    gpus: int
    cost: float | None

    def __str__(self) -> str:
        fits = f"{self.plan.gb:,.1f} GB on the fullest of {self.gpus:,} GPU{'s' if self.gpus > 1 else ''}"
        time = f", {self.plan.seconds:,.3g} s a step" if self.plan.time else ""
        cost = "" if self.cost is None else f", {self.cost:.2f} x the GPU time a token"
        return f"{' '.join(self.overrides)}: {fits}{time}{cost}"


def for_layout(config: RunConfig, dp: int, room: Room) -> list[Remedy]:
    """The cheapest changes of this layout that fit on these GPUs, or on more; two or three together where single ones
    are not enough."""
    steps, found = list(_layout_changes(config, dp, room)), list[tuple[Changes, Remedy]]()
    for size in (1, 2, 3):
        for merged in _together(steps, size, [changes for changes, _ in found]):
            if (remedy := _tried(config, dp, room, merged)) is not None:
                found.append((merged, remedy))
        if len(found) >= MOST:
            break
    return sorted((remedy for _, remedy in found), key=lambda remedy: (remedy.cost or 0.0, remedy.plan.gb))[:MOST]


def _together(steps: Sequence[Changes], size: int, enough: Sequence[Changes]) -> Iterator[Changes]:
    """`size` of the steps as one, where they touch different keys and nothing less is enough."""
    for several in combinations(steps, size):
        merged = {key: value for changes in several for key, value in changes.items()}
        if len(merged) == sum(map(len, several)) and not any(less.items() <= merged.items() for less in enough):
            yield merged


def _tried(config: RunConfig, dp: int, room: Room, changes: Changes) -> Remedy | None:
    """This layout with these changes, if it is legal and fits; more nodes become more copies."""
    other, ranks = changed(config, changes), room.ranks
    if "cluster.nodes" in changes:
        ranks = ranks * changes["cluster.nodes"] // config.cluster.nodes
    other.parallel.dp, rest = divmod(ranks, other.parallel.tp * other.parallel.cp * other.parallel.pp)
    larger = replace(room, ranks=ranks)
    if rest or check(other, World(ranks, room.per_node), leave_out=[*OTHER_RULES, memory]):
        return None
    if not larger.holds(other, other.parallel.dp):
        return None
    plan, cost = plan_of(other, other.parallel.dp, larger), None
    if room.machine is not None and plan.time is not None:
        cost = plan.seconds * ranks / (step_time(config, dp, room.machine).total * room.ranks)
    return Remedy(_typed(changes), plan, ranks, cost)


def _layout_changes(config: RunConfig, dp: int, room: Room) -> Iterator[Changes]:
    """Single changes of a layout that need less memory."""
    p, zero = config.parallel, config.zero
    if config.precision.dtype == "fp32":
        yield {"precision.dtype": "bf16"}
    elif config.precision.grad_dtype == "fp32":
        yield {"precision.grad_dtype": config.precision.dtype}
    if config.trainer.micro_batch_size > 1:
        yield {"trainer.micro_batch_size": 1}
    for recompute in ("selective", "full"):
        if config.recompute == "none" or (config.recompute, recompute) == ("selective", "full"):
            yield {"recompute": recompute}
    if p.tp > 1 and not p.sequence_parallel:
        yield {"parallel.sequence_parallel": True}
    for stage in range(zero.stage + 1, 4):
        yield {"zero.stage": stage}
    if zero.offload_optimizer == "none" and zero.stage > 0:
        yield {"zero.offload_optimizer": "cpu"}
    if zero.stage < 3 or zero.offload_param == "none":
        yield {"zero.stage": 3, "zero.offload_optimizer": "cpu", "zero.offload_param": "cpu"}
    for factor in (2, 4):
        yield {"parallel.tp": p.tp * factor, "parallel.sequence_parallel": True}
        yield {"parallel.pp": p.pp * factor, "parallel.layers_per_stage": None}
    if config.cluster.gpus_per_node is not None:
        yield {"cluster.nodes": config.cluster.nodes * 2}


def for_model(config: RunConfig, room: Room, free: Collection[str] = ALL) -> list[Remedy]:
    """Changes outside the layout with which some layout fits, each with the best one, those first that cost nothing."""
    found: list[tuple[Changes, Remedy]] = []
    smallest: dict[str, Changes] = {}
    done: set[str] = set()
    for changes in _model_changes(config):
        key = next(iter(changes))
        smallest.setdefault(key, changes)
        if key not in done and (remedy := _best_with(config, room, free, changes)) is not None:
            done.add(key)  # of each key the smallest step that is enough
            found.append((changes, remedy))
        if len(found) == MOST:
            break
    for merged in _together(list(smallest.values()), 2, [changes for changes, _ in found]):
        if len(found) < MOST and done.isdisjoint(merged):
            remedy = _best_with(config, room, free, merged)
            found += [(merged, remedy)] if remedy is not None else []
    return [remedy for _, remedy in found]


def _best_with(config: RunConfig, room: Room, free: Collection[str], changes: Changes) -> Remedy | None:
    """The best layout after these changes, if one fits."""
    other = changed(config, changes)
    ranks = room.ranks * other.cluster.nodes // config.cluster.nodes
    larger = replace(room, ranks=ranks, machine=machine_of(other), gpu_gb=gpu_memory(other.cluster))
    plans = best_plans(other, larger, free)[0] if exists(other, larger, free) else []
    return Remedy(_typed(changes), plans[0], ranks, None) if plans else None


def exists(config: RunConfig, room: Room, free: Collection[str] = ALL) -> bool:
    """Whether any layout fits; only the leanest settings are tried."""
    return any(room.holds(candidate, dp) for candidate, dp in candidates(config, room.ranks, free, leanest=True))


def _model_changes(config: RunConfig) -> Iterator[Changes]:
    """Single changes outside the layout, the cheapest first."""
    if config.precision.dtype == "fp32":
        yield {"precision.dtype": "bf16"}
    elif config.precision.grad_dtype == "fp32":
        yield {"precision.grad_dtype": config.precision.dtype}
    batch, nodes, seq = config.trainer.global_batch_size, config.cluster.nodes, config.data.seq_len
    for factor in (2**i for i in range(1, 12)):
        yield {"trainer.global_batch_size": batch * factor}
    for factor in (2, 4, 8, 16, 32, 64):
        yield {"cluster.nodes": nodes * factor}
    for factor in (2, 4, 8):
        if seq % factor == 0:
            yield {"data.seq_len": seq // factor}
    for name, gpu in (("h200", "H200-SXM-141GB"), ("b200", "B200-SXM-180GB")):
        gb = {"h200": 141.0, "b200": 180.0}[name]
        if gb > (gpu_memory(config.cluster) or gb):
            yield {"cluster": name, "cluster.gpu": gpu, "cluster.gpu_memory_gb": gb, "cluster.peak_tflops": None}


def changed(config: RunConfig, changes: Changes) -> RunConfig:
    """A copy with these keys set."""
    other = copy.deepcopy(config)
    for key, value in changes.items():
        parent, _, name = key.rpartition(".")
        if parent:
            setattr(attrgetter(parent)(other), name, value)
        elif key != "cluster":
            setattr(other, name, value)
    return other


def _typed(changes: Changes) -> list[str]:
    """The changes as they are typed: a named cluster stands for its figures."""
    told = {k: v for k, v in changes.items() if v is not None and not ("cluster" in changes and k in _FIGURES)}
    return [f"{key}={show(value)}" for key, value in told.items()]
