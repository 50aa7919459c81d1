"""Training in pieces, on ranks: save, go on, restore into fresh engines, go on again."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt3d.checkpoint.checkpointer import Checkpointer
from gpt3d.checkpoint.folder import committed
from gpt3d.checkpoint.state import held_state
from gpt3d.config.schema import RunConfig
from gpt3d.learner import Learner, Rows
from gpt3d.parallel import device
from gpt3d.parallel.layout import Sizes, create_layout
from gpt3d.verification.cases import Case
from gpt3d.verification.compare import batch
from gpt3d.zero.fragments import optimizer_state

Losses = list[tuple[float, float]]


def with_dropout(case: Case) -> RunConfig:
    """The case with dropout everywhere, and half the layers where numbers are slow."""
    config = case.config()
    layers = 2 if case.dtype == "bf16" else config.model.num_layers
    model = dataclasses.replace(config.model, hidden_dropout=0.2, attention_dropout=0.1, num_layers=layers)
    return dataclasses.replace(config, model=model)


class Run:
    """One rank of a training whose steps are a function of their number."""

    def __init__(self, config: RunConfig, root: Path, scrambled: bool = False) -> None:
        p = config.parallel
        layout = create_layout(
            Sizes(p.tp, p.cp, p.dp or 1, p.pp), device.select(int(os.environ["LOCAL_RANK"]), "cpu").torch_device,
            sequence_parallel=p.sequence_parallel, num_kv_heads=config.model.num_kv_heads,
        )  # fmt: skip
        self.config = config
        self.learner = Learner(dataclasses.replace(config, seed=99) if scrambled else config, layout)
        self.learner.seed = config.seed  # of dropout
        self.files = Checkpointer(config, layout, optimizer_state(self.learner.engine), root)
        self.learner.before_update = self.files.before_update

    def steps(self, first: int, stop: int) -> Losses:
        """Losses and gradient norms."""
        found = []
        for step in range(first, stop):
            outcome = self.learner.step(self._rows(step), 1e-3 * (1 + step))
            found.append((self.learner.total(outcome.loss_sum) / outcome.tokens, outcome.grad_norm))
        return found

    def _rows(self, step: int) -> list[Rows]:
        layout, micro = self.learner.layout, self.config.trainer.micro_batch_size
        tokens, labels = batch(step)
        own = len(tokens) // layout.dp.size
        mine = range(layout.at.dp * own, (layout.at.dp + 1) * own, micro)
        return [Rows(tokens[i : i + micro], labels[i : i + micro], step * len(tokens) + i) for i in mine]

    def save(self, step: int) -> None:
        progress = {"step": step, "consumed_samples": 8 * step, "consumed_tokens": 128 * step, "seconds": 1.0}
        self.files.save(progress)

    def load(self) -> int:
        """Restore the newest; the step it was saved at."""
        step: int = self.files.load(committed(self.files.root))[1]["progress"]["step"]
        self.learner.check_copies()
        return step

    def numbers(self) -> list[Tensor]:
        """A copy of all that training has changed on this rank: weights, moments, and the weights that forward uses."""
        state = held_state(self.files.optimizer, self.config.model)
        parts = [part.values for _, pieces in sorted(state.items()) for part in pieces.parts]
        held = [value for _, value in self.learner.engine.held_weights()]
        return [t.clone() for t in parts] + [v.clone() for v in held if v.numel()]


def interrupted_twice(configs: Sequence[RunConfig], root: str) -> None:
    """Five steps in one go, and in three pieces by three sets of engines: the same bits in everything."""
    for number, config in enumerate(configs):
        folder = Path(root) / str(number)
        whole = Run(config, folder)
        losses = whole.steps(0, 2)
        whole.save(2)
        losses += whole.steps(2, 5)  # while the background writes
        whole.files.close()
        second = Run(config, folder, scrambled=True)
        assert second.load() == 2
        assert second.steps(2, 3) == losses[2:3]
        second.save(3)
        second.files.finish()
        third = Run(config, folder, scrambled=True)
        assert third.load() == 3
        assert third.steps(3, 5) == losses[3:]
        assert third.files.optimizer.steps == whole.files.optimizer.steps == 5
        same = [torch.equal(a, b) for a, b in zip(third.numbers(), whole.numbers(), strict=True)]
        assert all(same), f"{same.count(False)} of {len(same)} tensors differ: zero {config.zero.stage}"


def begin(config: RunConfig, root: str) -> Losses:
    """Two steps, a checkpoint, two more."""
    run = Run(config, Path(root))
    losses = run.steps(0, 2)
    run.save(2)
    losses += run.steps(2, 4)
    run.files.close()
    return losses


def go_on(config: RunConfig, root: str) -> tuple[Losses, Any]:
    """From the checkpoint to step 4; and the master weights."""
    run = Run(config, Path(root), scrambled=True)
    assert run.load() == 2
    losses = run.steps(2, 4)
    return losses, [(place, w.clone()) for place, w in run.learner.engine.master_weights()]
