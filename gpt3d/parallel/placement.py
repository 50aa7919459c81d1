"""A parameter knows its place: canonical name, global shape, and which part of it this rank holds.

From this one record follow the initial values (equal in every layout), which copy counts in the gradient norm, weight
decay, checkpoint keys and the planner's byte count. No other place decides any of these.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

TILE = 1024  # edge of the square tiles in which random initial values are drawn


@dataclass(frozen=True)
class Placement:
    """The part of one canonical parameter that this rank holds.

    `ranges` are global [start, stop) intervals along `dim`; the local tensor is their concatenation (a fused QKV weight
    holds three). `dim` None: the whole tensor. `copy` numbers the ranks of one replica that hold the same values;
    copy 0 is the one that counts in norms and totals. `copies` of them are in this tensor-parallel group and share the
    work of saving (the last stage's copy of a tied embedding has none to share).
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    copy: int = 0
    copies: int = 1

    @property
    def counted(self) -> bool:
        return self.copy == 0

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices; norms and biases are vectors."""
        return len(self.shape) > 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def take(self, full: Tensor) -> Tensor:
        """This rank's part of the global tensor `full`."""
        if self.dim is None:
            return full
        return torch.cat([full.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)


def even_range(length: int, parts: int, index: int) -> tuple[tuple[int, int], ...]:
    """Part `index` of `length` cut into equal `parts`."""
    step = length // parts
    return ((index * step, (index + 1) * step),)


@dataclass(frozen=True)
class Normal:
    """Initial values: normal with mean 0 and standard deviation `std`, drawn from (seed, canonical name)."""

    std: float
    seed: int


@dataclass(frozen=True)
class Constant:
    """Initial values: all equal to `value`."""

    value: float


def new_parameter(
    placement: Placement, init: Normal | Constant, device: torch.device, dtype: torch.dtype
) -> nn.Parameter:
    """A parameter of `placement.local_shape` with its initial values, carrying `placement`."""
    values = torch.empty(placement.local_shape, device=device, dtype=dtype)
    if isinstance(init, Constant):
        values.fill_(init.value)
    elif values.device.type != "meta":
        _fill_normal(values, placement, init)
    parameter = nn.Parameter(values)
    parameter.placement = placement  # type: ignore[attr-defined]
    return parameter


def placement_of(parameter: nn.Parameter) -> Placement:
    """The placement that `new_parameter` attached."""
    return parameter.placement  # type: ignore[attr-defined]


def _fill_normal(values: Tensor, placement: Placement, init: Normal) -> None:
    """Copy the tiles of the virtual global tensor that meet this rank's part.

    Each tile has its own generator, so a rank draws only what it needs and never holds the global tensor; values are
    drawn on the CPU in fp32, hence the same on every device and in every precision up to rounding.
    """
    rows, columns = placement.shape
    row_ranges = placement.ranges if placement.dim == 0 else ((0, rows),)
    column_ranges = placement.ranges if placement.dim == 1 else ((0, columns),)
    row_at = 0
    for row_start, row_stop in row_ranges:
        column_at = 0
        for column_start, column_stop in column_ranges:
            for i in range(row_start // TILE, -(-row_stop // TILE)):
                for j in range(column_start // TILE, -(-column_stop // TILE)):
                    top, left = max(row_start, i * TILE), max(column_start, j * TILE)
                    tile = _tile(placement, init, i, j)
                    part = tile[top - i * TILE : row_stop - i * TILE, left - j * TILE : column_stop - j * TILE]
                    target = values.narrow(0, row_at + top - row_start, part.shape[0])
                    target.narrow(1, column_at + left - column_start, part.shape[1]).copy_(part)
            column_at += column_stop - column_start
        row_at += row_stop - row_start


def _tile(placement: Placement, init: Normal, i: int, j: int) -> Tensor:
    rows, columns = placement.shape
    key = f"{init.seed}/{placement.name}/{i}/{j}".encode()
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
    shape = (min(TILE, rows - i * TILE), min(TILE, columns - j * TILE))
    return torch.empty(shape).normal_(0.0, init.std, generator=torch.Generator().manual_seed(seed))
