"""build_data: the embedded corpus end to end, the cache under attack, the split."""

import json
import multiprocessing as mp
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from gpt3d.config.schema import DataConfig, ModelConfig, RunConfig, TokenizerConfig
from gpt3d.data import Batches, DataError, TokenDataset, build_data, prepare, validation_batches
from gpt3d.data.cache import build_once, cache_root, read_manifest
from gpt3d.data.embedded import read_asset, shakespeare
from gpt3d.data.preparation import build_corpus, document_hash, split
from gpt3d.data.token_file import TokenFile
from gpt3d.data.tokenizer import load_tokenizer


def run_config(cache: Path, source: str = "shakespeare", kind: str = "shakespeare_bpe", **data: object) -> RunConfig:
    config = RunConfig(model=ModelConfig(vocab_size=2048))
    config.data = DataConfig(source=source, cache_dir=str(cache), **{"seq_len": 64, **data})
    config.tokenizer = TokenizerConfig(kind=kind)
    return config


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_embedded_corpus():
    plays = shakespeare()
    assert len(plays) == 38
    assert sum(len(play.encode()) for play in plays) == 4_987_034
    assert not any(mark in play for play in plays for mark in ("**", "##", "\\"))


def test_damaged_asset_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("gpt3d.data.embedded").data.embedded.SHA256, "shakespeare_bpe.json", "0" * 64)
    with pytest.raises(DataError, match="damaged"):
        read_asset("shakespeare_bpe.json")


def test_shakespeare_end_to_end(cache: Path):
    data = build_data(run_config(cache))
    assert isinstance(data.train, TokenDataset) and data.validation is not None
    train, held_out = data.train.file, data.validation.source
    assert isinstance(held_out, TokenFile)
    assert (len(train), len(held_out)) == (36, 2)
    assert train.tokens + held_out.tokens == 1_827_318 + 38, "each end of document is counted"
    assert (data.largest_id, data.tokenizer.vocab_size) == (2047, 2048)
    assert data.unigram_entropy == pytest.approx(6.1159, abs=1e-3)
    text = data.tokenizer.decode(held_out.read(0, held_out.tokens))
    assert [document + "" for document in text.split("<|endoftext|>")[:-1]] == [p for p in shakespeare() if p in text]
    batch = next(Batches(data.train, 4, 2, 0, 1))
    assert int(batch[0]["tokens"].max()) <= data.largest_id
    assert sum(1 for _ in validation_batches(data.validation, 8, 1, 0, 1, limit=3)) == 3
    for words in ("36 documents", "2 documents", f"{data.train.index.remainder} tokens over"):
        assert words in data.info


def test_golden_sample(cache: Path):
    """Corpus, tokenizer, split and order together; may only change with ORDER_VERSION, FORMAT or the assets."""
    data = build_data(run_config(cache))
    assert data.train.samples(np.array([0]))[0][:12].tolist() == GOLDEN_SAMPLE


GOLDEN_SAMPLE = [74, 367, 452, 289, 273, 303, 83, 300, 330, 345, 288, 1370]


def test_second_call_opens_at_once_and_changes_nothing(cache: Path):
    folder = prepare(run_config(cache))
    assert folder is not None
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    begin = time.process_time()
    first = build_data(run_config(cache))
    assert time.process_time() - begin < 1.0
    assert before == {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    manifest = read_manifest(folder)
    assert manifest is not None and TokenFile(folder / "train").checksum() == manifest["train"]["checksum"]
    assert first.fingerprint == build_data(run_config(cache)).fingerprint


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"seq_len": 32}, {"data.seq_len"}),
        ({"seed": 9}, {"data.seed"}),
        ({"validation_fraction": 0.1}, {"corpus"}),
        ({"kind": "bytes"}, {"corpus", "tokenizer"}),
    ],
)
def test_fingerprint_names_what_changed(cache: Path, change: dict, keys: set[str]):
    before, after = build_data(run_config(cache)).fingerprint, build_data(run_config(cache, **change)).fingerprint
    assert {key for key in before if before[key] != after[key]} == keys
    json.dumps(after)


def test_without_validation(cache: Path):
    data = build_data(run_config(cache, validation_fraction=0.0))
    assert (data.validation, data.unigram_entropy) == (None, None)
    assert isinstance(data.train, TokenDataset) and len(data.train.file) == 38


def test_too_small_a_validation_fraction_says_so(cache: Path):
    with pytest.raises(DataError, match=r"data\.validation_fraction=1e-09"):
        build_data(run_config(cache, validation_fraction=1e-9))


def test_synthetic_needs_no_file(tmp_path: Path):
    data = build_data(run_config(tmp_path / "unused", source="synthetic"), dp_rank=1, dp_size=2)
    assert data.largest_id == 2047 and data.validation is not None
    assert next(Batches(data.train, 4, 2, 1, 2))[0]["tokens"].shape == (2, 64)
    train, held_out = data.train.samples(np.array([0]))[0], data.validation.window(0)
    assert not np.array_equal(train, held_out)
    assert not (tmp_path / "unused").exists()
    with pytest.raises(DataError, match="rank 2"):
        build_data(run_config(tmp_path), dp_rank=2, dp_size=2)


def test_split_is_by_document_and_never_empty():
    hashes = np.array([document_hash(str(i)) for i in range(1000)], np.uint64)
    held_out = split(hashes, 0.05)
    assert held_out.sum() == 50 and set(held_out) == {0.0, 1.0}
    order = np.random.default_rng(0).permutation(1000)
    assert np.array_equal(split(hashes[order], 0.05), held_out[order]), "the order of documents does not matter"
    twice = split(np.concatenate([hashes, hashes]), 0.05)
    assert np.array_equal(twice[:1000], twice[1000:]), "a document and its copy are on the same side"
    assert split(hashes[:1], 0.05).tolist() == [0.05], "of a single document the tail is held out"
    assert split(hashes, 0.0).sum() == 0


def test_tail_of_a_single_document(tmp_path: Path):
    tokenizer = load_tokenizer(TokenizerConfig(kind="bytes"))
    manifest = build_corpus(["x" * 99], tokenizer, 0.1, tmp_path)
    assert (manifest["train"]["tokens"], manifest["validation"]["tokens"]) == (90, 10)


@pytest.mark.parametrize("place", ["first", "last"])
def test_empty_documents_are_skipped_and_counted(tmp_path: Path, place: str):
    """NVIDIA/Megatron-LM#62: an empty first document was an index error."""
    documents = ["", "   \n", "ab", "c"] if place == "first" else ["ab", "c", "", "   \n"]
    tokenizer = load_tokenizer(TokenizerConfig(kind="bytes"))
    manifest = build_corpus(documents, tokenizer, 0.0, tmp_path)
    assert manifest["empty_documents"] == 2
    assert TokenFile(tmp_path / "train").read(0, 5).tolist() == [97, 98, 256, 99, 256]
    with pytest.raises(DataError, match="no text"):
        build_corpus(["", " "], tokenizer, 0.0, tmp_path)


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
        prepare(run_config(tmp_path / "file" / "cache"))


def test_cache_root_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root(None) == tmp_path / "gpt3d"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root(None) == tmp_path / ".cache" / "gpt3d"
    assert cache_root("~/elsewhere") == tmp_path / "elsewhere"
