"""bf16 (fp32 masters, fp32 gradient accumulation) against fp32 plain torch, and against itself in other layouts.

Measured over 24 layouts, 5 steps: against fp32 losses differ by up to 4.2e-4 and norms by 1.5e-3 (other seeds differ by
0.1 and 0.4). What only moves whole microbatches (DP, PP, ZeRO stage without tying) changes no loss and norms by 4e-7;
TP, or another micro batch size, rounds at other places: losses 4.7e-4, norms 1.3e-3. Weights aren't compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.parity.compare import Case, Result, layout_result, plain_result

World = Callable[..., list[Any]]
LOSS, NORM = 1.5e-3, 5e-3  # bounds with a margin of 3
EXACT_LOSS, EXACT_NORM = 1e-6, 2e-6


def distances(a: Result, b: Result) -> tuple[float, float]:
    loss = max(abs(x - y) for x, y in zip([*a.losses, a.validation], [*b.losses, b.validation], strict=True))
    return loss, max(abs(x - y) / y for x, y in zip(a.norms, b.norms, strict=True))


def assert_within(got: Result, want: Result, loss: float, norm: float) -> None:
    found = distances(got, want)
    assert found[0] <= loss and found[1] <= norm, f"loss {found[0]:.1e}, norm {found[1]:.1e}"


@pytest.mark.parametrize("stage", range(4))
def test_replicas_change_nothing(world: World, stage: int) -> None:
    single = layout_result(world, Case(zero=stage, dtype="bf16"))
    assert_within(single, plain_result("llama"), LOSS, NORM)
    assert_within(layout_result(world, Case(zero=stage, dtype="bf16", dp=2)), single, EXACT_LOSS, EXACT_NORM)


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_stages_of_the_pipeline_change_nothing(world: World, family: str) -> None:
    single = layout_result(world, Case(zero=0, family=family, dtype="bf16"))
    assert_within(layout_result(world, Case(zero=1, pp=2, family=family, dtype="bf16")), single, EXACT_LOSS, EXACT_NORM)


@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2, zero=1, dtype="bf16", family="gpt", sp=True),
        Case(tp=4, zero=3, dtype="bf16"),
        Case(zero=2, dtype="bf16", micro=8, family="gpt"),
        Case(tp=2, dp=2, zero=2, dtype="bf16", offload_optimizer="cpu"),
        Case(pp=2, dp=2, zero=2, dtype="bf16", offload_optimizer="cpu", family="gpt"),
    ],
    ids=str,
)
def test_other_layouts_stay_within_the_bound(world: World, case: Case) -> None:
    assert_within(layout_result(world, case), plain_result(case.family), LOSS, NORM)
