"""A run as its folder tells it. What is missing or broken becomes a problem of the report, not an error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class ReportError(Exception):
    """No report can be made; the message says why."""


@dataclass
class Run:
    """`lines` and `events`: metrics.jsonl and events.jsonl, in the order they were written."""

    folder: Path
    label: str
    config: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    events: list[Line] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    timeline: bytes = b""  # a picture (SVG)
    problems: list[str] = field(default_factory=list)

    def with_key(self, name: str) -> list[Line]:
        """Lines that have a number under `name`, by step; after a rollback what came before it is forgotten."""
        kept: list[Line] = []
        for line in self.lines:
            if name in line and isinstance(line.get("step"), int):
                while kept and kept[-1]["step"] >= line["step"]:
                    kept.pop()
                kept.append(line)
        return [line for line in kept if is_number(line[name])]

    def last(self, name: str) -> Any:
        """The last value of a metric; None if there is none."""
        found = self.with_key(name)
        return found[-1][name] if found else None

    def happened(self, name: str) -> list[Line]:
        """The events of one kind."""
        return [event for event in self.events if event.get("event") == name]

    def setting(self, key: str) -> Any:
        """The value of a dotted key of config.yaml; None if it is not there."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @property
    def status(self) -> tuple[str, bool | None]:
        """In words, and whether it is good (None: not known)."""
        last = self.events[-1] if self.events else {}
        if last.get("event") == "failed":
            return f"failed: {last.get('why')}", False
        if last.get("event") != "end":
            return ("still running, or killed" if self.events else "not known"), None
        if last.get("exit_code") == 0:
            return "finished", True
        return f"ended with exit code {last.get('exit_code')}: {last.get('why') or 'no reason given'}", False


def is_number(value: Any) -> bool:
    """A finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_runs(folders: list[Path]) -> list[Run]:
    """The runs, with labels that tell them apart. Raises ReportError for a folder that holds none."""
    runs = [read_run(folder) for folder in folders]
    depth = 1
    while len({run.label for run in runs}) < len(runs) and depth < 8:
        depth += 1
        for run in runs:
            run.label = "/".join(run.folder.parts[-depth:])
    return runs


def read_run(folder: Path) -> Run:
    """One run. Raises ReportError when there is neither a configuration nor a metric in `folder`."""
    if not folder.is_dir():
        raise ReportError(f"{folder}: no such folder; give the folder of a run, the one with metrics.jsonl in it")
    folder = folder.resolve()
    run = Run(folder, folder.name)
    run.config = _mapping(run, "config.yaml", _yaml)
    run.plan = _mapping(run, "plan.json", json.loads)
    run.environment = _mapping(run, "environment.json", json.loads)
    run.lines, run.events = _json_lines(run, "metrics.jsonl"), _json_lines(run, "events.jsonl")
    if not run.config and not run.lines:
        inside = ", it has runs in it: name those" if any(folder.glob("*/config.yaml")) else ""
        raise ReportError(
            f"{folder}: neither config.yaml nor metrics.jsonl can be read: not the folder of a run{inside}"
        )
    run.command = _text(run, "command.txt").strip()
    picture = folder / "timeline.svg"
    if picture.is_file():
        run.timeline = picture.read_bytes()
    return run


def _text(run: Run, name: str) -> str:
    try:
        return (run.folder / name).read_text(errors="replace")
    except OSError as error:
        run.problems.append(f"{name} cannot be read ({error.strerror}); what it would tell is left out")
        return ""


def _yaml(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def _mapping(run: Run, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    text = _text(run, name)
    if not text:
        return {}
    try:
        found = parse(text)
    except Exception as error:  # yaml's and json's own
        found, why = None, str(error).splitlines()[0]
    else:
        why = "no mapping"
    if not isinstance(found, dict):
        run.problems.append(f"{name} is damaged ({why}); what it would tell is left out")
        return {}
    return found


def _json_lines(run: Run, name: str) -> list[Line]:
    lines, bad = [], 0
    for text in _text(run, name).splitlines():
        try:
            entry = json.loads(text)
        except ValueError:
            entry = None
        if isinstance(entry, dict):
            lines.append(entry)
        else:
            bad += 1
    if bad:
        run.problems.append(f"{name}: {bad} line{'s' if bad > 1 else ''} of {bad + len(lines)} cannot be read")
    return lines
