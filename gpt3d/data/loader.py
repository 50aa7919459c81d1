"""From a dataset to the microbatches of one data-parallel rank. The whole state is `consumed_samples`.

Global batch i holds the samples [i*G, (i+1)*G); of these, DP rank r takes the r-th contiguous part (of a
stream, every DP-th from the r-th on), cut into microbatches. So the global batch is the same for any DP degree and any
micro batch, and all ranks of a replica (TP, PP) see the same rows.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Required, TypedDict

import numpy as np
import torch

from gpt3d.data.dataset import PADDING, Dataset, ValidationSet
from gpt3d.data.errors import DataError
from gpt3d.data.masks import document_layout

IGNORE = -100  # a label that is no target: what torch's cross entropy ignores by default
_AHEAD = 3  # steps that may wait in the queue


class MicroBatch(TypedDict, total=False):
    """Inputs and targets [b, s] int64 (`IGNORE` = no target); `index`: global sample index of the first row.

    Only with document masks: `position_ids`, `cu_seqlens` and `max_seqlen` as `document_layout` gives them.
    """

    tokens: Required[torch.Tensor]
    labels: Required[torch.Tensor]
    index: Required[int]
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int


Step = tuple[list[MicroBatch], Any]  # a step's microbatches, and the state of the dataset after them


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
        rows = np.arange(global_batch_size // dp_size)
        rows = rows * dp_size + dp_rank if dataset.interleaved else rows + dp_rank * len(rows)
        pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        state_of = getattr(dataset, "state_dict", lambda: None)

        def make(step: int) -> Step:
            index = start + step * global_batch_size + rows
            micro_batches = np.split(index, len(index) // micro_batch_size)
            return [_training_batch(dataset, i, pin) for i in micro_batches], state_of()

        self._ahead = _Prefetcher(make)
        self._dataset_state: Any = state_of()

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> list[MicroBatch]:
        begin = time.perf_counter()
        batch, self._dataset_state = self._ahead.next()
        self.wait_seconds = time.perf_counter() - begin
        self.consumed_samples += self.global_batch_size
        return batch

    def state_dict(self) -> dict[str, Any]:
        """`consumed_samples`, and for a stream the `streams` of this rank; a resume needs only the first."""
        streams = {} if self._dataset_state is None else {"streams": self._dataset_state}
        return {"consumed_samples": self.consumed_samples} | streams

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


def _training_batch(dataset: Dataset, index: np.ndarray, pin: bool) -> MicroBatch:
    batch = _micro_batch(dataset.samples(index), int(index[0]), dataset.mask_eod)
    if pin:
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                batch[key] = value.pin_memory()  # type: ignore[literal-required]
    return batch


def _validation_batch(validation: ValidationSet, first: int, rows: int) -> MicroBatch:
    samples = np.full((rows, validation.seq_len + 1), PADDING, np.int64)
    for row in range(rows):
        window = validation.window(first + row)
        samples[row, : len(window)] = window
    return _micro_batch(samples, first, validation.mask_eod)


def _micro_batch(samples: np.ndarray, first: int, mask_eod: int | None) -> MicroBatch:
    """Inputs and labels of samples [b, s + 1]. Masks come from `PADDING` and boundaries, never from a padding id."""
    both = torch.from_numpy(samples)
    tokens, labels = both[:, :-1].clone(), both[:, 1:].clone()
    labels[labels == PADDING] = IGNORE
    tokens[tokens == PADDING] = 0
    batch: MicroBatch = {"tokens": tokens, "labels": labels, "index": first}
    if mask_eod is not None:
        labels[both[:, :-1] == mask_eod] = IGNORE  # the next document's first token has no context to be told from
        batch["position_ids"], batch["cu_seqlens"], batch["max_seqlen"] = document_layout(tokens, mask_eod)
    return batch


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

    def __init__(self, make: Callable[[int], Step]) -> None:
        self._make, self._stop = make, threading.Event()
        self._queue: queue.Queue[Step | BaseException] = queue.Queue(maxsize=_AHEAD)
        self._thread: threading.Thread | None = None

    def next(self) -> Step:
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
                item: Step | BaseException = self._make(step)
            except BaseException as error:
                item = error
            self._queue.put(item)
            if isinstance(item, BaseException):
                return
            step += 1
