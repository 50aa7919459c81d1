"""Every layout trains the same model to the same numbers as one plain process (fp32).

Families, tying, sequence parallelism, recompute and microbatch sizes are spread over the layouts so that each meets
each ZeRO stage, without the full product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.parity.compare import Case, assert_equal, layout_result, plain_result


def each_stage(*stages: int, **layout: Any) -> list[Case]:
    return [Case(zero=stage, **layout) for stage in stages or range(4)]


TENSOR_AND_DATA = [
    *each_stage(),
    *each_stage(dp=2, family="gpt_untied"),
    *each_stage(1, 3, dp=4, micro=1, family="llama_tied"),
    *each_stage(tp=2, micro=4),
    *each_stage(tp=2, sp=True, family="gpt", recompute="selective"),
    Case(tp=4, family="gpt_untied", micro=4, zero=1),
    *each_stage(tp=4, sp=True, micro=4, recompute="full"),  # two ranks share each key/value head
    *each_stage(tp=2, dp=2, sp=True, family="gpt"),
    Case(tp=2, family="one_kv_head", zero=2),
    Case(tp=2, sp=True, family="one_kv_head_bias", zero=3),
    Case(tp=4, sp=True, family="one_kv_head_bias", zero=0, micro=4),
    Case(dp=2, family="gpt", micro=4, recompute="full", zero=3),
]
PIPELINES = [
    *each_stage(pp=2),
    Case(pp=2, schedule="gpipe", family="gpt", zero=3),
    *each_stage(1, 3, pp=2, schedule="interleaved", chunks=2, family="gpt", recompute="full"),
    Case(pp=4, micro=1, family="gpt", recompute="selective", zero=1),
    *each_stage(1, 2, 3, pp=2, dp=2, family="llama_tied"),
    *each_stage(1, 3, tp=2, pp=2, sp=True, family="gpt"),
    Case(tp=2, pp=2, dp=2, sp=True, family="gpt", zero=1),
    Case(pp=2, layers=(3, 1), family="gpt", zero=2),
    Case(pp=2, layers=(1, 3), family="llama_tied", zero=1, micro=1),
]
OPTIONS = [
    Case(dp=2, zero=1, offload_optimizer="cpu", family="gpt"),
    Case(dp=2, zero=2, offload_optimizer="cpu"),
    Case(dp=2, zero=3, offload_optimizer="cpu", offload_param="cpu", family="gpt"),
    Case(dp=2, zero=3, offload_param="cpu"),
    Case(tp=2, zero=3, offload_optimizer="cpu", offload_param="cpu", sp=True, recompute="full"),
    Case(dp=2, zero=2, options=(("contiguous_gradients", False),)),
    Case(dp=2, zero=3, options=(("overlap_comm", False), ("contiguous_gradients", False))),
    Case(dp=2, zero=3, persist=1000, family="gpt"),
    Case(dp=2, zero=3, prefetch=10**6, options=(("max_live_parameters", 3000),)),
]
# What adds little to the above, and takes long.
MORE = [
    Case(tp=4, family="one_kv_head", zero=1, micro=4),
    Case(dp=2, family="llama_tied", micro=1, recompute="selective", zero=2),
    *each_stage(0, 2, dp=4, micro=1, family="llama_tied"),
    *each_stage(0, 2, 3, tp=4, family="gpt_untied", micro=4),
    *each_stage(0, 1, 2, pp=2, schedule="gpipe", family="gpt"),
    *each_stage(0, 2, pp=2, schedule="interleaved", chunks=2, family="gpt", recompute="full"),
    *each_stage(0, 2, 3, pp=4, micro=1, family="gpt", recompute="selective"),
    Case(pp=2, dp=2, family="llama_tied", zero=0),
    *each_stage(0, 2, tp=2, pp=2, sp=True, family="gpt"),
    Case(tp=2, pp=2, dp=2, sp=True, family="llama_tied", zero=3, micro=1),
    Case(tp=2, pp=2, dp=2, schedule="interleaved", chunks=2, zero=2, micro=1),
    Case(dp=2, zero=1, options=(("overlap_comm", False),)),
    Case(dp=2, zero=3, prefetch=0),
    Case(pp=2, zero=3, persist=1000, family="gpt"),
]
# Both copies of a tied embedding live on different stages: each optimizer class of DeepSpeed keeps gradients elsewhere.
TIED_ENDS = [
    Case(pp=2, dp=2, family="gpt", zero=1, offload_optimizer="cpu"),
    Case(pp=2, dp=2, family="gpt", zero=2, offload_optimizer="cpu"),
    Case(pp=2, dp=2, family="gpt", zero=3, offload_optimizer="cpu"),
    Case(pp=2, family="llama_tied", zero=3, offload_optimizer="cpu", offload_param="cpu"),
    Case(pp=2, family="gpt", zero=2, options=(("contiguous_gradients", False),)),
]


@pytest.mark.parametrize("case", [*TENSOR_AND_DATA, *PIPELINES, *OPTIONS, *TIED_ENDS], ids=str)
def test_fp32_layout_equals_one_process(world: Callable[..., list[Any]], case: Case) -> None:
    assert_equal(layout_result(world, case), plain_result(case.family))


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_fp32_layouts(world: Callable[..., list[Any]], case: Case) -> None:
    assert_equal(layout_result(world, case), plain_result(case.family))


@pytest.mark.parametrize(
    "case", [Case(zero=0, clip=0.0), Case(tp=2, dp=2, zero=2, clip=0.0), Case(pp=2, zero=3, clip=0.0)], ids=str
)
def test_without_clipping(world: Callable[..., list[Any]], case: Case) -> None:
    assert_equal(layout_result(world, case), plain_result(case.family, clip=0.0))
