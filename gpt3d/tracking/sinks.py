"""Where the metrics go: the terminal, and `metrics.jsonl` in the run folder."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from gpt3d.tracking.metrics import Metrics
from gpt3d.tracking.terminal import LastingOutput


class Console:
    """One line a logged step. A terminal that has gone, or cannot show a letter, never stops the run."""

    def __init__(self, total_steps: int) -> None:
        self.total, self.out = total_steps, LastingOutput()

    def advance(self, steps: int = 1) -> None:
        """So many more steps are done."""

    def log(self, metrics: Metrics) -> None:
        if "loss" in metrics:
            self.print(training_line(metrics, self.total))
        elif "validation_loss" in metrics:
            self.print(validation_line(metrics, self.total))

    def print(self, text: str) -> None:
        """A line of text."""
        print(text, file=self.out, flush=True)

    def close(self) -> None:
        """Nothing more comes."""


class JsonLines:
    """Appends each dictionary as one line, at once, with the wall-clock time [s since 1970].

    What is not finite is written as null, so that every reader of JSON can read it. `lines`: how many the file has.
    A file that cannot be written (a full disk) costs one warning; the lines are kept and tried again with the next.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = print) -> None:
        self.path, self.say, self.failing = path, say, False
        self.file: FileIO | None = None
        self.lines, last = 0, b"\n"
        if path.is_file():
            with contextlib.suppress(OSError), path.open("rb") as earlier:
                for line in earlier:
                    self.lines, last = self.lines + 1, line
        self.waiting = b"" if last.endswith(b"\n") else b"\n"  # an earlier start was killed within a line
        self._write()

    def append(self, entry: Mapping[str, Any]) -> None:
        """One line; `entry` is plain data."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}
        self.waiting += json.dumps({"time": round(time.time(), 3), **finite}).encode() + b"\n"
        self.lines += 1
        self._write()

    def close(self) -> None:
        """Nothing more comes."""
        self._write()
        if self.file is not None:
            self.file.close()

    def _write(self) -> None:
        """Unbuffered, so that what fails is known here and what was written is not written again."""
        try:
            self.file = self.file or self.path.open("ab", buffering=0)
            while self.waiting:
                self.waiting = self.waiting[self.file.write(self.waiting) :]
            self.failing = False
        except OSError as error:
            if not self.failing:
                self.say(f"warning: {self.path} cannot be written ({error.strerror})")
            self.failing = True


def training_line(m: Metrics, total: int) -> str:
    """A training step as one line of text."""
    mfu = m["mfu"]
    return " | ".join(
        [
            f"step {m['step']}/{total}",
            f"loss {m['loss']:.4f}",
            f"lr {m['lr']:.2e}",
            f"grad norm {m['grad_norm']:.3f}",
            f"{m['tokens_per_s']:,.0f} tokens/s ({m['tokens_per_s_per_device']:,.0f} a device)",
            "MFU n/a" if mfu is None else f"MFU {100 * mfu:.1f}%",
            f"mem {m['memory_gb']:.2f} GB",
            f"data wait {100 * (m['data_wait'] or 0):.1f}%",
            f"{short(m['tokens'] or 0)} tokens",
            f"ETA {clock(m['eta_s'] or 0)}",
        ]
        + ([f"skipped {m['skipped_steps']}"] if m["skipped_steps"] else [])
    )


def validation_line(m: Metrics, total: int) -> str:
    """A validation as one line of text."""
    line = (
        f"step {m['step']}/{total} | validation loss {m['validation_loss']:.4f} | "
        f"perplexity {m['validation_perplexity']:,.2f}"
    )
    entropy = m.get("unigram_entropy")
    return line if entropy is None else f"{line} | unigram entropy {entropy:.4f}"


def clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"


def short(count: float) -> str:
    """614400 -> 614.4k."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"
