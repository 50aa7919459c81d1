"""What is kept of each job of a sweep: one small JSON file in `<sweep folder>/jobs`, written by whoever runs the job.

Files, because with a launcher plugin the jobs run in other processes or on other machines.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpt3d.config.problems import ConfigError, show

JOBS = "jobs"


class SweepFailed(RuntimeError):
    """A search cannot begin, or found nothing; the message is complete."""

    show_traceback = False


@dataclass
class Job:
    """One job. `status`: running | done | failed; a job that is still "running" after the sweep was interrupted."""

    number: int
    overrides: list[str]
    run_dir: str
    status: str = "running"
    objective: float | None = None
    reason: str = ""  # of a failure, in one line
    error: str = ""  # all of it

    def write(self, sweep_dir: Path) -> None:
        """Into the sweep's folder, whole or not at all."""
        file = _file(sweep_dir, self.number)
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".tmp")
        draft.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        draft.replace(file)


@dataclass(frozen=True)
class Figures:
    """What a run reached, read from its folder. None: not known. Units as in docs/metrics.md."""

    validation_loss: float | None = None
    loss: float | None = None  # training loss, last logged
    tokens_per_s: float | None = None  # of all ranks, over the logged steps without the first
    memory_gb: float | None = None  # highest of any rank
    tokens: int | None = None
    ranks: int | None = None
    wandb: str = "n/a"
    last: dict[str, Any] = field(default_factory=dict)  # the last training line of metrics.jsonl


def read_jobs(sweep_dir: Path) -> list[Job]:
    """All jobs that have begun, in order."""
    files = (sweep_dir / JOBS).glob("*.json")
    return sorted((Job(**json.loads(file.read_text())) for file in files), key=lambda job: job.number)


def update(sweep_dir: Path, number: int, **changes: Any) -> None:
    """Change a job's record, if it has one."""
    file = _file(sweep_dir, number)
    if file.is_file():
        dataclasses.replace(Job(**json.loads(file.read_text())), **changes).write(sweep_dir)


def set_aside(sweep_dir: Path) -> None:
    """Number what an earlier sweep in this folder left (`jobs-1`, `sweep-1.csv`), so that nothing is overwritten."""
    if not (sweep_dir / JOBS).exists():
        return
    number = 1 + sum(1 for _ in sweep_dir.glob(f"{JOBS}-*"))
    for path in (sweep_dir / JOBS, *sweep_dir.glob("sweep.*"), *sweep_dir.glob("scaling.*")):
        path.rename(path.with_name(f"{path.stem}-{number}{path.suffix}"))


def in_one_line(error: BaseException) -> str:
    """Why a job failed, short enough for a table."""
    if isinstance(error, ConfigError):
        heads = (
            f"{p.key}: {p.why}" if p.value is None else f"{p.key}={show(p.value)}: {p.why}" for p in error.problems
        )
        return "; ".join(head.splitlines()[0] for head in heads)
    return (str(error).splitlines() or [type(error).__name__])[0]


def figures(run_dir: Path) -> Figures:
    """Read a run's folder; a run that never wrote a line has no figures."""
    lines = list(_metrics(run_dir / "metrics.jsonl"))
    training = [line for line in lines if line.get("loss") is not None]
    validation = [line["validation_loss"] for line in lines if line.get("validation_loss") is not None]
    if not training:
        return Figures(validation_loss=validation[-1] if validation else None, wandb=_wandb(run_dir))
    last = training[-1]
    speed, per_device = last.get("tokens_per_s"), last.get("tokens_per_s_per_device")
    return Figures(
        validation[-1] if validation else None, last["loss"], steady_speed(training),
        max(line.get("memory_gb") or 0.0 for line in training) or None,
        last.get("tokens"), round(speed / per_device) if speed and per_device else None, _wandb(run_dir), last,
    )  # fmt: skip


def steady_speed(lines: list[dict[str, Any]]) -> float | None:
    """Tokens/s over all logged steps but the first, which warms up; of one line, that line's."""
    tokens = seconds = 0.0
    for before, line in pairwise(lines):
        if line.get("step_s") and line["step"] > before["step"]:  # a rolled-back run repeats steps
            tokens += line["tokens"] - before["tokens"]
            seconds += line["step_s"] * (line["step"] - before["step"])
    return tokens / seconds if seconds else lines[0].get("tokens_per_s")


def _metrics(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines() if file.is_file() else []:
        try:
            yield json.loads(line)
        except ValueError:  # the last line of a killed run
            continue


def _wandb(run_dir: Path) -> str:
    """The run's address if it is known, else its id."""
    url, name = run_dir / "wandb_url", run_dir / "wandb_id"
    if url.is_file():
        return url.read_text().strip()
    return f"id {name.read_text().strip()}" if name.is_file() else "n/a"


def _file(sweep_dir: Path, number: int) -> Path:
    return sweep_dir / JOBS / f"{number}.json"
