"""What is wrong with a configuration, and how it is said: key, value, why, and a value that works."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One mistake. `key` is the dotted key or the override as typed; `fix` names values or an override that works."""

    key: str
    value: Any
    why: str
    fix: str = ""

    def __str__(self) -> str:
        head = self.key if self.value is None else f"{self.key}={show(self.value)}"
        return f"{head}: {self.why}" + (f"\n      -> {self.fix.strip()}" if self.fix else "")


class ConfigError(ValueError):
    """The configuration can't run. Carries every problem found; its text is the one message for the user."""

    show_traceback = False

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__(format_problems(self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


def format_problems(problems: Sequence[Problem]) -> str:
    """All problems as one message."""
    head = (
        "The configuration has a problem:" if len(problems) == 1 else f"The configuration has {len(problems)} problems:"
    )
    return "\n".join([head, *(f"  - {problem}" for problem in problems)])


def show(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(show, value)) + "]"
    return str(value)


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The most similar of `names`, best first; empty if none is close."""
    by_lower = {candidate.lower(): candidate for candidate in names}
    return [by_lower[hit] for hit in difflib.get_close_matches(name.lower(), by_lower, count, cutoff=0.5)]
