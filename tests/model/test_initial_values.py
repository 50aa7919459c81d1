"""The starting point is the same in every layout, bit for bit, and no two layers are alike (NUM-09)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt3d.model.build import build_chunks
from gpt3d.parallel import placement
from gpt3d.parallel.layout import Sizes, create_layout
from gpt3d.parallel.placement import placement_of
from gpt3d.verification.cases import Case
from gpt3d.verification.compare import RankResult, assemble, batch, initial_weights, plain_result
from tests.zero.steps import masters, new_learner, take_steps

World = Callable[..., list[Any]]


def _first(case: Case) -> tuple[float, list[tuple[Any, Tensor]], list[tuple[Any, Tensor]]]:
    """Loss of step 0; parameters as built; and as the optimizer holds them before any step."""
    config = case.config()
    sizes = Sizes(case.tp, 1, case.dp, case.pp)
    layout = create_layout(
        sizes, torch.device("cpu"), sequence_parallel=case.sp, num_kv_heads=config.model.num_kv_heads
    )
    built = [(placement_of(p), p.detach()) for chunk in build_chunks(config, layout) for p in chunk.parameters()]
    learner = new_learner(config)
    held = masters(learner)
    return take_steps(learner, config, [batch(0)])[0].loss, built, held


LAYOUTS = [
    Case(tp=2, family="gpt", zero=0),
    Case(tp=4, sp=True, zero=2),
    Case(tp=4, family="one_kv_head_bias", zero=1),
    Case(pp=2, family="gpt", zero=3),
    Case(pp=2, schedule="interleaved", chunks=2, family="llama_tied", zero=1),
    Case(dp=2, family="gpt", zero=3),
    Case(tp=2, pp=2, family="llama", zero=2),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_initial_weights_and_first_loss(world: World, case: Case) -> None:
    ranks = world(_first, case, n=case.world)
    want = initial_weights(case.family)
    for kind in (1, 2):
        full = assemble([RankResult([], [], 0.0, rank[kind]) for rank in ranks]).weights
        assert full.keys() == want.keys()
        assert all(torch.equal(full[name], want[name]) for name in want)
    assert ranks[0][0] == pytest.approx(plain_result(case.family).losses[0], abs=1e-6)


def test_no_two_layers_are_alike() -> None:
    weights = initial_weights("gpt")
    for name, value in weights.items():
        kind = name.split(".", 2)[-1]
        others = [w for n, w in weights.items() if n != name and n.split(".", 2)[-1] == kind and value.dim() > 1]
        assert all(not torch.equal(value, other) for other in others), name


def test_init_std_of_residual_outputs() -> None:
    """Matrices: std `init_std`; into the residual stream: smaller by sqrt(2 x layers), as in GPT-2."""
    config = Case(family="gpt").config()
    config.model = dataclasses.replace(config.model, hidden_size=128, head_dim=32, ffn_hidden_size=512)
    from gpt3d.verification.compare import full_initial_weights

    weights = full_initial_weights(config)
    for name, value in weights.items():
        std = config.model.init_std / (8**0.5 if name.endswith((".out.weight", ".down.weight")) else 1)
        if value.dim() == 2:
            assert value.std().item() == pytest.approx(std, rel=0.05), name
        else:
            assert bool((value == (1.0 if "norm.weight" in name else 0.0)).all()), name


def _small_tiles(case: Case) -> list[tuple[Any, Tensor]]:
    placement.TILE = 16  # fresh ranks: nobody else sees it
    return _first(case)[1]


def test_tiles_smaller_than_the_matrices(world: World) -> None:
    """The tiny models fit into one tile; with 16 x 16 tiles every slice crosses several."""
    one, two = (
        assemble([RankResult([], [], 0.0, rank) for rank in world(_small_tiles, case, n=case.world)]).weights
        for case in (Case(), Case(tp=2, pp=2))
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["head.weight"], initial_weights("llama")["head.weight"])
