"""From a source to a prepared corpus: `train` and `validation` token files and a manifest in one cache folder."""

from __future__ import annotations

import os
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np

from gpt3d.data.errors import DataError
from gpt3d.data.order import Permutation
from gpt3d.data.pieces import Piece
from gpt3d.data.split import first_of_each, split
from gpt3d.data.token_file import TokenFileWriter, token_dtype
from gpt3d.data.tokenizer import JsonTokenizer
from gpt3d.data.worker import Job, Outcome
from gpt3d.data.workers import run_pieces

FORMAT = 2  # part of every recipe: raise it when the content of a prepared folder changes
SPLITS = ("train", "validation")
_COPY_TOKENS = 1 << 24


def prepare_corpus(
    job: Job, pieces: list[Piece], validation_fraction: float, workers: int | None = None, unit: str = "B"
) -> dict[str, Any]:
    """Tokenize `pieces` and write both splits into the job's folder; returns the manifest."""
    if not pieces:
        raise DataError("the corpus is empty: 0 documents")
    outcomes = run_pieces(job, pieces, workers or _cpus(), unit)
    counts = sum((outcome.counts for outcome in outcomes), Counter())
    with Parts(job, len(pieces)) as parts:
        if not len(parts.lengths):
            raise DataError(f"the corpus has no text: 0 documents; left out: {dict(counts) or 'nothing'}")
        order = np.arange(len(parts.lengths))
        if job.config.deduplicate:
            order = np.flatnonzero(first_of_each(parts.hashes))
            counts["duplicate"] = len(parts.lengths) - len(order)
        if job.config.shuffle_documents:
            order = order[Permutation(len(order), "documents")(np.arange(len(order)))]
        splits = _write_splits(job, parts, order, split(parts.hashes[order], validation_fraction))
    tokenizer = {"name": job.tokenizer.name, "fingerprint": job.tokenizer.fingerprint}
    if isinstance(job.tokenizer, JsonTokenizer):  # a copy, so that the folder can be read by itself
        (job.folder / "tokenizer.json").write_text(job.tokenizer.content, encoding="utf-8")
        tokenizer["eod_token"] = job.tokenizer.eod_token
    places = [f"{kind}: {place}" for kind, place in _first_places(outcomes)]
    return {"format": FORMAT, "tokenizer": tokenizer, "left_out": dict(counts), "places": places} | splits


def _write_splits(job: Job, parts: Parts, order: np.ndarray, held_out: np.ndarray) -> dict[str, dict[str, Any]]:
    """Copy the documents `order` to the token files; the share `held_out` of each goes to validation."""
    writers = {name: TokenFileWriter(job.folder / name, parts.dtype) for name in SPLITS}
    if ((held_out == 0) | (held_out == 1)).all():
        for begin, end in _runs(parts, order, held_out):
            documents = order[begin:end]
            writers[SPLITS[int(held_out[begin])]].add(parts.read(documents[0], documents[-1]), parts.lengths[documents])
    else:
        for document, share in zip(order, held_out, strict=True):
            tokens = parts.read(document, document)
            cut = len(tokens) - int(len(tokens) * share)
            for name, piece in zip(SPLITS, (tokens[:cut], tokens[cut:]), strict=True):
                if len(piece):
                    writers[name].add(piece)
    parts.remove()
    return {
        name: {
            "checksum": writer.close(),
            "documents": writer.documents,
            "tokens": writer.tokens,
            "largest_id": writer.largest_id,
        }
        for name, writer in writers.items()
    }


def _runs(parts: Parts, order: np.ndarray, held_out: np.ndarray) -> list[tuple[int, int]]:
    """Stretches of `order` that lie back to back in one file and go to one split: they are copied at once."""
    full = np.cumsum(parts.lengths[order]) // _COPY_TOKENS
    breaks = (
        (np.diff(order) != 1) | (np.diff(parts.part_of(order)) != 0) | (np.diff(held_out) != 0) | (np.diff(full) != 0)
    )
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(order)]
    return list(pairwise(edges))


class Parts:
    """The documents that the workers wrote, one file a piece, by their number in the corpus."""

    def __init__(self, job: Job, pieces: int) -> None:
        self._job, self.dtype = job, token_dtype(job.tokenizer.vocab_size)
        self._pieces = pieces
        tables = [np.load(job.part_file(number, ".npy")) for number in range(pieces)]
        lengths = [table[0].astype(np.int64) for table in tables]
        self.lengths, self.hashes = np.concatenate(lengths), np.concatenate([table[1] for table in tables])
        self._first = np.cumsum([0, *map(len, lengths)])
        self._starts = np.concatenate([np.cumsum(size) - size for size in lengths])
        self._open: dict[int, int] = {}

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def remove(self) -> None:
        """Delete the files of the pieces."""
        for number in range(self._pieces):
            self._job.part_file(number, ".bin").unlink()
            self._job.part_file(number, ".npy").unlink()

    def part_of(self, documents: np.ndarray) -> np.ndarray:
        """Number of the piece that holds each document."""
        return np.searchsorted(self._first, documents, side="right") - 1

    def read(self, first: int, last: int) -> np.ndarray:
        """Tokens of the documents first..last, which lie in one piece."""
        number = int(self.part_of(np.array([first]))[0])
        if number not in self._open:
            if len(self._open) >= 256:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[number] = os.open(self._job.part_file(number, ".bin"), os.O_RDONLY)
        width = self.dtype.itemsize
        begin, end = int(self._starts[first]), int(self._starts[last] + self.lengths[last])
        content = os.pread(self._open[number], (end - begin) * width, begin * width)
        if len(content) != (end - begin) * width:
            raise DataError(f"{self._job.part_file(number, '.bin')} was cut while in use: is the disk full?")
        return np.frombuffer(content, self.dtype)


def _first_places(outcomes: list[Outcome]) -> list[tuple[str, Any]]:
    return [place for outcome in outcomes for place in outcome.places][:5]


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
