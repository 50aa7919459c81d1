"""The loss is the sum over the valid targets of the global batch over their count, everywhere (NUM-02, -05, -07)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt3d.verification import reference
from gpt3d.verification.cases import FAMILIES, SEQ, VOCAB, Case
from gpt3d.verification.compare import RankResult, assemble, batch, initial_weights
from tests.zero.steps import Batch, Step, masters, new_learner, take_steps

World = Callable[..., list[Any]]


def rows_with(*valid: int) -> Batch:
    """One row for each number of valid targets."""
    rows = torch.randint(0, VOCAB, (len(valid), SEQ + 1), generator=torch.Generator().manual_seed(9))
    labels = rows[:, 1:].clone()
    for row, count in zip(labels, valid, strict=True):
        row[count:] = -100
    return rows[:, :-1].contiguous(), labels


def _train(case: Case, batches: list[Batch]) -> tuple[list[Step], list[tuple[Any, Tensor]]]:
    config = case.config()
    learner = new_learner(config)
    return take_steps(learner, config, batches), masters(learner)


def plain(family: str, data: Batch) -> tuple[float, float]:
    """Loss and gradient norm of the initial weights, in plain torch."""
    weights = {name: w.clone().requires_grad_(True) for name, w in initial_weights(family).items()}
    loss = reference.summed_loss(weights, *data, FAMILIES[family]) / (data[1] >= 0).sum()
    loss.backward()
    norm = torch.stack([w.grad.norm() for w in weights.values()]).norm()
    return loss.item(), norm.item()


@pytest.mark.parametrize(("stage", "valid"), [(0, (3, 1)), *[(stage, (12, 1, 0, 5)) for stage in range(4)]], ids=str)
def test_uneven_targets_on_two_replicas(world: World, stage: int, valid: tuple[int, ...]) -> None:
    """3 targets on one replica and 1 on the other; and the same with accumulation."""
    data = rows_with(*valid)
    loss, norm = plain("llama", data)
    for steps, _ in world(_train, Case(dp=2, zero=stage, micro=1), [data], n=2):
        assert steps[0].loss == pytest.approx(loss, abs=2e-6) and steps[0].norm == pytest.approx(norm, rel=5e-5)


@pytest.mark.parametrize(
    "case",
    [Case(dp=2, micro=1, zero=2), Case(dp=2, pp=2, micro=1, zero=1), Case(dp=2, tp=2, sp=True, micro=1, zero=3)],
    ids=str,
)
def test_a_replica_without_any_target_adds_nothing(world: World, case: Case) -> None:
    data = rows_with(0, 7)
    loss, norm = plain("llama", data)
    for steps, _ in world(_train, case, [data], n=case.world):
        assert steps[0].loss == pytest.approx(loss, abs=2e-6) and steps[0].norm == pytest.approx(norm, rel=5e-5)


@pytest.mark.parametrize(
    "case", [*[Case(dp=2, micro=1, zero=stage) for stage in (0, 1, 3)], Case(dp=2, pp=2, micro=1, zero=2)], ids=str
)
def test_without_any_target_nothing_moves(world: World, case: Case) -> None:
    """All ranks skip, parameters stay bit for bit (no weight decay), and the next step is as if it had not been."""
    empty, full = rows_with(0, 0), rows_with(5, 6)
    before = world(_train, case, [empty], n=case.world)
    with_gap = world(_train, case, [full, empty, full], n=case.world)
    without = world(_train, case, [full, full], n=case.world)
    initial = initial_weights("llama")
    for steps, weights in before:
        assert steps == [Step(0.0, 0.0, True, 1.0)]
        assert all(torch.equal(value, place.take(initial[place.name])) for place, value in weights)
    for (gap, got), (straight, want) in zip(with_gap, without, strict=True):
        assert [gap[0], gap[2]] == straight and gap[1].skipped
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "case",
    [
        Case(tp=4, sp=True, zero=1, micro=4),  # norms see a quarter of the tokens; two ranks share each key/value head
        Case(tp=2, sp=True, dp=2, zero=1, family="one_kv_head_bias"),
        Case(tp=2, sp=True, pp=2, zero=2, family="gpt"),  # and the tied embedding has a copy on another stage
    ],
    ids=str,
)
def test_copies_stay_equal_bit_for_bit(world: World, case: Case) -> None:
    """After 20 steps; `assemble` refuses copies that differ. That they are right as well, the parity tests show."""
    ranks = world(_train, case, [batch(step) for step in range(20)], n=case.world)
    result = assemble([RankResult([s.loss for s in steps], [s.norm for s in steps], 0.0, w) for steps, w in ranks])
    assert result.losses[-1] < result.losses[0]
