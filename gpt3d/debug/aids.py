"""What the trainer sees of the debugging aids: one object that stands around each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt3d.config.schema import RunConfig
from gpt3d.data import Batches, MicroBatch
from gpt3d.debug.fault import inject_fault
from gpt3d.debug.nonfinite import NonFiniteFinder
from gpt3d.debug.profile import Profile
from gpt3d.learner import Learner

LEARNED = 0.1  # a batch seen often enough must lose this much of its first loss; a sound model loses nearly all


class Aids:
    """On every rank; without a key of `debug` set it does nothing. `say` prints a line from rank 0."""

    def __init__(self, config: RunConfig, learner: Learner, run_dir: Path, say: Callable[[str], None]) -> None:
        self.debug, self.learner, self.say = config.debug, learner, say
        self.kept: list[MicroBatch] | None = None
        self.finder: NonFiniteFinder | None = None
        self.profile: Profile | None = None
        if self.debug.find_nan:
            self.finder = NonFiniteFinder(learner.engine.module, learner.layout, config.precision.dtype != "fp16")
            learner.executor.watches.append(self.finder)
        if self.debug.profile and learner.layout.rank in (self.debug.profile_ranks or [learner.layout.rank]):
            self.profile = Profile(self.debug, learner.layout, run_dir / "profile")
            learner.executor.watches.append(self.profile)

    def next(self, batches: Batches) -> list[MicroBatch]:
        """The next batch, or with `debug.repeat_batch` the first one again."""
        if self.kept is None or not self.debug.repeat_batch:
            self.kept = next(batches)
        else:
            batches.consumed_samples += batches.global_batch_size
            batches.wait_seconds = 0.0
        return self.kept

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around the optimizer step number `step` (from 0)."""
        inject_fault(self.debug, self.learner.layout.rank, step)
        if self.finder is not None:
            self.finder.step = step + 1
        if self.profile is not None:
            self.profile.begin_step()
        yield
        if self.profile is not None and (files := self.profile.end_step()):
            self.say(files)

    def verdict(self, first_loss: float | None, loss: float | None) -> str | None:
        """With `debug.repeat_batch`: whether the loss on the one batch went towards 0."""
        if not self.debug.repeat_batch or first_loss is None or loss is None:
            return None
        return overfit_verdict(first_loss, loss)


def overfit_verdict(first_loss: float, loss: float) -> str:
    """Whether a batch was learned by heart, in words."""
    fell = f"overfit loss on the one batch {first_loss:.4f} -> {loss:.4f}: "
    if loss < LEARNED * first_loss:
        return fell + "it is learned by heart, so forward, backward and optimizer work together"
    return fell + f"not below {LEARNED:.0%} of the first; more trainer.steps, another optimizer.lr, or a fault"
