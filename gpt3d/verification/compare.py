"""Train a tiny model in one layout on several ranks and in one plain process, and compare every number."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gpt3d.config.schema import ParallelConfig, PipelineConfig, RunConfig
from gpt3d.learner import Learner, Rows
from gpt3d.model.build import build_chunks
from gpt3d.parallel import device
from gpt3d.parallel.layout import Sizes, create_layout, single_process_layout
from gpt3d.parallel.placement import Placement, placement_of
from gpt3d.verification import reference
from gpt3d.verification.cases import CLIP, ROWS, SEQ, VOCAB, Case


class Disagreement(AssertionError):
    """The ranks of one layout contradict each other."""


@dataclass(frozen=True)
class Result:
    """Losses per token and gradient norms by step, validation loss at the end, and the full weights."""

    losses: list[float]
    norms: list[float]
    validation: float
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class RankResult:
    """The same as one rank sees it, with its own part of the weights in fp32."""

    losses: list[float]
    norms: list[float]
    validation: float
    weights: list[tuple[Placement, Tensor]]


@dataclass(frozen=True)
class Differences:
    """Between two results: of the losses by step and the validation loss, of the norms (relative), of each weight."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, float]

    @property
    def loss(self) -> float:
        return max(self.losses)

    @property
    def norm(self) -> float:
        return max(self.norms)

    @property
    def weight(self) -> float:
        return max(self.weights.values())

    def __str__(self) -> str:
        worst = max(self.weights, key=self.weights.__getitem__)
        return f"loss {self.loss:.1e}, norm {self.norm:.1e}, weight {self.weight:.1e} ({worst})"


def batch(step: int, count: int = ROWS, seq_len: int = SEQ) -> tuple[Tensor, Tensor]:
    """The global batch of a step: random rows, with very different numbers of valid labels (row 1 has none)."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = torch.randint(0, VOCAB, (count, seq_len + 1), generator=generator)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].clone()
    labels[0, 4:] = -100
    labels[1] = -100
    labels[5, :9] = -100
    return tokens, labels


def train_plain(config: RunConfig) -> Result:
    """The reference run: one process, whole batches, fp32, plain torch, from the same initial weights."""
    model, shape = config.model, (config.trainer.global_batch_size, config.data.seq_len)
    losses, norms, final = reference.train(
        {name: value.float() for name, value in full_initial_weights(config).items()},
        (batch(step, *shape) for step in range(config.trainer.steps)),
        model,
        lr=config.optimizer.lr,
        clip=config.optimizer.grad_clip,
        eps=config.optimizer.eps,
    )
    tokens, labels = batch(99, *shape)
    validation = float(reference.summed_loss(final, tokens, labels, model) / (labels >= 0).sum())
    return Result(losses, norms, validation, final)


def full_initial_weights(config: RunConfig) -> dict[str, Tensor]:
    """The full initial weights, from a single-process build of the model."""
    single = dataclasses.replace(config, parallel=ParallelConfig(), pipeline=PipelineConfig())
    chunk = build_chunks(single, single_process_layout())[0]
    return {placement_of(p).name: p.detach().clone() for p in chunk.parameters()}


@lru_cache
def plain_result(family: str, clip: float = CLIP) -> Result:
    """`train_plain` of a test family, kept."""
    return train_plain(Case(family=family, clip=clip).config())


@lru_cache
def initial_weights(family: str) -> dict[str, Tensor]:
    """`full_initial_weights` of a test family, kept."""
    return full_initial_weights(Case(family=family).config())


def train_rank(config: RunConfig) -> RankResult:
    """Runs on every rank: trains for `trainer.steps` steps, with evaluations; returns its numbers and its weights."""
    sizes = Sizes(config.parallel.tp, config.parallel.cp, config.parallel.dp or 1, config.parallel.pp)
    layout = create_layout(
        sizes,
        device.select(int(os.environ.get("LOCAL_RANK", "0")), config.cluster.device).torch_device,
        sequence_parallel=config.parallel.sequence_parallel,
        num_kv_heads=config.model.num_kv_heads,
    )
    learner = Learner(config, layout)
    micro, lr = config.trainer.micro_batch_size, config.optimizer.lr

    def rows(step: int) -> list[Rows]:
        tokens, labels = batch(step, config.trainer.global_batch_size, config.data.seq_len)
        own = len(tokens) // sizes.dp
        mine = range(layout.at.dp * own, (layout.at.dp + 1) * own, micro)
        return [Rows(tokens[i : i + micro], labels[i : i + micro], step * len(tokens) + i) for i in mine]

    losses, norms = [], []
    for step in range(config.trainer.steps):
        if step == 2:  # an evaluation in the middle must leave no trace; replicas bring different numbers of rows
            learner.evaluate(rows(98)[: 1 + layout.at.dp])
        outcome = learner.step(rows(step), lr)
        losses.append(learner.total(outcome.loss_sum) / outcome.tokens)
        norms.append(outcome.grad_norm)
    loss, tokens = learner.evaluate(rows(99))
    weights = [(place, weight.cpu().clone()) for place, weight in learner.engine.master_weights()]
    return RankResult(losses, norms, loss / tokens, weights)


def assemble(ranks: Sequence[RankResult]) -> Result:
    """One result from all ranks'. Raises Disagreement unless they agree and cover each weight, copies being equal."""
    first = ranks[0]
    for other in ranks[1:]:
        if other.losses != first.losses or other.validation != first.validation:
            raise Disagreement(f"ranks report different losses: {first.losses} and {other.losses}")
        if other.norms != first.norms:
            raise Disagreement(f"ranks report different gradient norms: {first.norms} and {other.norms}")
    full: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for place, value in (fragment for rank in ranks for fragment in rank.weights):
        target = full.setdefault(place.name, torch.full(place.shape, float("nan")))
        seen = filled.setdefault(place.name, torch.zeros(place.shape, dtype=torch.bool))
        for part, where in _parts(place, value):
            there, known = target[where], seen[where]
            if not torch.equal(there[known], part[known]):
                raise Disagreement(f"copies of {place.name} differ")
            there.copy_(part)
            known.fill_(True)
    for name, seen in filled.items():
        if not seen.all():
            raise Disagreement(f"no rank holds all of {name}")
    return Result(first.losses, first.norms, first.validation, full)


def differences(got: Result, want: Result) -> Differences:
    """Largest differences: absolute in losses and weights, relative in gradient norms."""
    missing = got.weights.keys() ^ want.weights.keys()
    if missing:
        raise Disagreement(f"only one of the two has {', '.join(sorted(missing))}")
    return Differences(
        [_gap(a - b) for a, b in zip([*got.losses, got.validation], [*want.losses, want.validation], strict=True)],
        [_gap((a - b) / b) for a, b in zip(got.norms, want.norms, strict=True)],
        {name: _gap(float((got.weights[name] - want.weights[name]).abs().max())) for name in want.weights},
    )


def _gap(difference: float) -> float:
    """Its size; infinite if it is no number, so that no bound admits it."""
    return abs(difference) if math.isfinite(difference) else math.inf


def _parts(place: Placement, value: Tensor) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """The pieces of a local tensor, each with where it belongs in the global one."""
    if place.dim is None:
        yield value, (slice(None),)
        return
    before, offset = (slice(None),) * place.dim, 0
    for start, stop in place.ranges:
        yield value.narrow(place.dim, offset, stop - start), (*before, slice(start, stop))
        offset += stop - start
