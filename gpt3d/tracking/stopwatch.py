"""How long the parts of a step take, by the device's own clock and without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Host clock on CPU, CUDA events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._laps: list[tuple[str, Any, Any]] = []
        self._last: Any = None

    def start(self) -> None:
        """The first part begins."""
        self._last = self._now()

    def lap(self, part: str) -> None:
        """`part` is over and the next one begins."""
        now = self._now()
        self._laps.append((part, self._last, now))
        self._last = now

    def read(self) -> dict[str, float]:
        """Seconds of each part since the last call. To be called when the device is known to have done them."""
        seconds: dict[str, float] = {}
        for part, begin, end in self._laps:
            spent = end - begin if self.device.type != "cuda" else begin.elapsed_time(end) / 1e3
            seconds[part] = seconds.get(part, 0.0) + spent
        self._laps.clear()
        return seconds

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
