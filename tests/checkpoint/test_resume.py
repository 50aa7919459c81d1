"""A run that is interrupted and resumed equals the one that is not: to the bit in its layout, in bounds in another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpt3d.verification.cases import Case
from tests.checkpoint.resuming import begin, go_on, interrupted_twice, with_dropout

World = Callable[..., list[Any]]

SAME_LAYOUT = {
    "fp32": [Case(dp=2, zero=stage, micro=4, family="gpt") for stage in range(4)],
    "bf16": [Case(dp=2, zero=stage, micro=4, dtype="bf16", family="gpt") for stage in range(4)],
    "tensor_and_pipeline": [  # in this order: DeepSpeed numbers parameters in a process, and compares the numbers
        Case(tp=2, zero=3, persist=1000, micro=4),
        Case(tp=2, sp=True, zero=1, micro=4),
        *[Case(pp=2, schedule="interleaved", chunks=2, zero=stage, family="gpt", micro=4) for stage in (1, 3)],
    ],
    "offload": [
        Case(dp=2, zero=2, micro=4, offload_optimizer="cpu"),
        Case(dp=2, zero=3, micro=4, offload_optimizer="cpu", offload_param="cpu"),
    ],
}


@pytest.mark.parametrize("cases", SAME_LAYOUT.values(), ids=SAME_LAYOUT)
def test_interrupted_twice_with_dropout_is_the_same_to_the_bit(world: World, cases: list[Case], tmp_path: Path) -> None:
    world(interrupted_twice, [with_dropout(case) for case in cases], str(tmp_path), n=cases[0].world, timeout=120)


FROM = Case(tp=2, dp=2, zero=2, micro=2)
INTO = [
    Case(zero=0),
    Case(pp=2, zero=3),
    Case(tp=4, sp=True, zero=1),
    Case(pp=2, dp=2, zero=0, schedule="interleaved", chunks=2),
    Case(dp=2, zero=3, offload_optimizer="cpu", offload_param="cpu"),
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
