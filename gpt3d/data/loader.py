"""From a dataset to the microbatches of one data-parallel rank. The whole state is `consumed_samples`.

Global batch i holds the samples [i*G, (i+1)*G); of these, DP rank r takes the r-th contiguous part, cut into
microbatches. So the global batch is the same for any DP degree and any micro batch, and all ranks of a replica (TP, PP)
see the same rows.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypedDict

import numpy as np
import torch

from gpt3d.data.dataset import Dataset, ValidationSet
from gpt3d.data.errors import DataError

IGNORE = -100  # a label that is no target: what torch's cross entropy ignores by default
_AHEAD = 3  # steps that may wait in the queue


class MicroBatch(TypedDict):
    """Inputs and targets [b, s] int64 (`IGNORE` = no target); `index`: global sample index of the first row."""

    tokens: torch.Tensor
    labels: torch.Tensor
    index: int


class Batches:
    """Iterates over steps without end; each step is the list of this rank's microbatches.

    A thread prepares steps ahead, in pinned memory where CUDA is there. `consumed_samples` counts what was handed out,
    over all ranks; `wait_seconds` is how long the last step was waited for.
    """

    def __init__(
        self,
        dataset: Dataset,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        start: int = 0,
        pin_memory: bool | None = None,
    ) -> None:
        _check_sizes(global_batch_size, micro_batch_size, dp_rank, dp_size)
        self.global_batch_size, self.consumed_samples, self.wait_seconds = global_batch_size, start, 0.0
        rows = global_batch_size // dp_size
        pin = torch.cuda.is_available() if pin_memory is None else pin_memory

        def make(step: int) -> list[MicroBatch]:
            first = start + step * global_batch_size + dp_rank * rows
            return [
                _training_batch(dataset, k, micro_batch_size, pin) for k in range(first, first + rows, micro_batch_size)
            ]

        self._ahead = _Prefetcher(make)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> list[MicroBatch]:
        begin = time.perf_counter()
        batch = self._ahead.next()
        self.wait_seconds = time.perf_counter() - begin
        self.consumed_samples += self.global_batch_size
        return batch

    def close(self) -> None:
        """Stop the prefetch thread. Also done when the object is dropped."""
        self._ahead.close()

    def __del__(self) -> None:
        if hasattr(self, "_ahead"):
            self.close()


def validation_batches(
    validation: ValidationSet,
    global_batch_size: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    limit: int | None = None,
) -> Iterator[list[MicroBatch]]:
    """The held-out windows in order, at most `limit` global batches, the same on every layout.

    The last window is filled up with `IGNORE` labels and the last batch with rows of them, so that every rank takes
    part in every microbatch and no token is lost or counted twice.
    """
    _check_sizes(global_batch_size, micro_batch_size, dp_rank, dp_size)
    rows = global_batch_size // dp_size
    steps = -(-validation.windows // global_batch_size)
    for step in range(steps if limit is None else min(steps, limit)):
        first = step * global_batch_size + dp_rank * rows
        yield [_validation_batch(validation, k, micro_batch_size) for k in range(first, first + rows, micro_batch_size)]


def _training_batch(dataset: Dataset, first: int, rows: int, pin: bool) -> MicroBatch:
    tokens = torch.from_numpy(dataset.samples(np.arange(first, first + rows)))
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if pin:
        inputs, labels = inputs.pin_memory(), labels.pin_memory()
    return {"tokens": inputs, "labels": labels, "index": first}


def _validation_batch(validation: ValidationSet, first: int, rows: int) -> MicroBatch:
    tokens = torch.zeros((rows, validation.seq_len), dtype=torch.int64)
    labels = torch.full((rows, validation.seq_len), IGNORE, dtype=torch.int64)
    for row in range(rows):
        window = torch.from_numpy(validation.window(first + row))
        if len(window):
            tokens[row, : len(window) - 1], labels[row, : len(window) - 1] = window[:-1], window[1:]
    return {"tokens": tokens, "labels": labels, "index": first}


def _check_sizes(global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
    if not 0 <= dp_rank < dp_size:
        raise DataError(f"data-parallel rank {dp_rank} is not within 0 to {dp_size - 1}")
    if global_batch_size % (micro_batch_size * dp_size):
        raise DataError(
            f"trainer.global_batch_size={global_batch_size} is not a multiple of micro_batch_size x DP = "
            f"{micro_batch_size} x {dp_size}"
        )


class _Prefetcher:
    """Calls make(0), make(1), ... in a thread, a few ahead. It does not know its owner, so dropping that ends it."""

    def __init__(self, make: Callable[[int], list[MicroBatch]]) -> None:
        self._make, self._stop = make, threading.Event()
        self._queue: queue.Queue[list[MicroBatch] | BaseException] = queue.Queue(maxsize=_AHEAD)
        self._thread: threading.Thread | None = None

    def next(self) -> list[MicroBatch]:
        if self._stop.is_set():
            raise DataError("these batches are closed")
        if self._thread is None:  # started late: a fork between construction and first use is harmless
            self._thread = threading.Thread(target=self._run, name="gpt3d-data", daemon=True)
            self._thread.start()
        item = self._queue.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        self._stop.set()
        while self._thread is not None and self._thread.is_alive() and self._thread is not threading.current_thread():
            try:  # make room for a thread that waits to put
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.05)

    def _run(self) -> None:
        step = 0
        while not self._stop.is_set():
            try:
                item: list[MicroBatch] | BaseException = self._make(step)
            except BaseException as error:
                item = error
            self._queue.put(item)
            if isinstance(item, BaseException):
                return
            step += 1
