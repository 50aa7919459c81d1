"""From a flat fragment of a local tensor to rectangles of the global one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from gpt3d.parallel.placement import Placement


class Piece(NamedTuple):
    """A rectangle of a global tensor: where it begins, and its values (a view into live memory)."""

    offsets: tuple[int, ...]
    values: Tensor


def global_pieces(place: Placement, shape: tuple[int, ...], start: int, flat: Tensor) -> Iterator[Piece]:
    """The pieces that `flat` [n] is of the global tensor: elements start..start+n of the local tensor, row by row.

    `shape` is the global shape that counts: rows of `place` beyond it (padding of the vocabulary) are left out.
    """
    for at, offsets, sizes in rectangles(start, flat.numel(), place.local_shape):
        view = flat.narrow(0, at - start, math.prod(sizes)).view(sizes)
        yield from _cut_by_ranges(place, shape, offsets, view)


def _cut_by_ranges(place: Placement, shape: tuple[int, ...], offsets: tuple[int, ...], view: Tensor) -> Iterator[Piece]:
    """A rectangle in local coordinates, cut where neighbouring local rows (columns) are apart in the global tensor."""
    dim = place.dim or 0
    local = 0
    for first, stop in place.ranges if place.dim is not None else ((0, place.shape[0]),):
        low = max(offsets[dim], local)
        high = min(offsets[dim] + view.shape[dim], local + min(stop, shape[dim]) - first)
        if low < high:
            begins = (*offsets[:dim], first + low - local, *offsets[dim + 1 :])
            yield Piece(begins, view.narrow(dim, low - offsets[dim], high - low))
        local += stop - first


def rectangles(
    start: int, count: int, shape: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Cut elements start..start+count of a row-major box into boxes: (first element, offsets, sizes) of each.

    Each is contiguous in memory. A matrix needs at most three: the rest of a row, whole rows, the beginning of a row.
    """
    if count <= 0:
        return
    if len(shape) == 1:
        yield start, (start,), (count,)
        return
    width, end = math.prod(shape[1:]), start + count
    row, column = divmod(start, width)
    if column or end < (row + 1) * width:
        part = min(end, (row + 1) * width) - start
        yield from _in_row(row, column, part, shape)
        start, row = start + part, row + 1
    whole = (end - start) // width
    if whole > 0:
        yield start, (row, *(0 for _ in shape[1:])), (whole, *shape[1:])
        start, row = start + whole * width, row + whole
    yield from _in_row(row, 0, end - start, shape)


def _in_row(
    row: int, column: int, count: int, shape: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    for at, offsets, sizes in rectangles(column, count, shape[1:]):
        yield row * math.prod(shape[1:]) + at, (row, *offsets), (1, *sizes)
