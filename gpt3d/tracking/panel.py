"""The live panel of a run on a terminal: progress, loss, speed, memory of each stage. Anywhere else: lines of text."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, cast

from rich.console import Console as Terminal
from rich.console import RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpt3d.config.schema import RunConfig
from gpt3d.tracking.metrics import Metrics
from gpt3d.tracking.sinks import Console, clock, short, validation_line

BLOCKS = "▁▂▃▄▅▆▇█"
REFRESHES = 4.0  # a second; drawn by a thread, from numbers that are there already
SMALLEST = (44, 14)  # columns and rows below which one line has to do
WIDE = 60  # columns from which the memory of a stage has room for all its words
MOST_STAGES = 8  # of a long pipeline the fullest are shown
MOST_LOSSES = 4096


def new_console(config: RunConfig) -> Console:
    """A live panel when the output is a terminal that can draw it and `tracking.progress_bar` is on; else lines."""
    terminal = sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
    live = config.tracking.progress_bar and terminal and _can_write(BLOCKS)
    return LiveConsole(config.trainer.steps, config.run_name) if live else Console(config.trainer.steps)


def _can_write(letters: str) -> bool:
    try:
        letters.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return False
    return True


class LiveConsole(Console):
    """Text that is printed meanwhile, by anything in this process, appears above the panel.

    What other processes write tears it until the next refresh. The cursor stays visible, so that a process that is
    killed leaves a usable terminal.
    """

    def __init__(self, total_steps: int, title: str) -> None:
        super().__init__(total_steps)
        self.title, self.done, self.begun = title, 0, time.monotonic()
        self.seen: Metrics = {}
        self.losses: list[float] = []
        self.validation: float | None = None
        self.moment = self.begun  # of the last line, from which the time left is counted down
        self.terminal = Terminal(file=cast("IO[str]", self.out), highlight=False, soft_wrap=False)
        self.live: Live | None = None

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        if self.live is None:  # not before training: what is said at the start is not disturbed
            self.live = Live(console=self.terminal, get_renderable=self.render, refresh_per_second=REFRESHES)
            self.live.start()
            self.terminal.show_cursor(True)

    def log(self, metrics: Metrics) -> None:
        loss, validation = metrics.get("loss"), metrics.get("validation_loss")
        if loss is not None:
            self.seen, self.moment = metrics, time.monotonic()
            self.losses = [*self.losses[-MOST_LOSSES:], float(loss)]
        if validation is not None:
            self.validation = float(validation)
            self.print(validation_line(metrics, self.total))

    def print(self, text: str) -> None:
        if self.live is not None:
            self.terminal.print(text, markup=False, emoji=False, soft_wrap=True)
        else:
            super().print(text)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def render(self) -> RenderableType:
        """The panel at this moment, for the terminal as large as it is now."""
        width, height = self.terminal.size
        m = self.seen
        head = Text(f"step {self.done:,}/{self.total:,}  {100 * self.done / max(self.total, 1):.0f}%  ")
        head.no_wrap, head.overflow = True, "crop"
        elapsed = time.monotonic() - self.begun
        if (eta := m.get("eta_s")) is not None:
            head.append(f"ETA {clock(max(0.0, float(eta) - (time.monotonic() - self.moment)))}  ", style="bold")
        if width < SMALLEST[0] or height < SMALLEST[1]:
            head.append(f"loss {m['loss']:.4f}" if m else "", style="bold cyan")
            return head
        head.append(f"elapsed {clock(elapsed)}", style="dim")
        parts: list[RenderableType] = [head, ProgressBar(total=max(self.total, 1), completed=self.done)]
        if m:
            parts += self._numbers(width - 4, most_stages=height - 11)
        rows = Table.grid()
        for part in parts:
            rows.add_row(part)
        return Panel(rows, title=Text(self.title, no_wrap=True), title_align="left", width=min(width, 120))

    def _numbers(self, width: int, most_stages: int) -> Iterator[RenderableType]:
        m = self.seen
        mfu = m.get("mfu")
        loss = f"loss {m['loss']:.4f}  "
        yield Text.assemble((loss, "bold cyan"), sparkline(self.losses, min(width, 116) - len(loss)), no_wrap=True)
        words = [
            f"validation {self.validation:.4f}" if self.validation is not None else "",
            f"lr {m['lr']:.2e}",
            f"grad norm {m['grad_norm']:.3f}",
            f"skipped {m['skipped_steps']}" if m["skipped_steps"] else "",
            f"{m['tokens_per_s']:,.0f} tokens/s ({m['tokens_per_s_per_device']:,.0f} a device)",
            "MFU n/a" if mfu is None else f"MFU {100 * mfu:.1f}%",
            f"{short(m['tokens'] or 0)} tokens",
            f"data wait {100 * (m['data_wait'] or 0):.1f}%",
            f"bubble {100 * bubble:.1f}%" if (bubble := m.get("pipeline_bubble")) is not None else "",
        ]
        yield Text("\n".join(flow(list(filter(None, words)), width)))
        yield memory_table(m, min(most_stages, MOST_STAGES), width)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as `width` blocks at most, each the mean of some neighbours; the lowest is the lowest block.

    What is no finite number is drawn as "!".
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)] or [0.0]
    low, span = min(finite), max(finite) - min(finite)
    top = len(BLOCKS) - 1
    # Divided first: the reciprocal of a tiny span would overflow.
    return "".join(BLOCKS[round((x - low) / (span or 1.0) * top)] if math.isfinite(x) else "!" for x in means)


def flow(items: Sequence[str], width: int) -> list[str]:
    """The items in lines of at most `width` columns, none of them broken if it fits one."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 3 + len(item) <= width:
            lines[-1] += f"   {item}"
        else:
            lines.append(item)
    return lines


def memory_table(m: Metrics, most: int, width: int) -> Table:
    """Memory of each stage, now and at its highest; of a long pipeline the `most` fullest stages."""
    table = Table.grid(padding=(0, 2))
    wide = width >= WIDE
    stages = sum(name.startswith("memory_gb_stage_") for name in m)
    suffixes = [f"_stage_{i}" for i in range(stages)] or [""]
    fullest = sorted(suffixes, key=lambda suffix: -(m[f"memory_gb{suffix}"] or 0))[:most]
    for suffix in sorted(fullest, key=suffixes.index):
        peak, now = m[f"memory_gb{suffix}"] or 0.0, m[f"memory_now_gb{suffix}"] or 0.0
        bar = ProgressBar(total=max(float(m["memory_gb"] or 0), 1e-9), completed=now, width=12 if wide else 5)
        name = "memory " * wide + (suffix.replace("_", " ").strip() or "all ranks")
        table.add_row(Text(name, no_wrap=True), bar, Text(f"{now:.2f} GB, peak {peak:.2f}", no_wrap=True))
    return table
