"""Saves and restores a run: plans once, copies to host memory, writes in the background, commits, falls back."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from gpt3d.checkpoint import document, folder, settings
from gpt3d.checkpoint.blocks import SAMPLED, CorruptCheckpoint
from gpt3d.checkpoint.initial import load_initial
from gpt3d.checkpoint.planner import CheckpointError, PieceLoadPlanner, PieceSavePlanner, State
from gpt3d.checkpoint.state import HostCopy, held_state, owned_state
from gpt3d.checkpoint.storage import RawReader, RawWriter
from gpt3d.checkpoint.together import Together
from gpt3d.config.problems import ConfigError
from gpt3d.config.schema import RunConfig
from gpt3d.parallel.layout import Layout
from gpt3d.zero.fragments import OptimizerState, read_scaler, write_scaler

EVERY = {"full": 1, "sample": SAMPLED, "off": 0}  # of how many MiB one is verified


class SaveFailed(RuntimeError):
    """A checkpoint could not be written (disk full, folder gone); earlier ones are untouched. Equal on all ranks."""

    show_traceback = False


class Failure(NamedTuple):
    """An error on some rank, in words; `storage`: the disk's fault, not the program's."""

    text: str
    storage: bool


class Checkpointer:
    """One rank's part; all ranks construct it and call the same methods in the same order.

    `root` is the folder of this run's checkpoints; `say` prints a line on rank 0.
    """

    def __init__(
        self, config: RunConfig, layout: Layout, optimizer: OptimizerState, root: Path,
        say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        self.config, self.layout, self.root, self.say = config, layout, root, say
        self.optimizer = optimizer
        self.together = Together()
        self.token = self.together.from_main(uuid.uuid4().hex[:8])
        self.host = HostCopy()
        self.plan: tuple[SavePlan, Metadata] | None = None
        self.parameters: int | None = None
        self.settings = settings.plain(config)
        self.environment: Mapping[str, Any] = {}
        self.data: Mapping[str, str] = {}
        self.writer = ThreadPoolExecutor(1, "gpt3d-checkpoint")
        self.pending: Future[None] | None = None
        self.saved: str | None = None  # the folder that was committed last

    # -- saving

    def save(self, progress: Mapping[str, Any], *, name: str | None = None, wait: bool = False) -> None:
        """Save now. In the background unless `wait` or `checkpoint.background=false`: see `before_update` then.

        `progress`: what the trainer needs to go on, with at least step, consumed_samples, consumed_tokens, seconds.
        A save that is still running is waited for first. With `wait` raises SaveFailed; else that becomes a warning.
        """
        self.finish()
        state = owned_state(self.optimizer, self.config.model)
        described = self._describe(progress, state)
        name = name or folder.step_name(progress["step"])
        if self.config.checkpoint.background and not wait:
            self.pending = self.writer.submit(self._write_copy, self.host.begin(state), name, described)
            return
        try:
            self._write(state, name, described)
        except SaveFailed as failure:
            if wait:
                raise
            self._warn(failure)

    def before_update(self) -> None:
        """To be called before each optimizer step: waits until a save in the background has copied what it writes."""
        self.host.before_update()

    def poll(self) -> None:
        """At every step: raise what went wrong in the background; a full disk is a warning, training goes on."""
        if self.pending is not None and self.pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save in the background, if there is one; errors as in `poll`."""
        pending, self.pending = self.pending, None
        if pending is not None:
            try:
                pending.result()
            except SaveFailed as failure:
                self._warn(failure)

    def _warn(self, failure: SaveFailed) -> None:
        self.say(
            f"WARNING: NO CHECKPOINT WAS WRITTEN: {failure}\n         Training goes on; the next one is tried as usual"
        )

    def _write_copy(self, state: State, name: str, described: Mapping[str, Any]) -> None:
        self.host.complete()
        self._write(state, name, described)

    def _write(self, state: State, name: str, described: Mapping[str, Any]) -> None:
        """All ranks together, possibly in a thread: write, agree that all is well, commit. Raises SaveFailed."""
        temporary = self.root / f"{folder.TEMPORARY}{name}-{self.token}"
        planner, writer = PieceSavePlanner(), RawWriter(temporary)
        planner.set_up_planner(state)
        plan, metadata = self._planned(planner, writer)
        results, failure = None, None
        try:
            results = writer.write_data(plan, planner).wait()
        except Exception as error:
            failure = _failure(error, self.together.rank, temporary)
        everybody = self.together.to_main((results, failure))

        def commit() -> Failure | None:
            try:
                if failed := next((f for _, f in everybody if f is not None), None):
                    return failed
                writer.finish(metadata, [r for r, _ in everybody if r is not None])
                texts = {folder.STATE: document.to_json(described), folder.SUMMARY: document.summary(described)}
                folder.commit(temporary, self.root / name, texts)
                return None
            except Exception as error:
                return _failure(error, 0, temporary)

        failure = self.together.main_decides(commit)
        if self.together.is_main:
            self._clean_up(temporary, keep=failure is None)
        if failure is None:
            self.saved = name
        else:
            if failure.storage:
                raise SaveFailed(failure.text)
            raise RuntimeError(f"saving the checkpoint {name} failed: {failure.text}")

    def _clean_up(self, temporary: Path, keep: bool) -> None:
        """Rank 0, after the commit or the failure: the remains of the failure, or checkpoints that are too many."""
        c = self.config.checkpoint
        try:
            if keep:
                folder.retain(self.root, c.keep_last, c.keep_every)
            else:
                shutil.rmtree(temporary, ignore_errors=True)
        except OSError as error:
            self.say(f"WARNING: an old checkpoint could not be removed: {error}")

    def _planned(self, planner: PieceSavePlanner, writer: RawWriter) -> tuple[SavePlan, Metadata]:
        """Who writes what: agreed on at the first save, the same ever after, because the layout is."""
        if self.plan is None:
            local = self.together.to_main(planner.create_local_plan())

            def decide() -> tuple[list[SavePlan], Metadata]:
                plans, metadata = planner.create_global_plan(local)
                return writer.prepare_global_plan(plans), metadata

            plans, metadata = decide() if self.together.is_main else ([], Metadata({}))
            self.plan = (self.together.share(plans), metadata)
        return self.plan

    def _describe(self, progress: Mapping[str, Any], state: State) -> dict[str, Any]:
        if self.parameters is None:  # counted once: the layout does not change
            own = sum(pieces.numel for key, pieces in state.items() if key.startswith("weights/"))
            self.parameters = sum(self.together.gather(own))
        sizes = self.layout.sizes
        return document.describe(
            self.settings,
            progress,
            {"steps": self.optimizer.steps, "scaler": read_scaler(self.optimizer.scaler)},
            self.data,
            {"tp": sizes.tp, "cp": sizes.cp, "dp": sizes.dp, "pp": sizes.pp, "zero": self.config.zero.stage},
            self.environment,
            {"parameters": self.parameters, "bytes": 12 * self.parameters},
        )

    # -- loading

    def load(self, found: Sequence[Path], own: bool = False) -> tuple[Path, dict[str, Any]]:
        """Restore the first of `found` that verifies; its folder and state. Raises CheckpointError if none does.

        `own`: they are this run's, so damaged ones are renamed out of the way.
        """
        for at, path in enumerate(found):
            failure, state = self._read(path)
            failures = [f for f in self.together.gather(failure) if f is not None]
            if not failures:
                self.optimizer.adopt(state["optimizer"]["steps"])
                write_scaler(self.optimizer.scaler, state["optimizer"]["scaler"])
                return path, state
            if not all(f.storage for f in failures) or at + 1 == len(found):
                raise CheckpointError(failures[0].text)
            self.say(f"WARNING: {failures[0].text}\n         Falling back to {found[at + 1]}")
            if own and self.together.is_main:
                folder.set_aside(path)
        raise CheckpointError("no checkpoint to load")

    def begin_with(self, path: Path) -> None:
        """The weights at `path` (see initial.py) and an optimizer that has done nothing. Raises CheckpointError."""
        failure = None
        try:
            load_initial(path, held_state(self.optimizer, self.config.model), self.config.model)
        except (OSError, CorruptCheckpoint, CheckpointError) as error:
            failure = str(error)
        if failed := next((f for f in self.together.gather(failure) if f is not None), None):
            raise CheckpointError(f"init_from={path}: {failed}")
        self.optimizer.adopt(0)

    def _read(self, path: Path) -> tuple[Failure | None, dict[str, Any]]:
        try:
            state = folder.read_state(path)
            reader = RawReader(path, EVERY[self.config.checkpoint.verify])
            planner = PieceLoadPlanner()
            planner.set_up_planner(held_state(self.optimizer, self.config.model), reader.read_metadata())
            reader.read_data(planner.create_local_plan(), planner)
            return None, state
        except ConfigError as error:  # of a format that this version does not know
            return Failure(str(error), False), {}
        except CheckpointError as error:
            return Failure(f"{path}: {error}", False), {}
        except (OSError, json.JSONDecodeError, CorruptCheckpoint) as error:
            return Failure(f"{path} cannot be loaded: {error}", True), {}

    def close(self) -> None:
        """Wait for the last save and end the thread."""
        self.finish()
        self.writer.shutdown()


def _failure(error: Exception, rank: int, folder: Path) -> Failure:
    storage = isinstance(error, OSError | CorruptCheckpoint)
    where = f"{folder}: " if isinstance(error, OSError) and error.filename is None else ""  # a full disk names none
    return Failure(f"rank {rank}: {where}{error if storage else repr(error)}", storage)
