"""What a real rank allocates in a step: the dry run's tracker on a training rank with numbers."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from gpt3d.config.schema import RunConfig
from gpt3d.dryrun.tracker import Tracker
from gpt3d.learner import Learner, Rows
from gpt3d.parallel.layout import Layout


@dataclass(frozen=True)
class Measured:
    """Bytes of live tensors on this rank: between two steps, and by kind when they are most within one."""

    parameters: int
    between: int
    memory: dict[str, int]

    @property
    def peak(self) -> int:
        return sum(self.memory.values())


def measure_step(config: RunConfig, layout: Layout) -> Measured:
    """Train two steps on made-up rows and watch the second. Every rank of an initialised world calls this alike.

    Counted are distinct storages that operations make, whoever holds them; not what a backend allocates for itself.
    """
    tracker, t = Tracker(layout.device.type), config.trainer
    with tracker, saved_tensors_hooks(tracker.saved, lambda x: x):
        learner = Learner(config, layout)
        rows = [_rows(config, index) for index in range(t.global_batch_size // layout.dp.size // t.micro_batch_size)]
        learner.step(rows, 1e-4)
        gc.collect()  # what DeepSpeed leaves in reference cycles when it starts
        for kind in ("activations", "messages", "logits", "work"):
            tracker.rename(kind, "state")
        between = tracker.total
        local = config.model.padded_vocab_size // layout.tp.size
        tracker.logits = (t.micro_batch_size * config.data.seq_len * local, local)
        tracker.start_peak()
        learner.step(rows, 1e-4)
    count = sum(getattr(p, "ds_numel", p.numel()) for p in learner.engine.module.parameters())
    return Measured(count, between, {kind: size for kind, size in tracker.at_peak.items() if size})


def _rows(config: RunConfig, index: int) -> Rows:
    shape = (config.trainer.micro_batch_size, config.data.seq_len)
    tokens = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(index))
    return Rows(tokens, tokens.clone(), index * config.trainer.micro_batch_size)
