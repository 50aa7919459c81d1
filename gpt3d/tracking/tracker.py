"""All sinks of a run, on rank 0. On the other ranks the same calls do nothing."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from gpt3d.config.schema import RunConfig
from gpt3d.tracking.background import Background
from gpt3d.tracking.metrics import Metrics
from gpt3d.tracking.panel import new_console
from gpt3d.tracking.sinks import JsonLines
from gpt3d.tracking.tensorboard_sink import TensorBoardSink
from gpt3d.tracking.wandb_sink import WandbRun, WandbSink, wanted_mode

FAILED_SECONDS = 5.0  # for the trackers when the run has failed: its message should not wait for long
PICTURE_SECONDS = 30.0  # a shorter run does not spend a second on report.png; `python -m gpt3d.report` draws it


class Tracker:
    """The terminal and metrics.jsonl at once; wandb and TensorBoard, in the background, inside the `with` block."""

    def __init__(self, config: RunConfig, run_dir: Path, is_main: bool, plan: Mapping[str, Any] | None = None) -> None:
        self.config, self.run_dir, self.is_main, self.plan = config, run_dir, is_main, dict(plan or {})
        self.first_step, self.lines_elsewhere, self.begun = 0, 0, 0.0
        self.wandb_id: str | None = None
        self.background: list[Background] = []
        if is_main:
            self.console = new_console(config)
            self.jsonl = JsonLines(run_dir / "metrics.jsonl", self.say)
            self.events = JsonLines(run_dir / "events.jsonl", self.say)

    def restore(self, step: int, saved: Mapping[str, Any]) -> None:
        """The run goes on after `step` with what `state` gave when that checkpoint was saved."""
        self.first_step, self.wandb_id = step, saved.get("wandb_id")
        if self.is_main:  # in another folder, if this one has fewer
            self.lines_elsewhere = max(saved.get("lines", 0) - self.jsonl.lines, 0)
        self.advance(step)

    def state(self) -> dict[str, Any]:
        """What belongs into a checkpoint, so that a later start continues the same run at wandb."""
        return {"wandb_id": self.wandb_id, "lines": self._lines()} if self.is_main else {}

    def __enter__(self) -> Tracker:
        options, self.begun = self.config.tracking, time.monotonic()
        self.event("start", step=self.first_step)
        if self.is_main and self.plan:
            self._attempt("plan.json", lambda path: path.write_text(json.dumps(self.plan, indent=2) + "\n"))
        if self.is_main and wanted_mode(options.wandb) != "disabled":
            spec = WandbRun(
                options.wandb, self._run_id(), options.wandb.name or self.config.run_name,
                self.run_dir, self._lines(), options.finish_seconds, self._about,
            )  # fmt: skip
            self.background.append(Background("wandb", lambda: WandbSink(spec, self.say), self.say))
        if self.is_main and options.tensorboard:
            folder = self.run_dir / "tensorboard"
            opener = lambda: TensorBoardSink(folder, self.first_step, self._about)  # noqa: E731
            self.background.append(Background("tensorboard", opener, self.say))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.is_main:
            return
        code, seconds = _exit_code(error), self.config.tracking.finish_seconds
        end = time.monotonic() + (min(seconds, FAILED_SECONDS) if code else seconds)
        for sink in self.background:
            sink.close(code, max(end - time.monotonic(), 0.0))
        self.event("end", exit_code=code, why="" if error is None else _first_line(error))
        self.console.close()
        self.jsonl.close()
        self.events.close()
        if self.config.tracking.report:
            self._report(pictures=not code and time.monotonic() - self.begun > PICTURE_SECONDS)

    def log(self, metrics: Metrics) -> None:
        """One dictionary to every sink."""
        if self.is_main:
            self.console.log(metrics)
            self.jsonl.append(metrics)
            for sink in self.background:
                sink.log(metrics)

    def event(self, name: str, **about: Any) -> None:
        """Something that is no metric, in events.jsonl: start, end, skipped step, timeline, sample."""
        if self.is_main:
            self.events.append({"event": name, **about})

    def say(self, text: str) -> None:
        """A line of text on the terminal."""
        if self.is_main:
            self.console.print(text)

    def end_panel(self) -> None:
        """Leave the live panel as it is; what is said from now on stands below it."""
        if self.is_main:
            self.console.close()

    def advance(self, steps: int = 1) -> None:
        """So many more steps are done."""
        if self.is_main:
            self.console.advance(steps)

    def _report(self, pictures: bool) -> None:
        """report.html in the run folder; whatever goes wrong there is one warning."""
        from gpt3d.reporting.write import write_report

        self._attempt("report.html", lambda path: write_report([self.run_dir], path, pictures))

    def _attempt(self, name: str, write: Callable[[Path], Any]) -> None:
        try:
            write(self.run_dir / name)
        except Exception as error:
            self.say(f"warning: {self.run_dir / name} could not be written ({_first_line(error)})")

    def _lines(self) -> int:
        return self.lines_elsewhere + self.jsonl.lines

    def _run_id(self) -> str:
        """This folder's run at wandb; else, unless it is a fork, the checkpoint's; else a new one."""
        file = self.run_dir / "wandb_id"
        if stored := _stored_id(file):
            self.wandb_id = stored
        elif self.wandb_id is None or self.config.tracking.wandb.fork:
            self.wandb_id = secrets.token_hex(4)
        else:
            fork = "tracking.wandb.fork=true makes a run of its own"
            self.say(f"wandb   continues the checkpoint's run {self.wandb_id}; {fork}")
        self._attempt(file.name, lambda path: path.write_text(f"{self.wandb_id}\n"))
        return self.wandb_id

    def _about(self) -> dict[str, Any]:
        """The settings, and where and by what they are run. Called in the background: git may take a while."""
        from omegaconf import OmegaConf

        from gpt3d.launch.rundir import describe_environment
        from gpt3d.model.flops import parameter_count

        settings: Any = OmegaConf.to_container(OmegaConf.structured(self.config))
        return {**settings, "parameters": parameter_count(self.config.model), "plan": self.plan,
                "environment": describe_environment()}  # fmt: skip


def _stored_id(file: Path) -> str:
    """Empty if there is none, or a full disk has left an empty file."""
    with contextlib.suppress(OSError):
        return file.read_text().strip()
    return ""


def record_failure(run_dir: Path, failure: Exception, report: bool) -> None:
    """The supervisor's word on a run that it has ended, in events.jsonl and report.html.

    A rank 0 that was killed has said nothing, and one whose peer was killed knows of a lost connection only.
    """
    events = JsonLines(run_dir / "events.jsonl")
    events.append({"event": "failed", "why": (str(failure).splitlines() or [type(failure).__name__])[0]})
    events.close()
    if report:
        from gpt3d.reporting.write import write_report

        with contextlib.suppress(Exception):  # the failure itself is what is to be heard
            write_report([run_dir], run_dir / "report.html", pictures=False)


def _first_line(error: BaseException) -> str:
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _exit_code(error: BaseException | None) -> int:
    """As the process will have it."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return int(error is not None)
