"""Layouts as they were planned and as they ran: memory of the fullest rank, time of a step, and the order of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt3d.config.arithmetic import World, resolve_dp
from gpt3d.config.load import load_config
from gpt3d.planner.machine import machine_of
from gpt3d.planner.memory import GB, cpu_bytes_by_stage, memory_by_stage
from gpt3d.planner.table import columns
from gpt3d.planner.time import step_time
from gpt3d.sweep.jobs import Figures, Job
from gpt3d.sweep.table import varied


@dataclass(frozen=True)
class Compared:
    """One layout: GB (2^30 bytes) of the fullest rank, tokens/s of all ranks; planned ones None without figures."""

    name: str
    planned_gb: float
    memory_gb: float | None
    planned_tokens_per_s: float | None
    tokens_per_s: float | None


def compare(job: Job, name: str, reached: Figures) -> Compared:
    """The plan for a finished job's configuration, beside what was measured."""
    config = load_config(Path(job.run_dir) / "config.yaml")
    dp = resolve_dp(config, World(ranks=reached.ranks))
    on_cpu = device_of_job(job) == "cpu"
    parts = cpu_bytes_by_stage(config, dp) if on_cpu else [rank.total for rank in memory_by_stage(config, dp)]
    machine = None if on_cpu else machine_of(config)
    tokens = config.trainer.global_batch_size * config.data.seq_len
    planned = tokens / step_time(config, dp, machine, exact=True).total if machine else None
    return Compared(name, max(parts) / GB, reached.memory_gb, planned, reached.tokens_per_s)


def device_of_job(job: Job) -> str:
    """cuda or cpu: what the job's ranks computed on, which is what this machine has unless the configuration says."""
    from gpt3d.launch.machine import this_machine

    config = load_config(Path(job.run_dir) / "config.yaml")
    return this_machine(config).device or "cpu"


def report(jobs: Sequence[Job], reached: dict[int, Figures], sweep_dir: Path) -> str:
    """Planned against measured, as text."""
    names = varied(jobs)
    done = [job for job in jobs if job.status == "done" and reached[job.number].tokens_per_s]
    if not done:
        return "plan    no layout has finished: nothing to compare"
    found = [compare(job, names[job.number], reached[job.number]) for job in done]
    found.sort(key=lambda c: -(c.tokens_per_s or 0))
    head = ("fastest first", "tokens/s", "planned", "memory [GB]", "planned [GB]")
    body = [
        (c.name, _text(c.tokens_per_s, ",.0f"), _text(c.planned_tokens_per_s, ",.0f"), _text(c.memory_gb, ".3f"),
         _text(c.planned_gb, ".3f"))
        for c in found
    ]  # fmt: skip
    on_cpu = device_of_job(done[0]) == "cpu"
    lines = ["measured against the plan", *columns([head, *body]), _memory_order(found, on_cpu), _time_order(found)]
    return "\n".join(lines)


def _memory_order(found: Sequence[Compared], on_cpu: bool) -> str:
    pairs = [(c.planned_gb, c.memory_gb) for c in found if c.memory_gb is not None]
    note = "; measured is the whole process, libraries included, planned its tensors: compare the order" * on_cpu
    return f"memory: {_agreement(pairs)}{note}"


def _time_order(found: Sequence[Compared]) -> str:
    pairs = [
        (c.planned_tokens_per_s, c.tokens_per_s) for c in found if c.planned_tokens_per_s is not None and c.tokens_per_s
    ]
    if not pairs:
        return "speed: n/a planned, the plan has no times for this machine (it knows GPUs of a named cluster=)"
    return f"speed: {_agreement(pairs)}"


def _agreement(pairs: Sequence[tuple[float, float]]) -> str:
    """How many pairs of layouts stand in the same order in both (Kendall); ties of the plan do not count."""
    same = other = 0
    for i, (a, b) in enumerate(pairs):
        for c, d in pairs[:i]:
            if a != c:
                same += (a - c) * (b - d) > 0
                other += (a - c) * (b - d) <= 0
    if not same + other:
        return "too few layouts to compare their order"
    return f"the plan has {same} of {same + other} pairs of layouts in the measured order"


def _text(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)
