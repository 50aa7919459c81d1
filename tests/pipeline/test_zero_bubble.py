"""zb_h1 is equal to one process with every ZeRO stage, number format and kind of weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpt3d.verification.verdict import TOLERANCES
from tests.parity.compare import Case, assert_equal, layout_result, plain_result


def split(**layout: Any) -> Case:
    return Case(**{"pp": 2, "micro": 1, "schedule": "zb_h1", **layout})


FP32 = [
    *[split(family="gpt", dp=2, zero=zero) for zero in (1, 3)],
    split(pp=4, zero=3, micro=4),  # fewer microbatches than stages
    split(tp=2, family="one_kv_head", sp=True, zero=0),  # a weight made of two parameters, one summed over ranks
    split(tp=2, family="gpt", sp=True, zero=2, recompute="full"),
    split(dp=2, family="gpt", zero=3, offload_optimizer="cpu", offload_param="cpu"),
]
MORE = [
    *[split(family="gpt", dp=2, zero=zero) for zero in (0, 2)],
    split(pp=4, zero=1),
    split(tp=2, family="one_kv_head_bias", zero=1),
    split(tp=2, sp=True, zero=3, recompute="selective"),
    split(dp=2, family="gpt", zero=2, offload_optimizer="cpu"),
    split(zero=3, persist=1000),
    split(layers=(3, 1), zero=1),
]


@pytest.mark.parametrize("case", [*FP32, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=str)
def test_fp32(world: Callable[..., list[Any]], case: Case) -> None:
    assert_equal(layout_result(world, case), plain_result(case.family))


@pytest.mark.parametrize("case", [split(dp=2, family="gpt", zero=zero, dtype="bf16") for zero in (1, 3)], ids=str)
def test_bf16_as_close_as_1f1b(world: Callable[..., list[Any]], case: Case) -> None:
    bound = TOLERANCES["bf16"]
    assert_equal(layout_result(world, case), plain_result(case.family), bound.loss, bound.weight, bound.norm)
