"""Signals that ask for a checkpoint: seen by any rank, acted on by all at the end of the same step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from gpt3d.parallel.collectives import all_reduce
from gpt3d.parallel.layout import Layout

SAVE, SAVE_AND_END = 1, 2
MEANING = {signal.SIGUSR1: SAVE, signal.SIGTERM: SAVE_AND_END}


class SaveSignals:
    """SIGUSR1: save and go on. SIGTERM: save and end, at the end of the running step instead of at once."""

    def __init__(self, enabled: bool) -> None:
        self.enabled, self.wanted = enabled, 0
        self.saved: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SaveSignals:
        if self.enabled and threading.current_thread() is threading.main_thread():
            self.saved = {number: signal.signal(number, self._note) for number in MEANING}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.saved.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = max(self.wanted, MEANING[signal.Signals(number)])

    def agreed(self, layout: Layout) -> int:
        """0, SAVE or SAVE_AND_END, equal on all ranks. Collective."""
        if not self.enabled:
            return 0
        wanted = torch.tensor(self.wanted, device=layout.device)
        agreed = int(all_reduce(wanted, layout.world, dist.ReduceOp.MAX))
        self.wanted = 0
        return agreed
