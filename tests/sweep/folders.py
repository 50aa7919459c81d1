"""The folder of a sweep as training leaves it, without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gpt3d.config.load import compose, save_config
from gpt3d.sweep.jobs import JOBS, Job


def begin(folder: Path, objective: str = "validation_loss", report: str = "none") -> None:
    (folder / JOBS).mkdir(parents=True)
    (folder / JOBS / "sweep.about").write_text(json.dumps({"objective": objective, "report": report}))


def add_job(
    folder: Path, overrides: Sequence[str], loss: float, *, tokens: int = 2048, speed: float = 100.0,
    memory: float = 1.0, objective: float | None = None, status: str = "done", reason: str = "", ranks: int = 1,
) -> Job:  # fmt: skip
    """A job that logged two steps and a validation."""
    number = sum(1 for _ in (folder / JOBS).glob("*.json"))
    run_dir = folder / f"{number}_job"
    run_dir.mkdir()
    save_config(compose(["parallel=single", *overrides]), run_dir / "config.yaml")
    lines = [
        {"step": step, "loss": loss + 1, "tokens": tokens * step // 2, "step_s": tokens / 2 / speed,
         "tokens_per_s": speed, "tokens_per_s_per_device": speed / ranks, "memory_gb": memory}
        for step in (1, 2)
    ]  # fmt: skip
    text = "\n".join(json.dumps(line) for line in [*lines, {"step": 2, "validation_loss": loss}])
    (run_dir / "metrics.jsonl").write_text(text + "\n")
    job = Job(number, ["seed=1", *overrides], str(run_dir), status, objective, reason)
    job.write(folder)
    return job
