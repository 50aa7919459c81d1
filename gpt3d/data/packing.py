"""Best-fit packing: rows made of whole documents, so that fewer are cut than by concatenation.

A document longer than a row becomes full rows and a rest; pieces overlap by the one token that is the last label of one
row and the first input of the next, so that each token after a document's first is a label exactly once an epoch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gpt3d.data.cache import build_once, recipe_key
from gpt3d.data.dataset import PADDING
from gpt3d.data.errors import DataError
from gpt3d.data.order import EpochOrder
from gpt3d.data.token_source import TokenSource

FORMAT = 1


def cut(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts [p] and lengths [p] of the pieces, at most seq_len + 1 tokens each, of documents that lie back to back."""
    pieces = np.maximum(0, -(-(lengths - 1) // seq_len))
    document = np.repeat(np.arange(len(lengths)), pieces)
    offset = (np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * seq_len
    starts = (np.cumsum(lengths) - lengths)[document] + offset
    return starts, np.minimum(seq_len + 1, lengths[document] - offset)


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Row [p] of each piece: longest first, each into the fullest row that still has room (best-fit decreasing)."""
    rows_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room they have left
    rooms = 0  # bit r is set if a row has room r: the lowest bit at or above `size` is the best fit
    count = 0
    row_of = np.empty(len(sizes), np.int64)
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[room].pop()
            if not rows_with[room]:
                rooms ^= 1 << room
        else:
            room, row, count = capacity, count, count + 1
        row_of[piece] = row
        if left := room - size:
            rows_with[left].append(row)
            rooms |= 1 << left
    return row_of


class PackedDataset:
    """Rows of whole documents and padding, in another order each epoch. The table of rows is made once and cached."""

    interleaved = False

    def __init__(
        self,
        source: TokenSource,
        digest: str,
        seq_len: int,
        seed: int,
        cache: Path,
        eod: int,
        stream: int | str = 0,
        masks: bool = True,
    ) -> None:
        self.source, self.seq_len, self.mask_eod = source, seq_len, eod if masks else None
        folder = cache / f"packed-{recipe_key({'format': FORMAT, 'tokens': digest, 'seq_len': seq_len})}"
        build_once(folder, lambda target: _build(source, seq_len, eod, target))
        self._starts, self._lengths, self._rows = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("starts", "lengths", "rows")
        )
        self.samples_per_epoch = len(self._rows) - 1
        self._order = EpochOrder(self.samples_per_epoch, "packed", seed, stream)

    def samples(self, index: np.ndarray) -> np.ndarray:
        """Tokens [k, seq_len + 1] int64, filled up with `PADDING`."""
        out = np.full((len(index), self.seq_len + 1), PADDING, np.int64)
        for row, r in zip(out, self._order(index)[1].tolist(), strict=True):
            position = 0
            for piece in range(int(self._rows[r]), int(self._rows[r + 1])):
                length = int(self._lengths[piece])
                row[position : position + length] = self.source.read(int(self._starts[piece]), length)
                position += length
        return out

    def describe(self) -> str:
        """Rows of an epoch and their filling."""
        filled = self._lengths.sum(dtype=np.int64) / (self.samples_per_epoch * (self.seq_len + 1))
        return f"{self.samples_per_epoch:,} packed samples an epoch, {100 * (1 - filled):.2f} % padding"


def _build(source: TokenSource, seq_len: int, eod: int, target: Path) -> dict[str, Any]:
    lengths = source.document_lengths()
    ends = np.cumsum(lengths) - 1
    for end in ends[np.unique(np.linspace(0, len(ends) - 1, 64).astype(int))].tolist() if len(ends) > 1 else []:
        if int(source.read(end, 1)[0]) != eod:
            raise DataError(
                f"{source.name}: data.packing=best_fit needs documents that end with the end-of-document id {eod}; "
                f"the one that ends at token {end:,} does not. Use data.packing=concat"
            )
    starts, sizes = cut(lengths, seq_len)
    row_of = best_fit(sizes, seq_len + 1)
    order = np.argsort(row_of, kind="stable")
    rows = np.concatenate([[0], np.cumsum(np.bincount(row_of))])
    np.save(target / "starts.npy", starts[order])
    np.save(target / "lengths.npy", sizes[order].astype(np.int32))
    np.save(target / "rows.npy", rows)
    return {"rows": len(rows) - 1, "pieces": len(sizes)}
