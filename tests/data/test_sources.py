"""Sources: prepared token files, Hugging Face datasets, blends."""

from pathlib import Path

import datasets
import numpy as np
import pytest

from gpt3d.config.schema import TokenizerConfig
from gpt3d.data import DataError, TokenDataset, build_data, prepare
from gpt3d.data.blend import BlendPattern, normalized
from gpt3d.data.token_file import TokenFile, TokenFileWriter
from gpt3d.data.token_source import Concatenation, FlatFile, TokenSlice, hold_out
from gpt3d.data.tokenizer import BytesTokenizer
from tests.data.helpers import prepared, run_config, write_jsonl


def token_file(prefix: Path, lengths: list[int], first: int = 0) -> TokenFile:
    writer = TokenFileWriter(prefix, np.dtype("<u2"))
    for i, length in enumerate(lengths):
        writer.add(np.full(length, first + i))
    writer.close()
    return TokenFile(prefix)


def test_token_files(tmp_path: Path):
    token_file(tmp_path / "a", [100, 50])
    token_file(tmp_path / "b.v2", [30], first=7)
    data = build_data(run_config(tmp_path / "c", "tokens", paths=[str(tmp_path / "a"), str(tmp_path / "b.v2.bin")]))
    assert isinstance(data.train, TokenDataset) and data.train.source.tokens == 180
    assert data.train.source.read(140, 20).tolist() == [1] * 10 + [7] * 10
    assert data.train.source.document_lengths().tolist() == [100, 50, 30]
    again = build_data(run_config(tmp_path / "c", "tokens", paths=[str(tmp_path)]))
    assert again.fingerprint == data.fingerprint
    with pytest.raises(DataError, match=r"data\.paths: .*absent.* matches no file"):
        build_data(run_config(tmp_path / "c", "tokens", paths=[str(tmp_path / "absent")]))


def test_flat_bin(tmp_path: Path):
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "val.bin")
    paths = {"paths": [str(tmp_path / "train.bin")], "validation_paths": [str(tmp_path / "val.bin")]}
    data = build_data(run_config(tmp_path / "c", "tokens", **paths))
    assert data.train.source.read(100, 3).tolist() == [100, 101, 102]  # type: ignore[attr-defined]
    assert data.validation is not None and data.validation.targets == 49
    (tmp_path / "train.bin").write_bytes(b"\0" * 401)
    with pytest.raises(DataError, match=r"401 bytes, no multiple of data\.token_dtype=uint16"):
        build_data(run_config(tmp_path / "c", "tokens", **paths))


def test_ids_of_another_tokenizer_are_found(tmp_path: Path):
    token_file(tmp_path / "a", [100], first=300)
    with pytest.raises(DataError, match="token id 300, the tokenizer has 257 ids: it was made with another tokenizer"):
        build_data(run_config(tmp_path / "c", "tokens", paths=[str(tmp_path / "a")])).train.samples(np.arange(1))


@pytest.mark.parametrize(
    ("source", "key", "value"),
    [
        ("shakespeare", "paths", ["a.txt"]),
        ("hf", "validation_paths", ["a.txt"]),
        ("tokens", "deduplicate", True),
        ("files", "hf", {"path": "x"}),
        ("files", "blend", {"a": {}}),
        ("synthetic", "document_masks", True),
        ("stdlib", "on_error", "replace"),
    ],
)
def test_a_setting_without_effect_is_refused(tmp_path: Path, source: str, key: str, value: object):
    """axolotl#2254: the setting was honoured on one code path only."""
    with pytest.raises(DataError, match=rf"data\.{key}=.* has no effect with data\.source={source}"):
        build_data(run_config(tmp_path, source, **{key: value}))
    part = {"source": "shakespeare", "weight": 1, "paths": ["a"]}
    with pytest.raises(DataError, match=r"data\.blend\.x\.paths=.* has no effect"):
        build_data(run_config(tmp_path, "blend", blend={"x": part}))


def test_the_manifest_of_a_prepared_folder_names_its_tokenizer(tmp_path: Path):
    """huggingface/nanotron#254: data of one tokenizer trained with another."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a" * 100}])
    (folder,) = prepare(run_config(tmp_path / "c", "files", paths=[str(path)]))
    assert build_data(run_config(tmp_path / "c", "tokens", paths=[str(folder / "train")]))
    with pytest.raises(DataError, match=r"made with tokenizer bytes.*the run has shakespeare_bpe"):
        build_data(run_config(tmp_path / "c", "tokens", "shakespeare_bpe", paths=[str(folder / "train")]))


def test_hold_out_keeps_documents_whole_where_it_can(tmp_path: Path):
    file = token_file(tmp_path / "a", [10] * 20)
    train, held_out = hold_out(file, 0.07)
    assert (train.tokens, held_out.tokens, held_out.documents) == (190, 10, 1)
    train, held_out = hold_out(token_file(tmp_path / "b", [200]), 0.07)
    assert (train.tokens, held_out.tokens) == (186, 14)


def test_concatenation_reads_across_its_sources(tmp_path: Path):
    files = [token_file(tmp_path / name, [5, 3], first) for name, first in (("a", 0), ("b", 2), ("c", 4))]
    whole = Concatenation(files)
    expected = [0] * 5 + [1] * 3 + [2] * 5 + [3] * 3 + [4] * 5 + [5] * 3
    assert all(whole.read(a, b - a).tolist() == expected[a:b] for a in range(24) for b in range(a, 25))
    part = TokenSlice(whole, 4, 20)
    assert part.read(0, 16).tolist() == expected[4:20]
    assert part.document_lengths().tolist() == [1, 3, 5, 3, 4] and part.documents == 5
    with pytest.raises(DataError):
        part.read(10, 7)
    with pytest.raises(DataError):
        whole.read(20, 5)


def test_flat_file_dtype(tmp_path: Path):
    np.array([1, 2, 70000], np.uint32).tofile(tmp_path / "a.bin")
    assert FlatFile(tmp_path / "a.bin", "uint32").read(2, 1).tolist() == [70000]


@pytest.mark.parametrize("how", ["json", "parquet", "disk"])
def test_hugging_face_datasets(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    rows = datasets.Dataset.from_dict({"body": [f"document {i}" for i in range(50)] + [None, ""], "id": range(52)})
    if how == "json":
        rows.to_json(tmp_path / "a.jsonl")
        hf = {"path": "json", "data_files": [str(tmp_path / "a.jsonl")]}
    elif how == "parquet":
        rows.to_parquet(tmp_path / "a.parquet")
        hf = {"path": "parquet", "data_files": [str(tmp_path / "*.parquet")]}
    else:
        datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "saved"))
        hf = {"path": str(tmp_path / "saved")}
    texts, manifest = prepared(run_config(tmp_path / "c", "hf", hf=hf, text_column="body"))
    assert texts == [f"document {i}" for i in range(50)]
    assert manifest["left_out"] == {"null": 1, "empty": 1}
    with pytest.raises(DataError, match=r"no column data\.text_column=text; its columns are \['body', 'id'\]"):
        prepare(run_config(tmp_path / "c", "hf", hf=hf))


def test_hugging_face_errors(tmp_path: Path):
    with pytest.raises(DataError, match=r"needs data\.hf\.path"):
        prepare(run_config(tmp_path, "hf"))
    with pytest.raises(DataError, match=r"cannot load json\[train\]"):
        prepare(run_config(tmp_path, "hf", hf={"path": "json", "data_files": [str(tmp_path / "absent.json")]}))
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": 5}])
    with pytest.raises(DataError, match=r"json\[train\]: row 1: not text: text is 5"):
        prepare(run_config(tmp_path / "c", "hf", hf={"path": "json", "data_files": [str(path)]}))


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.0999, 0.0001], [1.0], [0.5, 0.5], [3, 1, 1e-9]])
def test_blend_counts_stay_close_to_the_weights(weights: list[float]):
    pattern = BlendPattern(weights, seed=0)
    corpus, _ = pattern(np.arange(200_000))
    shares = np.array(weights) / sum(weights)
    for c, share in enumerate(shares):
        deviation = np.cumsum(corpus == c) - share * np.arange(1, 200_001)
        assert np.abs(deviation).max() < 5, "at every moment, not only at the end"


def test_blend_numbers_the_samples_of_each_corpus_without_gap():
    """NVIDIA/Megatron-LM#705: index errors when a corpus ran out; here the number simply goes on."""
    pattern = BlendPattern([0.6, 0.3, 0.1], seed=3)
    corpus, number = pattern(np.arange(150_000))
    for c in range(3):
        assert np.array_equal(number[corpus == c], np.arange((corpus == c).sum()))
    assert np.array_equal(pattern(np.array([140_001]))[1], number[140_001:140_002])


def test_golden_blend():
    """May only change together with ORDER_VERSION."""
    assert BlendPattern([0.6, 0.3, 0.1], seed=1)(np.arange(20))[0].tolist() == GOLDEN_BLEND


GOLDEN_BLEND = [0, 1, 0, 0, 1, 0, 0, 1, 0, 2, 1, 0, 0, 2, 0, 1, 0, 0, 1, 0]


def test_weights_are_normalized_and_checked():
    assert normalized({"a": 3, "b": 1, "c": 0}) == {"a": 0.75, "b": 0.25}
    for bad in ({"a": -1.0, "b": 2.0}, {"a": 0.0}, {"a": float("nan")}):
        with pytest.raises(DataError, match=r"data\.blend: weights"):
            normalized(bad)


def test_blend_end_to_end(tmp_path: Path):
    paths = {
        name: write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name * n} for n in range(90, 110)]) for name in "ab"
    }
    blend = {
        "left": {"source": "files", "paths": [str(paths["a"])], "weight": 3},
        "right": {"source": "files", "paths": [str(paths["b"])], "weight": 1},
        "none": {"source": "files", "paths": ["/absent"], "weight": 0},
    }
    data = build_data(run_config(tmp_path / "c", "blend", blend=blend, validation_fraction=0.1))
    rows = data.train.samples(np.arange(400))
    assert 95 <= ((rows == ord("b")).sum(axis=1) > 8).sum() <= 105
    assert data.validation is not None
    text = "".join(BytesTokenizer().decode(data.validation.window(w)) for w in range(data.validation.windows))
    assert "a" in text and "b" in text
    assert "left (75 % of the samples)" in data.info and "right (25 % of the samples)" in data.info
    # About 2,410 weighted training tokens and add-one smoothing over 257 ids: p(a) = .671, p(b) = .225, p(end) = .009.
    # The held-out text is a and b half and half, 1 % ends: -(.495 ln .671 + .495 ln .225 + .01 ln .009) = .98
    assert data.unigram_entropy == pytest.approx(0.98, abs=0.01)
    assert np.array_equal(data.train.samples(np.array([123]))[0], rows[123])


def test_the_same_corpus_twice_gives_two_orders(tmp_path: Path):
    """NVIDIA/Megatron-Energon#266."""
    part = {"source": "shakespeare", "weight": 1}
    data = build_data(run_config(tmp_path, "blend", blend={"one": part, "two": part}))
    first, second = (data.train.datasets[i].samples(np.arange(5)) for i in (0, 1))  # type: ignore[attr-defined]
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"source": "shakespeare"}, "data.blend.x: 'weight'"),
        ({"source": "shakespeare", "weight": "much"}, "data.blend.x: could not convert"),
        ({"source": "shakespeare", "weight": 1, "path": "a"}, "data.blend.x: Key 'path' not in 'SourceConfig'"),
        ({"source": "blend", "weight": 1}, "data.blend.x.source=blend"),
        ({"source": "files", "weight": 1, "on_error": "ignore"}, "data.blend.x.on_error=ignore is not a choice"),
    ],
)
def test_blend_errors(tmp_path: Path, part: dict, message: str):
    with pytest.raises(DataError, match=message.replace(".", r"\.")):
        build_data(run_config(tmp_path, "blend", blend={"x": part}))
    with pytest.raises(DataError, match=r"data\.source=blend needs data\.blend"):
        build_data(run_config(tmp_path, "blend"))


def test_gpt2_tokenizer_in_a_corpus(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "Hello world. " * 30}])
    data = build_data(run_config(tmp_path / "c", "files", TokenizerConfig(kind="gpt2"), paths=[str(path)]))
    assert data.tokenizer.decode(data.train.samples(np.array([0]))[0]).count("Hello world") >= 4
    assert data.largest_id == 50_256
