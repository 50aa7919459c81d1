"""The layouts that `python -m gpt3d.verify --all` compares: every axis with every ZeRO stage, and the hard mixtures."""

from __future__ import annotations

from typing import Any

from gpt3d.verification.cases import Case


def _each_stage(**layout: Any) -> list[Case]:
    return [Case(zero=stage, **layout) for stage in range(4)]


MATRIX: tuple[Case, ...] = (
    *_each_stage(family="gpt"),
    *_each_stage(dp=2, family="gpt_untied"),
    *_each_stage(tp=2, micro=4),
    *_each_stage(tp=2, sp=True, family="gpt", recompute="selective"),
    *_each_stage(tp=2, dp=2, sp=True, family="llama_tied"),
    *_each_stage(pp=2),
    *_each_stage(pp=2, schedule="gpipe", family="gpt"),
    *_each_stage(pp=2, schedule="interleaved", chunks=2, family="gpt", recompute="full"),
    *_each_stage(pp=2, schedule="zb_h1", micro=1, family="gpt"),
    *_each_stage(pp=4, micro=1, family="llama_tied"),
    *_each_stage(pp=2, dp=2, family="gpt", micro=1),
    *_each_stage(tp=2, pp=2, sp=True, family="gpt_untied", recompute="full"),
    *_each_stage(pp=2, dp=2, family="gpt", dtype="bf16", micro=1),
    Case(dp=2, zero=1, offload_optimizer="cpu", family="gpt"),
    Case(dp=2, zero=2, offload_optimizer="cpu"),
    Case(dp=2, zero=3, offload_optimizer="cpu", offload_param="cpu", family="gpt"),
    Case(pp=2, dp=2, zero=2, offload_optimizer="cpu", family="gpt"),
    Case(pp=2, dp=2, zero=3, offload_optimizer="cpu", offload_param="cpu", family="llama_tied"),
    Case(tp=2, sp=True, zero=1, family="one_kv_head_bias"),
    Case(tp=2, pp=2, sp=True, zero=3, family="one_kv_head", schedule="zb_h1", micro=1),
    Case(tp=2, dp=2, sp=True, zero=2, dtype="bf16"),
    Case(tp=2, pp=2, sp=True, zero=1, dtype="bf16", schedule="zb_h1", micro=1, family="gpt"),
    Case(pp=2, layers=(3, 1), family="gpt", zero=2),
    Case(pp=4, zero=2, micro=1, family="gpt", schedule="zb_h1", recompute="selective"),
)
# Where every axis, or what is easiest to get wrong, comes together: always in a sample.
HARDEST: tuple[Case, ...] = (
    Case(tp=2, pp=2, dp=2, sp=True, family="gpt", zero=1),
    Case(tp=2, pp=2, dp=2, sp=True, family="llama_tied", zero=3, micro=1, recompute="full"),
    Case(tp=2, pp=2, dp=2, sp=True, family="gpt", zero=2, micro=1, schedule="interleaved", chunks=2),
    Case(tp=2, pp=2, dp=2, sp=True, family="gpt", zero=3, micro=1, schedule="zb_h1"),
)
