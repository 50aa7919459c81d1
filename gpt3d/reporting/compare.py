"""Several runs side by side: which settings differ, and what came of it."""

from __future__ import annotations

from typing import Any

from gpt3d.reporting.facts import facts
from gpt3d.reporting.read import Run

OWN = ("run_dir", "run_name", "tracking.wandb.name")  # differ between any two runs


def differing_settings(runs: list[Run]) -> list[list[str]]:
    """Rows of (key, value in each run)."""
    flat = [_flat(run.config) for run in runs]
    keys = sorted({key for settings in flat for key in settings} - set(OWN))
    rows = [[key, *(as_yaml(settings[key]) if key in settings else "" for settings in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def result_rows(runs: list[Run]) -> list[list[str]]:
    """Rows of (name, result of each run), whichever any of the runs has."""
    tables = [{fact.name: fact.value for fact in facts(run).results} for run in runs]
    names = list(dict.fromkeys(name for table in tables for name in table))
    return [["status", *(run.status[0] for run in runs)], *([n, *(t.get(n, "") for t in tables)] for n in names)]


def as_yaml(value: Any) -> str:
    """A setting as it is typed."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
