"""build_data: the embedded corpus end to end, the split."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from gpt3d.config.schema import DataConfig, ModelConfig, RunConfig, TokenizerConfig, TrainerConfig
from gpt3d.data import Batches, DataError, TokenDataset, build_data, prepare, validation_batches
from gpt3d.data.cache import read_manifest
from gpt3d.data.embedded import read_asset, shakespeare
from gpt3d.data.split import document_hash, split
from gpt3d.data.token_file import TokenFile


def run_config(cache: Path, source: str = "shakespeare", kind: str = "shakespeare_bpe", **data: object) -> RunConfig:
    trainer = TrainerConfig(steps=300, global_batch_size=32, micro_batch_size=8)
    config = RunConfig(model=ModelConfig(vocab_size=2048), trainer=trainer)
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
    train, held_out = data.train.source, data.validation.source
    assert isinstance(held_out, TokenFile)
    assert (train.documents, held_out.documents) == (36, 2)
    assert train.tokens + held_out.tokens == 1_827_318 + 38, "each end of document is counted"
    assert (data.largest_id, data.tokenizer.vocab_size) == (2047, 2048)
    assert data.unigram_entropy == pytest.approx(6.1159, abs=1e-3)
    text = data.tokenizer.decode(held_out.read(0, held_out.tokens))
    assert [document + "" for document in text.split("<|endoftext|>")[:-1]] == [p for p in shakespeare() if p in text]
    batch = next(Batches(data.train, 4, 2, 0, 1))
    assert int(batch[0]["tokens"].max()) <= data.largest_id
    assert sum(1 for _ in validation_batches(data.validation, 8, 1, 0, 1, limit=3)) == 3
    for words in (
        "36 documents",
        "0.355 passes in this run",
        "2 documents",
        f"{data.train.index.remainder} tokens over",
    ):
        assert words in data.info


def test_golden_sample(cache: Path):
    """Corpus, tokenizer, split and order together; may only change with ORDER_VERSION, FORMAT or the assets."""
    data = build_data(run_config(cache))
    assert data.train.samples(np.array([0]))[0][:12].tolist() == GOLDEN_SAMPLE


GOLDEN_SAMPLE = [74, 367, 452, 289, 273, 303, 83, 300, 330, 345, 288, 1370]


def test_second_call_opens_at_once_and_changes_nothing(cache: Path):
    (folder,) = prepare(run_config(cache))
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
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} == keys
    json.dumps(after)


def test_without_validation(cache: Path):
    data = build_data(run_config(cache, validation_fraction=0.0))
    assert (data.validation, data.unigram_entropy) == (None, None)
    assert isinstance(data.train, TokenDataset) and data.train.source.documents == 38


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
    assert split(np.repeat(hashes[:1], 40), 0.05).tolist() == [0.05] * 40, "40 copies count as one"
    assert split(hashes, 0.0).sum() == 0
