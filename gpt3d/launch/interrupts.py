"""Signals of the supervisor: Ctrl-C, SIGTERM and SIGHUP become one exception, so that the ranks are ended once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interrupts:
    """`ending`: the ranks are being ended, raise no more. `hurry`: a further signal came meanwhile."""

    ending: bool = False
    hurry: bool = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.ending:
            self.hurry = True
            return
        self.ending = True
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signum)


@contextmanager
def interrupts_raise() -> Iterator[Interrupts]:
    """Install the handlers for the time of the block; ignored signals (nohup) stay ignored."""
    state = Interrupts()
    saved = {}
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                saved[signum] = signal.signal(signum, state.handle)
    try:
        yield state
    finally:
        for signum, handler in saved.items():
            signal.signal(signum, handler)
