"""Layouts against one plain process, with the bounds that the README states (see gpt3d.verification)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpt3d.verification import compare
from gpt3d.verification.cases import FAMILIES, Case
from gpt3d.verification.compare import Result, batch, differences, initial_weights, plain_result, train_rank

__all__ = [
    "FAMILIES", "Case", "Result", "assert_equal", "batch", "initial_weights", "layout_result", "plain_result",
    "train_rank",
]  # fmt: skip


def layout_result(world: Callable[..., list[Any]], case: Case, timeout: float = 90) -> Result:
    """Train on ranks; check that all agree on losses and norms, and that copies of a weight are equal."""
    return compare.assemble(world(train_rank, case.config(), n=case.world, timeout=timeout))


def assert_equal(got: Result, want: Result, loss: float = 2e-6, weight: float = 5e-6, norm: float = 5e-5) -> None:
    """The bounds of the README: absolute on losses and weights, relative on gradient norms."""
    found = differences(got, want)
    print(found)
    assert found.loss <= loss and found.norm <= norm and found.weight <= weight, str(found)
