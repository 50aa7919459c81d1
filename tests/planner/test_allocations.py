"""Planned, dry-run and real bytes of each rank: distinct storages alive at the fullest moment of a real step on gloo.

Real are all storages that operations make on this rank: weights, gradients, optimizer, activations, logits, what
DeepSpeed adds, what the optimizer step needs. Planned with the CPU's kernels
(`on_cpu`): no fused RMSNorm, no fused Adam.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.memory import CASES, QUICK, compared, measure


def check(world: Callable[..., list[Any]], cases: tuple[str, ...]) -> None:
    for ranks in (1, 2):
        names = [name for name in cases if CASES[name].world == ranks]
        for row in compared(names, world(measure, names, n=ranks, timeout=200)) if names else []:
            assert row.planned == pytest.approx(row.real, rel=0.05), row
            assert row.dry == pytest.approx(row.real, rel=0.05 if CASES[row.name].zero else 0.01), row


def test_planned_is_what_a_rank_allocates(world: Callable[..., list[Any]]) -> None:
    check(world, QUICK)


@pytest.mark.slow
def test_in_all_layouts(world: Callable[..., list[Any]]) -> None:
    assert len(CASES) >= 20
    check(world, tuple(CASES))
