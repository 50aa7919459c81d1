"""A gradient that is not finite on one rank: all ranks skip that step together, and go on (NUM-08)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt3d.config.schema import RunConfig
from gpt3d.verification.cases import Case
from gpt3d.verification.compare import batch, plain_result
from tests.zero.steps import Step, allow_fp16_on_cpu, masters, new_learner, take_steps

World = Callable[..., list[Any]]
SCALE = 1024.0


def fp16(case: Case, floor: float = 1.0, window: int = 1000) -> RunConfig:
    config = case.config()
    config.precision.initial_loss_scale, config.precision.min_loss_scale = SCALE, floor
    config.precision.loss_scale_window = window
    return config


def _train(config: RunConfig, steps: list[int], bad: list[int], rank: int) -> tuple[list[Step], list[Tensor]]:
    """Steps on the batches `steps`; at the places in `bad`, `rank` gets inf in the gradient of one of its norms."""
    allow_fp16_on_cpu()
    learner = new_learner(config)
    vector = next(p for p in learner.engine.module.parameters() if p.placement.dim is None)
    poison = False
    if learner.layout.rank == rank:
        vector.register_hook(lambda grad: grad.fill_(math.inf) if poison else grad)
    taken = []
    for i, step in enumerate(steps):
        poison = i in bad
        taken += take_steps(learner, config, [batch(step)])
    return taken, [value for _, value in masters(learner)]


def same_on_all(ranks: list[tuple[list[Step], list[Tensor]]]) -> list[Step]:
    assert all(steps == ranks[0][0] for steps, _ in ranks), "ranks disagree"
    return ranks[0][0]


FP16 = [
    *[Case(dp=2, zero=stage, dtype="fp16") for stage in range(4)],
    Case(pp=2, zero=1, dtype="fp16", family="gpt"),
    Case(pp=2, zero=3, dtype="fp16", family="gpt"),
    Case(tp=2, zero=1, dtype="fp16", sp=True),
    Case(dp=2, zero=2, dtype="fp16", offload_optimizer="cpu"),
]


@pytest.mark.parametrize("case", FP16, ids=str)
def test_fp16_skips_together_and_goes_on(world: World, case: Case) -> None:
    ranks = world(_train, fp16(case), [0, 1, 2, 3, 4], [3], case.world - 1, n=case.world)
    steps = same_on_all(ranks)
    assert [s.skipped for s in steps] == [False, False, False, True, False]
    assert [s.scale for s in steps] == [SCALE, SCALE, SCALE, SCALE / 2, SCALE / 2]
    assert steps[3].norm == math.inf
    # the skipped step left nothing behind: the same run without it ends with the same weights
    without = world(_train, fp16(case), [0, 1, 2, 4], [], 0, n=case.world)
    assert steps[4].loss == without[0][0][3].loss
    for (_, got), (_, want) in zip(ranks, without, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)  # half the scale rounds small gradients differently
    # and the scale is applied exactly once: norms are those of fp32
    want_norms = plain_result(case.family).norms
    assert steps[0].norm == pytest.approx(want_norms[0], rel=5e-3)


@pytest.mark.parametrize("stage", range(4))
def test_scale_grows_after_the_window_and_stays_at_the_floor(world: World, stage: int) -> None:
    case = Case(zero=stage, dtype="fp16", micro=8)
    steps, _ = world(_train, fp16(case, window=2), [0, 1, 2, 3], [], 0, n=1)[0]
    assert max(s.scale for s in steps) > SCALE and not any(s.skipped for s in steps)
    steps, _ = world(_train, fp16(case, floor=SCALE / 2), [0, 1, 2, 3, 4], [0, 1, 2, 3], 0, n=1)[0]
    assert [s.skipped for s in steps] == [True] * 4 + [False]
    assert [s.scale for s in steps] == [SCALE / 2] * 5
    assert [s.norm for s in steps[:4]] == [math.inf] * 4 and math.isfinite(steps[4].norm)


@pytest.mark.parametrize(("stage", "dtype"), [(0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_other_precisions_skip_too(world: World, stage: int, dtype: str) -> None:
    case = Case(dp=2, zero=stage, dtype=dtype)
    ranks = world(_train, case.config(), [0, 1, 2], [1], 1, n=2)
    steps = same_on_all(ranks)
    assert [s.skipped for s in steps] == [False, True, False] and steps[1].norm == math.inf
    without = world(_train, case.config(), [0, 2], [], 0, n=2)
    assert steps[2] == without[0][0][1]
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][1], without[0][1], strict=True))
