"""When a run saves, and how it starts from a checkpoint: what the trainer's loop sees of all this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpt3d.checkpoint import folder, settings
from gpt3d.checkpoint.blocks import CorruptCheckpoint
from gpt3d.checkpoint.checkpointer import Checkpointer
from gpt3d.checkpoint.lock import RunLock
from gpt3d.checkpoint.planner import CheckpointError
from gpt3d.checkpoint.signals import SAVE_AND_END, SaveSignals
from gpt3d.config.schema import RunConfig
from gpt3d.launch.rundir import describe_environment
from gpt3d.learner import Learner
from gpt3d.zero.fragments import optimizer_state

Progress = Callable[[], Mapping[str, Any]]  # the trainer's counters, as `Checkpointer.save` wants them; collective


class RunCheckpoints:
    """The checkpoints of one run, in `run_dir/checkpoints`. All ranks call the same methods in the same order."""

    def __init__(
        self, config: RunConfig, learner: Learner, data: Mapping[str, str], run_dir: Path, say: Callable[[str], None]
    ) -> None:
        self.config, self.options, self.learner, self.say = config, config.checkpoint, learner, say
        optimizer = optimizer_state(learner.engine)
        self.files = Checkpointer(config, learner.layout, optimizer, run_dir / "checkpoints", say)
        self.files.data = data
        learner.before_update = self.files.before_update
        self.enabled = self.options.interval > 0 or self.options.final
        self.signals = SaveSignals(self.options.on_signal)
        self.lock = RunLock(run_dir) if config.run_dir else None
        if self.files.together.is_main:
            self.files.environment = describe_environment()

    def resume(self) -> dict[str, Any] | None:
        """Restore what `checkpoint.resume` names; the progress saved with it, or None when the run starts afresh.

        Raises ConfigError or CheckpointError, the same on all ranks.
        """
        wanted = self.options.resume
        found, notes = self.files.together.main_decides(self._begin)
        if not found and self.config.init_from is not None:
            self.files.begin_with(Path(self.config.init_from))
            self.learner.check_copies()
            self.say(f"starting from the weights in {self.config.init_from}")
            return None
        if not found:
            if wanted == "auto":
                new = f"no checkpoint in {self.files.root} yet: starting from the initial weights"
                self.say("\n".join([*notes, new]))
            return None
        path, state = self.files.load(found, own=wanted == "auto")
        self.learner.check_copies()
        progress: dict[str, Any] = state["progress"]
        self.files.saved = path.name if wanted == "auto" else None
        self.say("\n".join([f"resuming after step {progress['step']:,} from {path}", *notes]))
        return progress

    def _begin(self) -> tuple[list[Path], list[str]]:
        """On rank 0: make the folder this run's own; the checkpoints to try, and what is to be said of them."""
        if self.lock is not None:
            self.lock.take()
        folder.sweep(self.files.root)
        found = settings.candidates(self.config)
        if not found:
            settings.check_initial(self.config)
            return [], [
                f"WARNING: {path} is passed over: it has no {folder.MARK} file, so it is not whole"
                for path in folder.unmarked(self.files.root)
            ]
        for path in found:
            try:
                state = folder.read_state(path)
            except CorruptCheckpoint:
                continue  # loading will say so
            changes = settings.check_settings(self.config, state, path)
            changes += settings.check_data(self.config, state, self.files.data, path)
            return found, [f"  {change}" for change in changes]
        raise CheckpointError(f"none of the {len(found)} checkpoints at {found[0].parent} can be read; see "
                              f"python -m gpt3d.checkpoint verify {found[0].parent}")  # fmt: skip

    def __enter__(self) -> RunCheckpoints:
        self.signals.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.signals.__exit__(*error)

    def after_step(self, step: int, progress: Progress) -> None:
        """Save if it is time or a signal asks for it; ends the process (SystemExit 143) after SIGTERM."""
        self.files.poll()
        wanted = self.signals.agreed(self.learner.layout)
        if wanted or (self.options.interval and step % self.options.interval == 0):
            self._save(step, progress, wait=wanted == SAVE_AND_END)
        if wanted == SAVE_AND_END:
            self.files.close()
            self.say(f"stopped by SIGTERM after step {step:,}; checkpoint: {self.files.root / folder.step_name(step)}")
            raise SystemExit(143)

    def at_end(self, step: int, progress: Progress) -> None:
        """The final save. Raises SaveFailed: the run's result would be lost without a word."""
        if self.options.final:
            self._save(step, progress, wait=True)
            self.say(f"saved   {self.files.root / folder.step_name(step)}")
        self.files.close()

    def at_stop(self, step: int, progress: Progress) -> None:
        """Training cannot go on (diverged): keep the state for study, under a name that `resume=auto` passes over."""
        if self.enabled:
            name = f"stopped-{folder.step_name(step)}"
            self.files.save(progress(), name=name)
            self.files.close()
            if self.files.saved == name:
                self.say(f"the state at the stop: {self.files.root / name}")

    def _save(self, step: int, progress: Progress, wait: bool) -> None:
        self.files.finish()  # what a save in the background has come to
        if self.files.saved != folder.step_name(step):
            self.files.save(progress(), wait=wait)
