"""When each action of this rank began and ended: host clock on CPU, CUDA events on a GPU."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from gpt3d.parallel.collectives import all_gather_first
from gpt3d.parallel.layout import Layout
from gpt3d.pipeline.schedule import Action
from gpt3d.pipeline.simulate import Span, Timeline


class Recorder:
    """Collects the actions of one step. An action begins when its message is there, so waiting shows as idle."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.cuda = layout, layout.device.type == "cuda"
        self._marks: list[tuple[Action, Any, Any]] = []
        self._running: tuple[Action, Any] | None = None
        self._zero_host, self._zero = self._synchronize()

    def _synchronize(self) -> tuple[float, Any]:
        """The common origin of time: the host clocks of one pipeline, just after a barrier."""
        if self.cuda:
            torch.cuda.synchronize(self.layout.device)
        if self.layout.pp.size > 1:
            dist.barrier(group=self.layout.pp.handle)
        return time.perf_counter(), self._now()

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, action: Action) -> None:
        """`action` starts now."""
        self._running = (action, self._now())

    def end(self) -> None:
        """The running action is over."""
        assert self._running is not None
        action, start = self._running
        self._marks.append((action, start, self._now()))
        self._running = None

    def spans(self) -> list[Span]:
        """This rank's actions in seconds since the common origin. Waits for the GPU."""
        if self.cuda:
            torch.cuda.synchronize(self.layout.device)
        return [Span(action, self._seconds(start), self._seconds(end)) for action, start, end in self._marks]

    def bubble(self) -> float | None:
        """Idle share of this rank's pipeline in the step, None if nothing ran. Collective over the pipeline."""
        if not self._marks:
            return None
        spans = self.spans()
        own = [min(s.start for s in spans), max(s.end for s in spans), sum(s.end - s.start for s in spans)]
        table = all_gather_first(torch.tensor([own], device=self.layout.device), self.layout.pp)
        makespan = float(table[:, 1].max() - table[:, 0].min())
        return max(0.0, 1 - float(table[:, 2].sum()) / (self.layout.pp.size * makespan)) if makespan else 0.0

    def _seconds(self, mark: Any) -> float:
        return self._zero.elapsed_time(mark) / 1e3 if self.cuda else mark - self._zero_host

    def gather(self) -> Timeline | None:
        """The timeline of this rank's pipeline, on its first stage only. Collective over the pipeline."""
        if self.layout.pp.size == 1:
            return Timeline([self.spans()])
        ranks: list[Any] | None = [None] * self.layout.pp.size if self.layout.is_first_stage else None
        dist.gather_object(self.spans(), ranks, dst=self.layout.pp.ranks[0], group=self.layout.pp.handle)
        return Timeline(ranks) if ranks is not None else None
