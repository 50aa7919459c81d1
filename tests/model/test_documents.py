"""With document masks a packed row gives what its documents give alone, in every layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt3d.data.masks import document_layout
from gpt3d.learner import Rows
from gpt3d.verification import reference
from gpt3d.verification.cases import FAMILIES, LR, ROWS, SEQ, VOCAB, Case
from gpt3d.verification.compare import full_initial_weights
from tests.zero.steps import new_learner

EOD = 0


def packed_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and labels [8, 16] of rows with several documents, each ended by EOD, and their position ids.

    What follows an EOD has no context to be predicted from: its label is ignored.
    """
    rows = torch.randint(1, VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(3))
    rows[:, 4] = rows[::2, 9] = rows[1, 10] = EOD
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].clone()
    labels[tokens == EOD] = -100
    return tokens, labels, document_layout(tokens, EOD)[0]


def train_packed(case: Case) -> tuple[float, float]:
    learner = new_learner(case.config())
    tokens, labels, positions = packed_rows()
    own = len(tokens) // case.dp
    mine = range(learner.layout.at.dp * own, (learner.layout.at.dp + 1) * own, case.micro)
    parts = [slice(i, i + case.micro) for i in mine]
    outcome = learner.step([Rows(tokens[p], labels[p], p.start, positions[p]) for p in parts], LR)
    return learner.total(outcome.loss_sum), outcome.grad_norm


def each_document_alone(family: str) -> tuple[float, float]:
    """The plain model on one document at a time."""
    model = FAMILIES[family]
    weights = full_initial_weights(Case(family=family).config())
    weights = {name: value.requires_grad_(True) for name, value in weights.items()}
    tokens, labels, positions = packed_rows()
    total = torch.zeros(())
    for row in range(ROWS):
        starts = [*(positions[row] == 0).nonzero().flatten().tolist(), SEQ]
        for start, stop in itertools.pairwise(starts):
            total = total + reference.summed_loss(
                weights, tokens[row : row + 1, start:stop], labels[row : row + 1, start:stop], model
            )
    (total / (labels >= 0).sum()).backward()
    norm = torch.stack([w.grad.square().sum() for w in weights.values() if w.grad is not None]).sum().sqrt()
    return float(total.detach()), float(norm)


CASES = [
    Case(family="llama"),
    Case(family="gpt", tp=2, sp=True, pp=2, zero=1),
    Case(family="llama", dp=2, zero=3, recompute="full"),
    Case(family="llama", tp=2, zero=0, recompute="selective"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_documents_do_not_see_each_other(world: Callable[..., list[Any]], case: Case) -> None:
    loss, norm = each_document_alone(case.family)
    assert world(train_packed, case, n=case.world)[0] == pytest.approx((loss, norm), rel=2e-6)
