"""The table of a sweep: one row a job, as text, markdown and CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from gpt3d.planner.table import columns
from gpt3d.sweep.jobs import Figures, Job

HEADS = ("job", "overrides", "validation loss", "tokens/s", "peak memory [GB]", "wandb", "folder", "status")
CELL = 80  # characters of a cell on the terminal; the files have all


def varied(jobs: Sequence[Job]) -> dict[int, str]:
    """Each job's overrides without those that all jobs share."""
    shared = set(jobs[0].overrides).intersection(*(job.overrides for job in jobs)) if len(jobs) > 1 else set()
    return {job.number: " ".join(o for o in job.overrides if o not in shared) or "-" for job in jobs}


def status(job: Job) -> str:
    """The state of a job after the sweep, with the reason of a failure."""
    if job.status == "running":
        return "interrupted"
    return f"{job.status}: {job.reason}" if job.reason else job.status


def rows(jobs: Sequence[Job], reached: dict[int, Figures], sweep_dir: Path) -> list[tuple[str, ...]]:
    """The table's cells, without the head."""
    own = varied(jobs)
    return [
        (
            str(job.number), own[job.number], _number(figures.validation_loss, ".4f"),
            _number(figures.tokens_per_s, ",.0f"), _number(figures.memory_gb, ".2f"), figures.wandb,
            _relative(job.run_dir, sweep_dir), status(job),
        )
        for job in jobs
        for figures in [reached[job.number]]
    ]  # fmt: skip


def best(jobs: Sequence[Job], objective: str) -> Job | None:
    """The finished job with the best objective: the lowest loss, or the most tokens/s."""
    sign = -1 if objective == "tokens_per_s" else 1
    reached = {job.number: job.objective for job in jobs if job.status == "done" and job.objective is not None}
    finite = [job for job in jobs if math.isfinite(reached.get(job.number, math.nan))]
    return min(finite, key=lambda job: sign * reached[job.number], default=None)


def terminal(body: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the numbers to the right; long cells are cut."""
    numbers = [(HEADS[2], HEADS[3], HEADS[4]), *((row[2], row[3], row[4]) for row in body)]
    left = [(HEADS[0], HEADS[1], HEADS[7]), *((row[0], row[1], row[7]) for row in body)]
    names = [f"{number:<4} {_cut(own)}" for number, own, _ in left]
    aligned = columns([(name, *cells) for name, cells in zip(names, numbers, strict=True)], indent="  ")
    width = max(map(len, aligned))
    return "\n".join(f"{line:<{width}}  {_cut(end)}" for line, (_, _, end) in zip(aligned, left, strict=True))


def markdown(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table that every markdown reader draws."""
    lines = [heads, ["---"] * len(heads), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def write_csv(path: Path, jobs: Sequence[Job], reached: dict[int, Figures]) -> None:
    """All figures at full precision, all overrides, the absolute folder."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["job", "overrides", "status", "objective", "validation_loss", "loss", "tokens", "tokens_per_s",
             "memory_gb", "ranks", "wandb", "folder", "reason"]
        )  # fmt: skip
        for job in jobs:
            f = reached[job.number]
            writer.writerow(
                [job.number, " ".join(job.overrides), status(job).partition(":")[0], job.objective, f.validation_loss,
                 f.loss, f.tokens, f.tokens_per_s, f.memory_gb, f.ranks, f.wandb, job.run_dir, job.reason]
            )  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _cut(text: str) -> str:
    return text if len(text) <= CELL else text[: CELL - 3] + "..."


def _relative(folder: str, sweep_dir: Path) -> str:
    path = Path(folder)
    return str(path.relative_to(sweep_dir)) if path.is_relative_to(sweep_dir) else folder
