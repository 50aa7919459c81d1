"""torch.profiler over some steps of some ranks: Chrome trace, tables of time and memory, on CUDA a memory snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpt3d.config.schema import DebugConfig
from gpt3d.parallel.layout import Layout
from gpt3d.pipeline.schedule import Action

ROWS = 30  # of each table
SNAPSHOT_ENTRIES = 200_000  # allocations and frees that the snapshot goes back


class Profile:
    """Steps `debug.profile_first_step` (1 is the first of this start) and following, on this rank, into `folder`."""

    def __init__(self, debug: DebugConfig, layout: Layout, folder: Path) -> None:
        self.first, self.last = debug.profile_first_step, debug.profile_first_step + debug.profile_steps - 1
        self.layout, self.folder, self.cuda = layout, folder, layout.device.type == "cuda"
        self.step = 0
        self.profiler: Any = None
        self.span: Any = None

    def begin_step(self) -> None:
        """A step begins."""
        self.step += 1
        if self.step != self.first:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
        self.profiler = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)
        self.profiler.start()

    def end_step(self) -> str | None:
        """A step is over; after the last profiled one, write the files and say which."""
        if self.profiler is None or self.step != self.last:
            return None
        if self.cuda:
            torch.cuda.synchronize(self.layout.device)
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        return self._write(profiler)

    def begin(self, action: Action) -> None:
        """An action of the pipeline begins: a named span in the trace."""
        if self.profiler is not None:
            name = f"{action.kind.name.lower()} microbatch {action.microbatch} chunk {action.chunk}"
            self.span = torch.profiler.record_function(name)
            self.span.__enter__()

    def end(self) -> None:
        """It is over."""
        if self.span is not None:
            self.span.__exit__(None, None, None)
            self.span = None

    def _write(self, profiler: Any) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = self.folder / f"rank{self.layout.rank}"
        profiler.export_chrome_trace(f"{name}.trace.json.gz")
        device = "cuda" if self.cuda else "cpu"
        averages = profiler.key_averages()
        tables = [
            f"steps {self.first} to {self.last} of rank {self.layout.rank}, {what}\n"
            + averages.table(sort_by=key, row_limit=ROWS, max_name_column_width=60)
            for what, key in (
                ("by time", f"self_{device}_time_total"),
                ("by memory allocated", f"self_{device}_memory_usage"),
            )
        ]
        Path(f"{name}.tables.txt").write_text("\n\n".join(tables) + "\n")
        shown = f"profile {name}.trace.json.gz (chrome://tracing, ui.perfetto.dev), {name}.tables.txt"
        if not self.cuda:
            return shown + "; no memory snapshot on CPU, the second table is by memory"
        torch.cuda.memory._dump_snapshot(f"{name}.memory.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)
        return shown + f", {name}.memory.pickle (pytorch.org/memory_viz)"
