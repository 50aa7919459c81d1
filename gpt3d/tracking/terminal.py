"""Standard output that may go away or lack a letter: training doesn't end with its terminal or the pipe behind it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any


class LastingOutput:
    """Standard output as a stream for text. After a write that fails, one warning; what follows goes nowhere."""

    def __init__(self) -> None:
        self.stream = sys.stdout  # kept: a live panel puts itself in its place
        if isinstance(self.stream, TextIOWrapper):
            self.stream.reconfigure(errors="replace")  # a sample has letters that not every terminal's encoding knows

    def write(self, text: str) -> int:
        self._attempt(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())  # also for what Python flushes as it ends
            with contextlib.suppress(OSError):
                warning = f"gpt3d: the terminal can't be written to ({error}); training goes on, see metrics.jsonl"
                print(warning, file=sys.__stderr__, flush=True)  # not the panel's
