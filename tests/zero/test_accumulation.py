"""Gradients add up in `precision.grad_dtype`, whatever the number of microbatches (NUM-06)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpt3d.verification.cases import SEQ, VOCAB, Case
from tests.zero.steps import Batch, new_learner, take_steps

World = Callable[..., list[Any]]


def repeated_row(times: int) -> Batch:
    row = torch.randint(0, VOCAB, (1, SEQ + 1), generator=torch.Generator().manual_seed(3))
    return row[:, :-1].repeat(times, 1), row[:, 1:].repeat(times, 1)


def _norms(case: Case, counts: list[int]) -> list[float]:
    """Norm of the first gradient for one row, `count` times, each a microbatch; powers of two scale exactly."""
    config = case.config()
    config.trainer.global_batch_size = max(counts)
    return [take_steps(new_learner(config), config, [repeated_row(count)])[0].norm for count in counts]


CASES = [
    *[Case(zero=stage, micro=1, dtype="bf16") for stage in range(4)],
    Case(zero=3, micro=1, dtype="bf16", offload_optimizer="cpu", offload_param="cpu"),
    Case(zero=2, pp=2, micro=1, dtype="bf16", offload_optimizer="cpu", family="gpt"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_many_equal_microbatches_are_one(world: World, case: Case) -> None:
    """64 equal gradients add up to 64 of them in fp32; in bf16 each addition is rounded to 8 bits."""
    one, many = world(_norms, case, [1, 64], n=case.world)[0]
    assert many == pytest.approx(one, rel=2e-6)


@pytest.mark.parametrize("stage", [0, 2])
def test_bf16_accumulation_would_be_seen(world: World, stage: int) -> None:
    """The control: with `precision.grad_dtype=bf16` the same sum is off, so the test above can fail."""
    one, many = world(_norms, Case(zero=stage, micro=1, dtype="bf16", grad_dtype="bf16"), [1, 64], n=1)[0]
    assert abs(many / one - 1) > 1e-3
