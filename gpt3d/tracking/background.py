"""A sink in a thread of its own: whatever it does, training neither waits for it nor fails with it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from gpt3d.tracking.metrics import Metrics

MOST_WAITING = 10_000  # dictionaries kept for a sink that is slow to start or to write
STUCK_SECONDS = 300.0  # in one call; after that nothing more is kept for the sink


class Sink(Protocol):
    """Anything that takes the dictionaries of a run."""

    def log(self, metrics: Metrics) -> None:
        """One more dictionary."""

    def close(self, exit_code: int) -> None:
        """Nothing more comes; `exit_code` is 0 when the run went well."""


class Background:
    """Runs the sink that `open_sink` makes; that, too, happens in the thread (importing a tracker takes seconds).

    A sink that raises, hangs or falls too far behind is given up with one warning through `say`.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        say: Callable[[str], None],
        most_waiting: int = MOST_WAITING,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        self.name, self.say, self.stuck_seconds = name, say, stuck_seconds
        self.given_up = False
        self._waiting: queue.Queue[Metrics | int] = queue.Queue(most_waiting)  # an int is the exit code: the end
        self._lock = threading.Lock()
        self._busy_since = time.monotonic()
        self._idle = False
        self._thread = threading.Thread(target=self._work, args=(open_sink,), name=f"{name} sink", daemon=True)
        self._thread.start()

    def log(self, metrics: Metrics) -> None:
        """Hand one dictionary over; takes microseconds."""
        if self.given_up:
            return
        if not self._idle and time.monotonic() - self._busy_since > self.stuck_seconds:
            self._give_up(f"has not answered for {self.stuck_seconds:g} s")
            return
        try:
            self._waiting.put_nowait(metrics)
        except queue.Full:
            self._give_up(f"is {self._waiting.maxsize:,} lines behind")

    def close(self, exit_code: int, seconds: float) -> None:
        """Let the sink write what it still has, for at most so many seconds."""
        if self.given_up:
            return
        end = time.monotonic() + seconds
        try:
            self._waiting.put(exit_code, timeout=seconds)
        except queue.Full:
            pass
        else:
            self._thread.join(max(end - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._give_up("did not finish in time at the end of the run")

    def _work(self, open_sink: Callable[[], Sink]) -> None:
        try:
            sink = open_sink()
            while not self.given_up:
                self._idle = True
                item = self._waiting.get()
                self._busy_since, self._idle = time.monotonic(), False
                if isinstance(item, int):
                    sink.close(item)
                    return
                sink.log(item)
        except Exception as error:
            lines = str(error).strip().splitlines()
            self._give_up(f"failed ({': '.join([type(error).__name__, *lines[:1]])})")

    def _give_up(self, why: str) -> None:
        with self._lock:
            if self.given_up:
                return
            self.given_up = True
        self.say(f"warning: {self.name} {why} and gets no further metrics; metrics.jsonl has all of them")
