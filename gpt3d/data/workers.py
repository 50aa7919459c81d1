"""Runs the pieces of a preparation in parallel helper processes, with one progress bar."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bar

import gpt3d
from gpt3d.data.errors import DataError
from gpt3d.data.pieces import Piece
from gpt3d.data.worker import Job, Outcome, Step, tokenize_piece

log = logging.getLogger(__name__)
SMALL = 8 << 20  # bytes (or rows) that are not worth starting processes for
_LOG_SECONDS = 30.0


def run_pieces(job: Job, pieces: list[Piece], workers: int, unit: str) -> list[Outcome]:
    """Tokenize all pieces; the outcomes in the order of the pieces. The first error in that order is raised."""
    total = sum(piece.size for piece in pieces)
    outcomes: list[Outcome] = []
    with Progress(total, unit) as progress:
        if workers == 1 or len(pieces) == 1 or (total < SMALL and unit == "B"):
            for number, piece in enumerate(pieces):
                outcomes.append(tokenize_piece(job, number, piece, progress.add))
                if outcomes[-1].error:
                    break
        else:
            outcomes = list(_in_helpers(job, pieces, min(workers, len(pieces)), progress))
    outcomes.sort(key=lambda outcome: outcome.number)
    for outcome in outcomes:
        if outcome.error:
            raise DataError(outcome.error)
    return outcomes


def _in_helpers(job: Job, pieces: list[Piece], workers: int, progress: Progress) -> Iterator[Outcome]:
    tasks = iter(enumerate(pieces))
    messages: queue.Queue[tuple[int, Step | Outcome | None]] = queue.Queue()
    helpers: list[_Helper] = []
    try:
        helpers += [_Helper(i, job, messages) for i in range(workers)]
        running = sum(helper.give(next(tasks, None)) for helper in helpers)
        failed = False
        while running:
            i, message = messages.get()
            if isinstance(message, Step):
                progress.add(message)
                continue
            if message is None:
                raise DataError(
                    f"a preparation process ended with code {helpers[i].wait()}; if it was killed for memory, try "
                    "fewer with data.workers"
                )
            yield message
            failed = failed or message.error is not None
            running -= not helpers[i].give(None if failed else next(tasks, None))
    finally:
        for helper in helpers:
            helper.stop()


class _Helper:
    """One process; a thread passes its messages on. None as a message: the process ended."""

    def __init__(self, number: int, job: Job, messages: queue.Queue) -> None:
        root = str(Path(gpt3d.__file__).parent.parent)
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpt3d.data.helper"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )
        self._send(job)

        def pass_on() -> None:
            assert self._process.stdout is not None
            try:
                while True:
                    messages.put((number, pickle.load(self._process.stdout)))
            except Exception:  # mostly EOFError: the process ended; nothing may leave the caller waiting
                messages.put((number, None))

        threading.Thread(target=pass_on, daemon=True).start()

    def give(self, task: tuple[int, Piece] | None) -> bool:
        """Hand over a piece; False if there is none."""
        if task is not None:
            self._send(task)
        return task is not None

    def wait(self) -> int:
        return self._process.wait()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the reading thread reports that the process ended


class Progress:
    """A bar on a terminal, a line every 30 s otherwise: units, documents, tokens/s, time left."""

    def __init__(self, total: int, unit: str) -> None:
        self._total, self._unit, self._done = max(1, total), unit, Step()
        self._start = self._logged = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            self._bar = Bar(
                *Bar.get_default_columns(), "{task.fields[words]}", console=Console(stderr=True), transient=True
            )
            self._task = self._bar.add_task("preparing", total=self._total, words="")
            self._bar.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, step: Step) -> None:
        """Count what was done since the last call."""
        done, now = self._done, time.monotonic()
        done.units, done.documents, done.tokens = (
            done.units + step.units,
            done.documents + step.documents,
            done.tokens + step.tokens,
        )
        rate = done.tokens / max(now - self._start, 1e-9)
        words = f"{done.documents:,} documents, {rate:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done.units, words=words)
        elif now - self._logged > _LOG_SECONDS:
            self._logged = now
            left = (now - self._start) * max(0, self._total - done.units) / max(done.units, 1)
            log.info(
                "preparing: %.0f %% of %s, %s, %.0f s left", 100 * done.units / self._total, self._unit, words, left
            )
