"""Signals of the supervisor: Ctrl-C, SIGTERM and SIGHUP become one exception, so that the ranks are ended once.

SIGUSR1 (save a checkpoint) goes on to the ranks.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from gpt3d.launch.worker import Worker


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


@contextmanager
def passed_on(number: signal.Signals, workers: Sequence[Worker]) -> Iterator[None]:
    """For the time of the block, send `number` on to the ranks instead of dying of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(signum: int, frame: FrameType | None) -> None:
        for worker in workers:
            if worker.running:
                worker.send(number)

    saved = signal.signal(number, pass_on)
    try:
        yield
    finally:
        signal.signal(number, saved)
