"""A run that is interrupted and resumed equals the one that is not: to the bit in its layout, in bounds in another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpt3d.verification.cases import Case
from tests.checkpoint.resuming import begin, go_on, interrupted_twice, with_dropout

World = Callable[..., list[Any]]

SLOW = pytest.mark.slow
# In each world ZeRO-3 comes first: DeepSpeed numbers the parameters of a process, and compares the numbers.
SAME_LAYOUT = [
    pytest.param([Case(dp=2, zero=stage, micro=4, family="gpt") for stage in (3, 2, 1, 0)], id="fp32"),
    pytest.param([Case(dp=2, zero=stage, micro=4, dtype="bf16", family="gpt") for stage in (3, 1)], id="bf16"),
    pytest.param([Case(dp=2, zero=stage, micro=4, dtype="bf16") for stage in (2, 0)], id="bf16_more", marks=SLOW),
    pytest.param(
        [
            Case(tp=2, sp=True, zero=3, persist=1000, micro=4),
            Case(pp=2, schedule="interleaved", chunks=2, zero=1, family="gpt", micro=4),
        ],
        id="tensor_and_pipeline",
    ),
    pytest.param(
        [Case(pp=2, schedule="interleaved", chunks=2, zero=stage, family="gpt", micro=4) for stage in (3, 2, 0)],
        id="pipeline_more",
        marks=SLOW,
    ),
    pytest.param(
        [
            Case(dp=2, zero=3, micro=4, offload_optimizer="cpu", offload_param="cpu"),
            Case(dp=2, zero=2, micro=4, offload_optimizer="cpu"),
        ],
        id="offload",
    ),
]


@pytest.mark.parametrize("cases", SAME_LAYOUT)
def test_interrupted_twice_with_dropout_is_the_same_to_the_bit(world: World, cases: list[Case], tmp_path: Path) -> None:
    world(interrupted_twice, [with_dropout(case) for case in cases], str(tmp_path), n=cases[0].world, timeout=120)


FROM = Case(tp=2, dp=2, zero=2, micro=2)
INTO = [
    Case(zero=0),
    Case(pp=2, zero=3),
    Case(tp=4, sp=True, zero=1),
    pytest.param(Case(pp=2, dp=2, zero=0, schedule="interleaved", chunks=2), marks=SLOW),
    pytest.param(Case(dp=2, zero=3, offload_optimizer="cpu", offload_param="cpu"), marks=SLOW),
]


@pytest.fixture(scope="module")
def saved(_fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    from tests.world import world

    root = str(tmp_path_factory.mktemp("saved"))
    return world(begin, FROM.config(), root, n=FROM.world)[0], root


@pytest.mark.parametrize("case", INTO, ids=str)
def test_another_layout_goes_on_within_parity(world: World, case: Case, saved: tuple[Any, str]) -> None:
    whole, root = saved
    for losses, _ in world(go_on, case.config(), root, n=case.world):
        for (loss, norm), (want_loss, want_norm) in zip(losses, whole[2:], strict=True):
            assert loss == pytest.approx(want_loss, abs=2e-6)
            assert norm == pytest.approx(want_norm, rel=5e-5)
