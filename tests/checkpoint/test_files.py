"""Files on disk: damage is found and named, an unfinished checkpoint is never taken, old ones go in a safe order."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt3d.checkpoint import folder
from gpt3d.checkpoint.__main__ import main
from gpt3d.checkpoint.blocks import BLOCK, CorruptCheckpoint, FileSums, VerifiedFile, write_file
from gpt3d.checkpoint.folder import commit, committed, read_state, retain, step_name, sweep
from gpt3d.checkpoint.planner import CheckpointError, PieceLoadPlanner, Pieces, PieceSavePlanner
from gpt3d.checkpoint.reader import SavedTensors
from gpt3d.checkpoint.state import HostCopy, owned_state
from gpt3d.checkpoint.storage import RawReader
from gpt3d.verification.cases import Case
from tests.checkpoint import simulated

CASE = Case(tp=2, dp=2, zero=2)
TEXTS = {
    folder.STATE: '{"format": 1, "config": {}, "progress": {}, "optimizer": {}, "data": {}}\n',
    folder.SUMMARY: "tiny\n",
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    simulated.save(CASE, root / ".tmp-1")
    commit(root / ".tmp-1", root / step_name(1), TEXTS)
    return root / step_name(1)


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / original.name)
    return tmp_path / original.name


def load_all(path: Path) -> None:
    read_state(path)
    simulated.load(CASE, path)


def test_every_flipped_bit_is_found(checkpoint: Path) -> None:
    draw = random.Random(1)
    files = sorted(checkpoint.iterdir())
    for trial in range(80):
        path = files[trial % len(files)]
        data = bytearray(path.read_bytes())
        where, bit = draw.randrange(len(data)), draw.randrange(8)
        good = bytes(data)
        data[where] ^= 1 << bit
        if path.name == folder.MARK and data.decode(errors="replace").lower() == good.decode():
            continue  # a hexadecimal digit in upper case says the same
        path.write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match=path.name):
            load_all(checkpoint)
        path.write_bytes(good)
    load_all(checkpoint)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_named(checkpoint: Path, share: float) -> None:
    path = checkpoint / "rank00001.bin"
    size = path.stat().st_size
    os.truncate(path, int(size * share))
    with pytest.raises(CorruptCheckpoint, match=rf"rank00001\.bin has .* bytes, {size:,} were written"):
        load_all(checkpoint)


def test_a_missing_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "rank00002.bin").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"rank00002\.bin is missing"):
        load_all(checkpoint)


def test_the_command_names_damage_and_differences(
    checkpoint: Path, original: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(original.parent)]) == 0 and "whole" in capsys.readouterr().out
    assert main(["diff", str(checkpoint), str(original)]) == 0 and "0 of" in capsys.readouterr().out
    assert main(["show", str(original), "--tensors"]) == 0
    assert "exp_avg_sq/layers.3.attention.qkv.weight" in capsys.readouterr().out
    with open(checkpoint / "rank00003.bin", "r+b") as file:
        file.write(b"\xff")
    assert main(["verify", str(checkpoint)]) == 1 and "rank00003.bin is damaged" in capsys.readouterr().out
    assert main(["show", str(checkpoint.parent / "nothing")]) == 2 and "no such folder" in capsys.readouterr().err


def test_blocks_are_checked_where_they_are_read(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 5 * BLOCK // 2, dtype=np.uint8)
    sums = write_file(tmp_path / "f", [memoryview(data[:700]), memoryview(data[700:])])
    assert len(sums.sums) == 3 and sums.size == len(data)
    data[2 * BLOCK + 5] ^= 1
    (tmp_path / "f").write_bytes(data.tobytes())
    file = VerifiedFile(tmp_path / "f", sums)
    assert bytes(file.read(BLOCK - 3, 6)) == data[BLOCK - 3 : BLOCK + 3].tobytes()
    with pytest.raises(CorruptCheckpoint, match="MiB 2"):
        file.read(2 * BLOCK - 1, 2)
    VerifiedFile(tmp_path / "f", sums, every=0).check_all()
    VerifiedFile(tmp_path / "f", sums, every=16).check_all()  # block 0 alone
    with pytest.raises(CorruptCheckpoint, match="ends before"):
        VerifiedFile(tmp_path / "f", FileSums(sums.size, sums.sums)).read(sums.size - 1, 2)


def test_whole_tensors_without_torch(original: Path) -> None:
    saved = SavedTensors(original)
    for key in saved.tensors:
        assert np.array_equal(saved.read(key), simulated.truth(key, saved.shape(key)).numpy())


def test_only_exact_names_with_a_mark_count(checkpoint: Path) -> None:
    root = checkpoint.parent
    for name in (
        "step-00000002.backup",
        "step-2",
        ".tmp-step-00000003-x",
        ".del-step-00000004",
        "stopped-step-00000005",
    ):
        shutil.copytree(checkpoint, root / name)
    shutil.copytree(checkpoint, root / step_name(6))
    (root / step_name(6) / folder.MARK).unlink()
    assert committed(root) == [checkpoint]
    with pytest.raises(CorruptCheckpoint, match="incomplete"):
        read_state(root / step_name(6))
    sweep(root)
    assert not list(root.glob(".*")) and (root / "step-00000002.backup").is_dir()


def test_retention(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8, 10):
        (tmp_path / step_name(step)).mkdir()
        (tmp_path / step_name(step) / folder.MARK).touch()
    (tmp_path / step_name(3)).mkdir()  # no mark: not ours to remove
    retain(tmp_path, keep_last=2, keep_every=4)
    assert sorted(p.name for p in tmp_path.iterdir()) == [step_name(n) for n in (3, 4, 8, 10)]


def test_a_folder_that_has_the_name_is_kept(checkpoint: Path) -> None:
    root = checkpoint.parent
    shutil.copytree(checkpoint, root / ".tmp-again")
    for name in (folder.MARK, *TEXTS):
        (root / ".tmp-again" / name).unlink()
    commit(root / ".tmp-again", checkpoint, TEXTS)
    assert (root / "replaced-step-00000001" / folder.MARK).is_file()
    load_all(checkpoint)


def test_killed_at_any_moment_a_whole_checkpoint_is_left(tmp_path: Path) -> None:
    """A process that saves without pause is killed 12 times; what has a final name is always whole."""
    draw = random.Random(5)
    case, step = Case(zero=0), 0
    for _ in range(12):
        child = os.fork()
        if child == 0:
            while True:
                step += 1
                simulated.save(case, tmp_path / f".tmp-{step}")
                commit(tmp_path / f".tmp-{step}", tmp_path / step_name(step), TEXTS)
                retain(tmp_path, 2, 0)
        while not committed(tmp_path):
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = committed(tmp_path)
        for path in found:
            read_state(path)
            assert list(SavedTensors(path).damages()) == []
        step = folder.step_of(found[0]) or 0
        sweep(tmp_path)
    assert step > 2


def test_gaps_and_overlaps_are_refused(tmp_path: Path) -> None:
    """Saving part of a tensor, or loading what is only partly there, is never silent."""
    states = simulated.ranks(CASE)
    planners = []
    for state in states[1:]:
        planners.append(PieceSavePlanner())
        planners[-1].set_up_planner(owned_state(state, CASE.config().model))
    with pytest.raises(RuntimeError, match="would write"):
        planners[0].create_global_plan([p.create_local_plan() for p in planners])
    with pytest.raises(RuntimeError, match="would write"):
        planners[0].create_global_plan([p.create_local_plan() for p in [*planners, *planners]])


def test_another_model_is_refused_by_name(original: Path) -> None:
    metadata = RawReader(original).read_metadata()
    for key, shape, message in [
        ("weights/nothing", (4,), "has no weights/nothing"),
        ("weights/final_norm.weight", (64,), r"shape \[32\] in the checkpoint and \[64\]"),
    ]:
        planner = PieceLoadPlanner()
        planner.set_up_planner({key: Pieces(shape)}, metadata)
        with pytest.raises(CheckpointError, match=message):
            planner.create_local_plan()
    metadata.state_dict_metadata["weights/final_norm.weight"].chunks.pop()  # type: ignore[union-attr]
    planner = PieceLoadPlanner()
    planner.set_up_planner(simulated.held_state(simulated.ranks(Case())[0], CASE.config().model), metadata)
    with pytest.raises(CheckpointError, match=r"of the .* elements wanted of weights/final_norm"):
        planner.create_local_plan()


def test_the_host_copy_is_a_copy_and_is_reused() -> None:
    state = owned_state(simulated.ranks(Case(zero=0))[0], Case().config().model)
    for pieces in state.values():
        for part in pieces.parts:
            part.values.fill_(1.0)
    host = HostCopy()
    copied = host.begin(state)

    def update() -> None:
        host.before_update()
        for pieces in state.values():
            for part in pieces.parts:
                part.values.fill_(2.0)

    training = threading.Thread(target=update)
    training.start()
    training.join(0.2)
    assert training.is_alive(), "an update began before the copy was whole"
    host.complete()
    training.join(10)
    assert not training.is_alive()
    assert all(torch.all(part.values == 1.0) for pieces in copied.values() for part in pieces.parts)
    memory = host.buffer.data_ptr()
    host.begin(state)
    host.complete()
    assert host.buffer.data_ptr() == memory
