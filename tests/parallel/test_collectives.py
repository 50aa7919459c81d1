"""The seven borders of a tensor-parallel region: forward and backward by their definitions, on 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt3d.parallel import collectives as c
from gpt3d.parallel.layout import Sizes, create_layout, single_process_layout

S, B, H = 8, 3, 12
Pair = tuple[Callable[[list[Tensor], int], Tensor], Callable[[list[Tensor], int], Tensor]]


def same(xs: list[Tensor], r: int) -> Tensor:
    return xs[r]


def total(xs: list[Tensor], r: int) -> Tensor:
    return torch.stack(xs).sum(0)


def joined(dim: int) -> Callable[[list[Tensor], int], Tensor]:
    return lambda xs, r: torch.cat(xs, dim)


def part(dim: int) -> Callable[[list[Tensor], int], Tensor]:
    return lambda xs, r: xs[r].chunk(len(xs), dim)[r]


def part_of_total(xs: list[Tensor], r: int) -> Tensor:
    return total(xs, r).chunk(len(xs), 0)[r]


BORDERS: dict[str, Pair] = {
    "copy_to_region": (same, total),
    "reduce_from_region": (total, same),
    "gather_from_region": (joined(-1), part(-1)),
    "scatter_to_region": (part(-1), joined(-1)),
    "gather_sequence": (joined(0), part_of_total),
    "reduce_scatter_sequence": (part_of_total, joined(0)),
    "scatter_sequence": (part(0), joined(0)),
}


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    """Small integers: sums are exact, in any order."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


def _check_borders(size: int) -> int:
    layout = create_layout(Sizes(tp=size), torch.device("cpu"))
    r = layout.tp.rank
    for name, (forward, backward) in BORDERS.items():
        xs = [draw((S, B, H), i) for i in range(size)]
        gs = [draw(tuple(forward(xs, i).shape), 100 + i) for i in range(size)]
        x = xs[r].clone().requires_grad_(True)
        y = getattr(c, name)(x, layout.tp)
        assert torch.equal(y, forward(xs, r)), f"{name} forward"
        y.backward(gs[r])
        assert x.grad is not None and torch.equal(x.grad, backward(gs, r)), f"{name} backward"
        assert torch.equal(x, xs[r]), f"{name} changed its input"
    return len(BORDERS)


@pytest.mark.parametrize("size", [2, 4])
def test_borders(world: Callable[..., list[Any]], size: int) -> None:
    assert world(_check_borders, size, n=size) == [7] * size


@pytest.mark.parametrize("name", BORDERS)
def test_a_group_of_one_is_transparent(name: str) -> None:
    x = draw((S, B, H), 0).requires_grad_(True)
    y = getattr(c, name)(x, single_process_layout().tp)
    assert torch.equal(y, x)
    (y * 2).sum().backward()
    assert x.grad is not None and bool((x.grad == 2).all())
