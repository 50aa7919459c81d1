"""The memory plan of one layout: per pipeline stage, the verdict, and the same as plain data for JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from gpt3d.config.arithmetic import World, num_microbatches, resolve_dp, stage_layers
from gpt3d.config.notes import batch_in_words
from gpt3d.config.schema import ClusterConfig, RunConfig
from gpt3d.model.flops import parameter_count
from gpt3d.planner.hardware import known_gpus, lookup
from gpt3d.planner.machine import machine_of
from gpt3d.planner.memory import (
    CONTEXT_GB,
    FRAGMENTATION,
    GB,
    NCCL_GB,
    RankMemory,
    host_by_node,
    memory_by_stage,
    pairs_in_flight,
    size,
    state_bytes,
)
from gpt3d.planner.need import PARTS, layout_in_words, what_helps
from gpt3d.planner.table import columns
from gpt3d.planner.time_report import time_data

SHOWN_STAGES = 32


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What each stage of a layout needs and whether that is there; `fits` None: no GPU is named and some would do."""

    config: RunConfig
    dp: int
    stages: list[RankMemory]
    gpu_gb: float | None
    host_gb: float | None
    host_need: int  # bytes of the fullest machine

    @property
    def ranks(self) -> int:
        """GPUs of the layout."""
        return len(self.stages) * self.config.parallel.tp * self.config.parallel.cp * self.dp

    @property
    def fullest(self) -> RankMemory:
        """The rank that needs the largest GPU."""
        return max(self.stages, key=lambda memory: memory.total)

    @property
    def fits(self) -> bool | None:
        host = self.host_gb is None or self.host_need <= self.host_gb * GB
        if self.gpu_gb is None:
            return None if host and self.candidates() else False
        return host and self.fullest.total <= self.gpu_gb * GB

    def candidates(self) -> list[str]:
        """GPUs of the hardware table that are large enough, the smallest first."""
        large = [gpu for gpu in known_gpus() if self.fullest.total <= gpu.memory_gb * GB]
        return [f"{gpu.name} ({gpu.memory_gb:g} GB)" for gpu in sorted(large, key=lambda gpu: gpu.memory_gb)]


def gpu_memory(cluster: ClusterConfig) -> float | None:
    """GB of one GPU: `cluster.gpu_memory_gb`, else the table's figure for `cluster.gpu`."""
    if cluster.gpu_memory_gb is not None:
        return cluster.gpu_memory_gb
    gpu = lookup(cluster.gpu) if cluster.gpu else None
    return gpu.memory_gb if gpu else None


def memory_plan(config: RunConfig) -> MemoryPlan:
    """The plan of a configuration that has passed the rules, but for its memory."""
    cluster, dp = config.cluster, resolve_dp(config, World())
    host = host_by_node(config, dp, cluster.gpus_per_node or 8)
    return MemoryPlan(config, dp, memory_by_stage(config, dp), gpu_memory(cluster), cluster.host_memory_gb, host)


def memory_text(plan: MemoryPlan) -> str:
    """The plan for the terminal."""
    config, dp = plan.config, plan.dp
    lines = [
        f"{layout_in_words(config, dp)}: {plan.ranks:,} GPU{'s' if plan.ranks > 1 else ''}",
        batch_in_words(config, dp),
        "",
        *_state_lines(config, dp),
        "",
        "One rank of each pipeline stage, at its peak; GB are 2^30 bytes, MB 2^20:",
        *columns(_stage_rows(plan)),
        f"  margin: {CONTEXT_GB:g} GB for the CUDA context and cuBLAS, {NCCL_GB:g} GB for NCCL on each axis above 1, "
        f"{FRAGMENTATION:.0%} of activations, logits and buffers for fragmentation",
        *([f"  host memory: {size(plan.host_need)} on the fullest machine"] if plan.host_need else []),
        "",
        verdict(plan),
    ]
    return "\n".join(lines)


def verdict(plan: MemoryPlan) -> str:
    """One line, and where it doesn't fit one more with what would help."""
    need, helps = plan.fullest, ""
    if plan.fits is False:
        helps = "\n  what would help: " + "; ".join([*what_helps(plan.config, plan.dp, need), "search=true"])
    stage = f"stage {plan.stages.index(need)} needs {size(need.total)}"
    if plan.gpu_gb is None:
        names = plan.candidates()
        if not names:
            return f"does not fit: {stage}, more than any GPU of the hardware table has{helps}"
        some = ", ".join(names[:4]) + (" and larger" if names[4:] else "")
        return f"no GPU is named (cluster=h100, or cluster.gpu_memory_gb=N): {stage}, which fits {some}"
    if plan.host_gb is not None and plan.host_need > plan.host_gb * GB:
        return f"does not fit: {size(plan.host_need)} of host memory on a machine of {plan.host_gb:,g} GB{helps}"
    words = "fits" if plan.fits else "does not fit"
    return f"{words}: {stage} of {plan.gpu_gb:g} GB ({need.total / (plan.gpu_gb * GB):.0%}){helps}"


def plan_data(plan: MemoryPlan) -> dict[str, Any]:
    """The plan as plain data; sizes are bytes."""
    p, config = plan.config.parallel, plan.config
    stages = [{**dataclasses.asdict(memory), "total": memory.total} for memory in plan.stages]
    return {
        "model": config.model.name,
        "parameters": parameter_count(config.model),
        "layout": {"tp": p.tp, "cp": p.cp, "pp": p.pp, "dp": plan.dp, "sequence_parallel": p.sequence_parallel},
        "schedule": config.pipeline.schedule,
        "zero": config.zero.stage,
        "recompute": config.recompute,
        "stages": stages,
        "gpu_memory_gb": plan.gpu_gb,
        "host_bytes_by_node": plan.host_need,
        "fits": plan.fits,
    }


def run_plan(config: RunConfig, dp: int, device: str) -> dict[str, Any]:
    """What a run was expected to need, to be kept beside what it measures; sizes are bytes, the step in seconds."""
    stages = memory_by_stage(config, dp, on_cpu=device == "cpu")
    host = host_by_node(config, dp, config.cluster.gpus_per_node or 8)
    data = plan_data(MemoryPlan(config, dp, stages, gpu_memory(config.cluster), config.cluster.host_memory_gb, host))
    machine = machine_of(config) if device == "cuda" else None
    data["device"] = device
    return data | (time_data(config, dp, machine) if machine is not None else {})


def _state_lines(config: RunConfig, dp: int) -> list[str]:
    """Bytes a parameter before activations, of the whole model and divided by ZeRO over several numbers of copies."""
    count, precision = parameter_count(config.model, padded=True), config.precision
    own = state_bytes(precision.dtype, precision.grad_dtype, config.zero.stage)
    each = own.whole + own.divided
    total = each * count
    named = re.search(r"(?<![\d.])(\d+(?:\.\d+)?)b$", config.model.name)
    nominal = f"; counted as {named[1]}e9 parameters {each * float(named[1]):,.0f} GB" if named else ""
    share = count / (config.parallel.tp * config.parallel.pp)
    unit, name = unit_of(share * each)
    lines = [
        f"{count:,} parameters x {each} bytes ({own.weights} weight + {own.gradients} gradient + {own.optimizer} "
        f"optimizer) = {total:,} bytes",
        f"  = {total / 1e9:,.1f} GB of 10^9 ({total / GB:,.1f} of 2^30){nominal}, before activations",
        f"  divided over tp x pp = {config.parallel.tp * config.parallel.pp} and by ZeRO over dp copies, {name} a GPU:",
    ]
    degrees = sorted({dp, 8, 64})
    rows = [["  ZeRO", "bytes a parameter", *(f"dp {d}" for d in degrees)]]
    for stage in range(4):
        kind = state_bytes(precision.dtype, precision.grad_dtype, stage)
        formula = " + ".join([str(kind.whole)] * bool(kind.whole) + [f"{kind.divided}/dp"] * bool(kind.divided))
        sizes = [f"{share * (kind.whole + kind.divided / d) / unit:,.1f}" for d in degrees]
        rows.append([f"  {stage}", formula, *sizes])
    return lines + columns(rows)


def unit_of(count: float) -> tuple[int, str]:
    """The unit in which to show sizes of which `count` is the largest: GB of 2^30 bytes, or MB of 2^20."""
    return (GB, "GB") if count >= GB else (2**20, "MB")


def _stage_rows(plan: MemoryPlan) -> list[list[str]]:
    """Header and one row a stage; of a long pipeline the ends and the fullest."""
    config, pp = plan.config, plan.config.parallel.pp
    parts = [name for name in PARTS if any(getattr(memory, name) for memory in plan.stages)]
    unit, name = unit_of(plan.fullest.device)
    rows = [["stage", "layers", "in flight", "parameters", *parts, f"total {name}"]]
    held = pairs_in_flight(config.pipeline.schedule, pp, config.pipeline.chunks, num_microbatches(config, plan.dp))
    shown = set(range(pp)) if pp <= SHOWN_STAGES else {0, 1, 2, plan.stages.index(plan.fullest), pp - 2, pp - 1}
    for stage in sorted(shown):
        memory = plan.stages[stage]
        flight = held[stage] / config.pipeline.chunks
        sizes = [f"{getattr(memory, part) / unit:,.1f}" for part in parts]
        layers = sum(stage_layers(config)[stage::pp])
        start = [str(stage), str(layers), f"{flight:g}", f"{memory.parameters:,}"]
        rows.append([*start, *sizes, f"{memory.total / unit:,.1f}"])
    return rows


def write_json(config: RunConfig, data: dict[str, Any]) -> str | None:
    """Write `data` where `plan_json` says; what to tell if that can't be."""
    if config.plan_json is None:
        return None
    try:
        Path(config.plan_json).write_text(json.dumps(data, indent=2) + "\n")
    except OSError as error:
        return f"gpt3d: plan_json={config.plan_json} can't be written: {error.strerror}"
    return None
