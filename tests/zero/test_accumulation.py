"""Gradients add up in `precision.grad_dtype`, whatever the number of microbatches (NUM-06)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpt3d.verification.cases import SEQ, VOCAB, Case
from gpt3d.zero.fragments import _set_adam_steps
from tests.zero.steps import Batch, masters, new_learner, take_steps

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


def _in_buckets(case: Case, size: int) -> tuple[list[int], list[torch.Tensor]]:
    """Numbers in each all-reduce over DP, and the weights after two steps."""
    config = case.config()
    learner = new_learner(config)
    engine: Any = learner.engine
    engine.bucket_size = size
    reduced: list[int] = []
    average = engine._average

    def watched(grads: list[torch.Tensor]) -> None:
        reduced.append(sum(g.numel() for g in grads))
        assert len(grads) == 1 or reduced[-1] <= size
        average(grads)

    engine._average = watched
    take_steps(learner, config, [repeated_row(config.trainer.global_batch_size)] * 2)
    return reduced, [value for _, value in masters(learner)]


def test_replicas_reduce_in_buckets(world: World) -> None:
    """One copy of a bucket instead of one of all gradients, with the same result."""
    case = Case(dp=2, zero=0, dtype="bf16")
    whole, in_one = world(_in_buckets, case, 2**26, n=2)[0]
    parts, in_many = world(_in_buckets, case, 1000, n=2)[0]
    assert len(whole) == 2 and len(parts) > 8 and sum(parts) == sum(whole)
    assert all(torch.equal(a, b) for a, b in zip(in_one, in_many, strict=True))


def test_deepspeed_s_adam_counts_steps_in_an_int() -> None:
    """Its state can be made and set before its first step, as resuming does."""
    master = torch.zeros(3)
    theirs: Any = SimpleNamespace(state=defaultdict(dict), param_groups=[{"lr": 1.0}])
    _set_adam_steps(theirs, [master], 7)
    assert theirs.state[master]["step"] == 7 and type(theirs.state[master]["step"]) is int
    ours = torch.optim.AdamW([master], fused=False)
    _set_adam_steps(ours, [master], 7)
    assert torch.is_tensor(ours.state[master]["step"]) and int(ours.state[master]["step"]) == 7
