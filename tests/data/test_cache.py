"""The cache: built once by whoever comes first, whatever happens to the others."""

import multiprocessing as mp
import os
import signal
import time
from pathlib import Path

import pytest

from gpt3d.config.schema import DataConfig, RunConfig, TokenizerConfig
from gpt3d.data import DataError, prepare
from gpt3d.data.cache import build_once, cache_root, read_manifest


def _race(folder: Path, barrier: object, results: object, hold: float) -> None:
    def build(target: Path) -> dict:
        results.put(("built", os.getpid()))  # type: ignore[attr-defined]
        (target / "part").write_text("half")
        time.sleep(hold)
        (target / "part").write_text("whole")
        return {"by": os.getpid()}

    barrier.wait()  # type: ignore[attr-defined]
    manifest = build_once(folder, build)
    results.put(("saw", manifest["by"], (folder / "part").read_text()))  # type: ignore[attr-defined]


def test_many_processes_build_once(tmp_path: Path):
    """huggingface/trl#7223, huggingface/datasets#6060: every rank prepared, the losers died."""
    context = mp.get_context("fork")
    for repeat in range(5):
        barrier, results = context.Barrier(4), context.Queue()
        ranks = [context.Process(target=_race, args=(tmp_path / str(repeat), barrier, results, 0.02)) for _ in range(4)]
        for rank in ranks:
            rank.start()
        messages = [results.get(timeout=20) for _ in range(5)]
        for rank in ranks:
            rank.join(20)
        assert [rank.exitcode for rank in ranks] == [0] * 4
        assert sum(message[0] == "built" for message in messages) == 1
        assert len({message[1:] for message in messages if message[0] == "saw"}) == 1


def test_a_killed_builder_leaves_nothing_that_is_taken_for_a_result(tmp_path: Path):
    context = mp.get_context("fork")
    barrier, results = context.Barrier(1), context.Queue()
    builder = context.Process(target=_race, args=(tmp_path / "c", barrier, results, 60.0))
    builder.start()
    assert results.get(timeout=20)[0] == "built"
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    builder.join(20)
    assert read_manifest(tmp_path / "c") is None and list(tmp_path.glob("c.tmp-*"))

    def build(target: Path) -> dict:
        return {"by": "another"}

    assert build_once(tmp_path / "c", build) == {"by": "another"}
    assert not list(tmp_path.glob("c.tmp-*"))


def test_a_failing_builder_leaves_nothing(tmp_path: Path):
    def build(target: Path) -> dict:
        (target / "half").write_text("x")
        raise DataError("no text")

    with pytest.raises(DataError, match="no text"):
        build_once(tmp_path / "c", build)
    assert [path.name for path in tmp_path.iterdir()] == ["c.lock"]


def test_a_cache_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        config = DataConfig(source="shakespeare", seq_len=8, cache_dir=str(tmp_path / "file" / "cache"))
        prepare(RunConfig(data=config, tokenizer=TokenizerConfig(kind="bytes")))


def test_cache_root_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root(None) == tmp_path / "gpt3d"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root(None) == tmp_path / ".cache" / "gpt3d"
    assert cache_root("~/elsewhere") == tmp_path / "elsewhere"
