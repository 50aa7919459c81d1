"""Weights & Biases: one run, by an id of our own, on the step as the x axis of everything."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpt3d.config.schema import WandbConfig
from gpt3d.tracking.metrics import Metrics, grouped

FLUSH_SECONDS = 2.0  # wandb's file lags by this much; its default, 15, loses as much of a killed run


@dataclass(frozen=True)
class WandbRun:
    """What makes one run at wandb. `lines`: dictionaries logged by earlier starts of it; `about` is shown as config."""

    options: WandbConfig
    id: str
    name: str
    folder: Path
    lines: int
    finish_seconds: float
    about: Callable[[], Mapping[str, Any]]


def wanted_mode(options: WandbConfig) -> str:
    """disabled, online or offline. WANDB_MODE can turn an online run down: a site may set it where there is no net."""
    restricted = os.environ.get("WANDB_MODE")
    return restricted if options.mode == "online" and restricted in ("offline", "disabled") else options.mode


class WandbSink:
    """Offline too when online fails: then nothing is lost, and `close` says how to upload it."""

    def __init__(self, spec: WandbRun, say: Callable[[str], None]) -> None:
        import wandb

        self.spec, self.say, self.wandb, self.next = spec, say, wandb, spec.lines
        self.settings: dict[str, Any] = {
            "console": "off",
            "silent": True,
            "init_timeout": spec.options.start_seconds,
            "finish_timeout": spec.finish_seconds,
            "disable_git": True,  # `about` has it
            "disable_code": True,
            "x_save_requirements": False,
            "x_transaction_log_flush_interval": FLUSH_SECONDS,
        }
        wandb.setup(settings=wandb.Settings(**self.settings))
        self.run = self._open()
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")  # a run that is rolled back goes on; wandb's counter cannot

    def _open(self) -> Any:
        if wanted_mode(self.spec.options) == "offline":
            return self._init("offline")
        try:
            if not self.wandb.login(prompt=False):  # init itself would ask at the terminal
                raise RuntimeError("no API key; set WANDB_API_KEY or run `wandb login`")
            return self._init("online")
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.say(f"warning: wandb cannot be used online ({reason}); the run is kept for a later upload")
            self.wandb.teardown()  # the failed start still holds the id
            return self._init("offline")

    def _init(self, mode: Literal["online", "offline"]) -> Any:
        options = self.spec.options
        run = self.wandb.init(
            mode=mode, id=self.spec.id, resume="allow", dir=str(self.spec.folder), name=self.spec.name,
            project=options.project, entity=options.entity, group=options.group, job_type=options.job_type or "train",
            tags=options.tags, config=dict(self.spec.about()), settings=self.wandb.Settings(**self.settings),
        )  # fmt: skip
        self.offline = mode == "offline"
        if not self.offline:
            self.say(f"wandb   {run.url}")
            with contextlib.suppress(OSError):
                (self.spec.folder / "wandb_url").write_text(f"{run.url}\n")
        return run

    def log(self, metrics: Metrics) -> None:
        """Offline, each start of a run is a file of its own: entries are numbered on, so that no upload hides another.
        Online, wandb knows the last number itself."""
        self.run.log(grouped(metrics), step=self.next if self.offline else None)
        self.next += 1

    def close(self, exit_code: int) -> None:
        self.run.finish(exit_code=exit_code)
        if self.offline:
            self.say(f"wandb   offline; to upload: {sync_command(self.spec.folder, self.spec.id)}")


def sync_command(folder: Path, run_id: str) -> str:
    """Uploads every start of the run, the first one first."""
    parts = sorted((folder / "wandb").glob(f"offline-run-*-{run_id}"))
    return shlex.join(["wandb", "sync", "--id", run_id, *map(str, parts)])
