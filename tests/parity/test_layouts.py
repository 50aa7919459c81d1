"""Every layout trains the same model to the same numbers as one plain process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.parity.compare import Case, assert_equal, layout_result, plain_result

FP32 = [
    *[Case(zero=z) for z in range(4)],
    *[Case(dp=2, zero=z) for z in range(4)],
    *[Case(tp=2, zero=z) for z in range(4)],
    *[Case(pp=2, zero=z) for z in range(4)],
    *[Case(tp=2, dp=2, sp=True, zero=z, family="gpt") for z in range(4)],
    *[Case(tp=2, pp=2, zero=z, family="gpt", sp=True) for z in range(4)],
    *[Case(pp=2, dp=2, zero=z, family="llama_tied") for z in range(4)],
]


@pytest.mark.parametrize("case", FP32, ids=str)
def test_fp32_layout_equals_one_process(world: Callable[..., list[Any]], case: Case) -> None:
    assert_equal(layout_result(world, case), plain_result(case.family))
