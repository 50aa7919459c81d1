"""Saves that cannot be written, checkpoints that are damaged, errors in the background: said aloud, nothing lost."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpt3d.checkpoint import folder
from gpt3d.checkpoint.checkpointer import SaveFailed
from gpt3d.checkpoint.planner import CheckpointError, PieceSavePlanner
from gpt3d.checkpoint.reader import SavedTensors
from gpt3d.launch import RankFailed
from gpt3d.verification.cases import Case
from tests.checkpoint.resuming import Run

World = Callable[..., list[Any]]
CASE = Case(dp=2, zero=1)


def whole(root: Path) -> list[int | None]:
    """Steps of the committed checkpoints, after checking every byte of them."""
    found = folder.committed(root)
    assert [list(SavedTensors(path).damages()) for path in found] == [[]] * len(found)
    return [folder.step_of(path) for path in found]


def disk_fills_up(root: str) -> None:
    """Rank 1 can write no byte more: a warning, training goes on; with room again the next save succeeds."""
    run, said = Run(CASE.config(), Path(root)), []
    run.files.say = said.append
    run.steps(0, 1)
    run.save(1)
    run.files.finish()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    run.steps(1, 2)
    run.save(2)
    run.files.finish()
    with pytest.raises(SaveFailed, match=r"rank 1: .*File too large"):
        run.files.save(run_progress(3), wait=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(said) == 1 and "NO CHECKPOINT WAS WRITTEN" in said[0] and "File too large" in said[0]
    run.files.together.gather(None)
    assert whole(Path(root)) == [1] and not list(Path(root).glob(".*"))
    run.files.together.gather(None)  # the next save makes a hidden folder
    run.save(4)
    run.files.close()
    run.files.together.gather(None)
    assert whole(Path(root)) == [4, 1]


def run_progress(step: int) -> dict[str, Any]:
    return {"step": step, "consumed_samples": 8 * step, "consumed_tokens": 128 * step, "seconds": 1.0}


def test_a_full_disk_stops_nobody(world: World, tmp_path: Path) -> None:
    world(disk_fills_up, str(tmp_path), n=2)


def errors_surface(root: str) -> None:
    run, said = Run(Case().config(), Path(root) / "c"), []
    run.files.say = said.append
    (Path(root) / "c").write_text("in the way")  # the folder cannot be made
    run.save(1)
    run.files.finish()
    assert "Not a directory" in said[0] or "File exists" in said[0]
    (Path(root) / "c").unlink()

    def broken(self: Any, item: Any) -> Any:
        raise ValueError("a mistake in the program")

    right, PieceSavePlanner.resolve_data = PieceSavePlanner.resolve_data, broken  # type: ignore[method-assign]
    run.save(2)
    with pytest.raises(RuntimeError, match="a mistake in the program"):
        while True:  # the next steps
            run.files.poll()
    PieceSavePlanner.resolve_data = right  # type: ignore[method-assign]
    run.save(3)
    run.files.close()
    assert whole(Path(root) / "c") == [3]


def test_no_folder_is_a_warning_and_a_mistake_is_an_error_at_the_next_step(world: World, tmp_path: Path) -> None:
    world(errors_surface, str(tmp_path), n=1)


def falls_back(root: str) -> None:
    """The newest is damaged where only rank 1 reads, the one before is truncated: both ranks take the third."""
    path = Path(root)
    run = Run(CASE.config(), path)
    run.files.config.checkpoint.keep_last = 3
    losses = []
    for step in (1, 2, 3):
        losses += run.steps(step - 1, step)
        run.save(step)
    run.files.close()
    if run.files.together.is_main:
        with open(path / folder.step_name(3) / "rank00001.bin", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
        os.truncate(path / folder.step_name(2) / "index.json", 100)
    run.files.together.gather(None)
    again, said = Run(CASE.config(), path, scrambled=True), []
    again.files.say = said.append
    found = folder.committed(path)
    with pytest.raises(CheckpointError, match=r"rank00001\.bin is damaged"):
        again.files.load(found[:1])
    used, state = again.files.load(found, own=True)
    assert state["progress"]["step"] == 1 and used.name == folder.step_name(1)
    assert "rank00001.bin is damaged" in said[0] and "index.json is damaged" in said[1]
    again.files.together.gather(None)
    assert {p.name for p in path.iterdir()} == {
        folder.step_name(1), "damaged-step-00000002", "damaged-step-00000003",
    }  # fmt: skip
    assert again.steps(1, 3) == losses[1:]


def test_damaged_checkpoints_are_passed_over(world: World, tmp_path: Path) -> None:
    world(falls_back, str(tmp_path), n=2)


def test_what_counts_as_the_disk_s_fault() -> None:
    from gpt3d.checkpoint.checkpointer import _failure

    full = _failure(OSError(errno.ENOSPC, "No space left on device"), 3, Path("here"))
    assert full.storage and full.text.startswith("rank 3: here: ")
    assert not _failure(KeyError("x"), 3, Path("here")).storage


def test_the_last_save_never_fails_in_silence(world: World, tmp_path: Path) -> None:
    """The save of the last step is under way in the background when the run ends: its failure is the run's."""
    from tests.checkpoint.test_training import train

    (tmp_path / "checkpoints").write_text("in the way")
    brief = ["parallel=single", "trainer.steps=2", "checkpoint.interval=2", "trainer.eval_interval=0"]
    with pytest.raises(RankFailed, match=r"SaveFailed: rank 0: .*(File exists|Not a directory)"):
        world(train, brief, str(tmp_path), n=1)
