"""The Hydra callback that writes down each job of a sweep as it begins and ends (`hydra.callbacks` in conf/)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from gpt3d.config.problems import ConfigError
from gpt3d.sweep.jobs import JOBS, Job, in_one_line, set_aside, update


class SweepRecord(Callback):
    """`report`: what follows the table at the end: none | layouts | scaling.

    `folder` is that of the sweep this process runs: Hydra tells nobody when a sweep ends by a failure or Ctrl-C, so the
    command asks for it.
    """

    folder: ClassVar[Path | None] = None

    def __init__(self, report: str = "none") -> None:
        self.report = report

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Prepare the folder."""
        folder = SweepRecord.folder = sweep_dir(config)
        set_aside(folder)
        (folder / JOBS).mkdir(parents=True)
        about = {"report": self.report, "objective": config.objective}
        (folder / JOBS / "sweep.about").write_text(json.dumps(about))

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """The job is running."""
        if config.hydra.mode == RunMode.MULTIRUN:
            hydra = config.hydra
            job = Job(hydra.job.num, list(hydra.overrides.task), hydra.runtime.output_dir)
            job.write(sweep_dir(config))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """It is done, or failed: told in full at once, since the sweep goes on."""
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        folder, number = sweep_dir(config), config.hydra.job.num
        if job_return.status == JobStatus.COMPLETED:
            update(folder, number, status="done", objective=job_return.return_value)
            return
        error = job_return._return_value  # `return_value` would raise it
        reason = in_one_line(error)
        update(folder, number, status="failed", reason=reason, error=str(error))
        if not isinstance(error, ConfigError):  # which the command has printed
            print(f"sweep   job {number} failed: {error}", file=sys.stderr, flush=True)


def sweep_dir(config: DictConfig) -> Path:
    """The sweep's folder; Hydra's is relative to where the command was started."""
    return Path(config.hydra.runtime.cwd, config.hydra.sweep.dir).absolute()
