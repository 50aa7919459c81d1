"""Dropout masks are a function of (seed, row, layer, site): replayed in recompute, equal where activations are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt3d.model.block import hidden_dropout
from gpt3d.parallel.layout import Sizes, create_layout
from gpt3d.parallel.random import derive, dropout
from gpt3d.verification.cases import Case
from gpt3d.verification.compare import RankResult, Result, assemble, batch, differences
from tests.zero.steps import masters, new_learner, take_steps

World = Callable[..., list[Any]]


def _train(case: Case) -> RankResult:
    config = case.config()
    config.model = dataclasses.replace(config.model, hidden_dropout=0.2, attention_dropout=0.3)
    learner = new_learner(config)
    steps = take_steps(learner, config, [batch(step) for step in range(3)])
    return RankResult([s.loss for s in steps], [s.norm for s in steps], 0.0, masters(learner))


def result(world: World, case: Case) -> Result:
    return assemble(world(_train, case, n=case.world))


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sp": True, "zero": 3}], ids=str)
def test_recompute_replays_the_masks(world: World, layout: dict[str, Any]) -> None:
    none, selective, full = (
        result(world, Case(family="gpt", recompute=kind, **layout)) for kind in ("none", "selective", "full")
    )
    for other in (selective, full):
        assert other.losses == none.losses and other.norms == none.norms
        assert all(torch.equal(other.weights[name], none.weights[name]) for name in none.weights)


@pytest.mark.parametrize("case", [Case(dp=2, zero=2), Case(pp=2, zero=1)], ids=str)
def test_equal_to_one_process(world: World, case: Case) -> None:
    """DP and PP see the same rows with the same masks, in microbatches of the same size."""
    found = differences(result(world, case), result(world, Case()))
    assert found.loss <= 2e-6 and found.norm <= 5e-5 and found.weight <= 5e-6, str(found)


def test_it_does_something_and_depends_on_the_row(world: World) -> None:
    with_dropout = result(world, Case())
    generator_free = dropout(torch.ones(1000), 0.25, 5)
    kept = generator_free != 0
    assert abs(kept.float().mean() - 0.75) < 0.05 and torch.equal(
        generator_free[kept], torch.full((int(kept.sum()),), 1 / 0.75)
    )
    assert torch.equal(generator_free, dropout(torch.ones(1000), 0.25, 5))
    assert not torch.equal(generator_free, dropout(torch.ones(1000), 0.25, 6))
    assert with_dropout.losses[0] != with_dropout.losses[1]


def _masks(sequence_parallel: bool) -> tuple[Tensor, Tensor]:
    """The mask of one site on this rank, and the seeds of this replica's first microbatch."""
    layout = create_layout(Sizes(tp=2, dp=2), torch.device("cpu"), sequence_parallel=sequence_parallel)
    row = layout.at.dp * 4
    return hidden_dropout(torch.ones(8, 2, 32), 0.5, derive(derive(7, row), 3), layout)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_agree_where_they_hold_the_same_and_replicas_differ(world: World, sequence_parallel: bool) -> None:
    masks = world(_masks, sequence_parallel, n=4)
    assert torch.equal(masks[0], masks[1]) is not sequence_parallel  # sequence shards are different tokens
    assert not torch.equal(masks[0], masks[2]) and not torch.equal(masks[1], masks[3])


def _evaluate() -> list[float]:
    config = Case(family="gpt").config()
    config.model = dataclasses.replace(config.model, hidden_dropout=0.5, attention_dropout=0.5)
    learner = new_learner(config)
    from tests.zero.steps import own_rows

    rows = own_rows(learner.layout, batch(0), 2)
    return [learner.evaluate(rows)[0] for _ in range(2)] + [
        learner.evaluate(own_rows(learner.layout, batch(0), 2, 100))[0]
    ]


def test_evaluation_has_no_dropout(world: World) -> None:
    first, again, other_rows = world(_evaluate, n=1)[0]
    assert first == again == other_rows
