"""What a rank of a test does: build a learner for a config, cut a global batch into its rows, take steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt3d.config.schema import RunConfig
from gpt3d.learner import Learner, Rows
from gpt3d.parallel.layout import Layout, Sizes, create_layout
from gpt3d.parallel.placement import Placement

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Step:
    """One step as all ranks should see it; `loss` is the mean over valid targets (0 without any)."""

    loss: float
    norm: float
    skipped: bool
    scale: float


def new_learner(config: RunConfig) -> Learner:
    p = config.parallel
    layout = create_layout(
        Sizes(p.tp, p.cp, p.dp or 1, p.pp),
        torch.device("cpu"),
        sequence_parallel=p.sequence_parallel,
        num_kv_heads=config.model.num_kv_heads,
    )
    return Learner(config, layout)


def own_rows(layout: Layout, batch: Batch, micro: int, first: int = 0) -> list[Rows]:
    """This replica's microbatches of a global batch whose first row is number `first` of the run."""
    tokens, labels = batch
    own = len(tokens) // layout.sizes.dp
    mine = range(layout.at.dp * own, (layout.at.dp + 1) * own, micro)
    return [Rows(tokens[i : i + micro], labels[i : i + micro], first + i) for i in mine]


def take_steps(learner: Learner, config: RunConfig, batches: Iterable[Batch]) -> list[Step]:
    steps, first = [], 0
    for batch in batches:
        outcome = learner.step(own_rows(learner.layout, batch, config.trainer.micro_batch_size, first), 1e-3)
        loss = learner.total(outcome.loss_sum) / max(1, outcome.tokens)
        steps.append(Step(loss, outcome.grad_norm, outcome.skipped, learner.engine.loss_scale))
        first += len(batch[0])
    return steps


def masters(learner: Learner) -> list[tuple[Placement, Tensor]]:
    return [(place, value.clone()) for place, value in learner.engine.master_weights()]


def allow_fp16_on_cpu() -> None:
    """DeepSpeed refuses fp16 where matrix units lack it; torch's kernels have it, slowly, which is enough here."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
