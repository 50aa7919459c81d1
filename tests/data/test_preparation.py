"""Preparation: the same result from any number of workers, the options, the sources."""

import gzip
import random
from pathlib import Path

import numpy as np
import pytest

from gpt3d.config.schema import TokenizerConfig
from gpt3d.data import DataError, build_data, pieces, prepare, workers
from gpt3d.data.cache import read_manifest
from gpt3d.data.token_file import TokenFile
from gpt3d.data.tokenizer import BytesTokenizer, load_tokenizer
from gpt3d.data.worker import encode_long
from tests.data.helpers import documents, prepared, run_config, write_jsonl


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """300 documents of all lengths in three files, cut into pieces of 2 KB, so that helpers have something to share."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2048)
    monkeypatch.setattr(workers, "SMALL", 0)
    rng = random.Random(0)
    for name in ("a.jsonl", "b.jsonl", "c.jsonl.gz"):
        records = [{"text": f"{name} {i} " + "\u00e9x" * rng.choice([1, 10, 100, 2000])} for i in range(100)]
        path = write_jsonl(tmp_path / name.removesuffix(".gz"), records)
        if name.endswith(".gz"):
            (tmp_path / name).write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    return [str(tmp_path / "*.jsonl*")]


def test_pieces_neither_lose_nor_repeat_a_line(tmp_path: Path, many: list[str]):
    texts, manifest = prepared(run_config(tmp_path / "c", "files", paths=many))
    assert [text.split(" ", 2)[:2] for text in texts] == [
        [name, str(i)] for name in ("a.jsonl", "b.jsonl", "c.jsonl.gz") for i in range(100)
    ]
    assert manifest["train"]["documents"] == 300


def test_result_does_not_depend_on_the_workers(tmp_path: Path, many: list[str]):
    folders = [
        prepare(run_config(tmp_path / str(n), "files", paths=many, workers=n, validation_fraction=0.1))[0]
        for n in (1, 3)
    ]
    assert read_manifest(folders[0]) == read_manifest(folders[1])
    for name in ("train.bin", "train.idx", "validation.bin", "validation.idx"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert sorted(p.name for p in folders[1].iterdir()) == sorted(
        ["manifest.json", "train.bin", "train.idx", "validation.bin", "validation.idx"]
    )


def test_helpers_report_the_first_error_with_its_line(tmp_path: Path, many: list[str]):
    lines = (tmp_path / "b.jsonl").read_bytes().splitlines(keepends=True)
    lines[40], lines[80] = b"{cut\n", b"{cut too\n"
    (tmp_path / "b.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=r"b\.jsonl:41: not valid JSON"):
        prepare(run_config(tmp_path / "c", "files", paths=many, workers=3))


def test_a_killed_helper_is_an_error_not_a_hang(tmp_path: Path, many: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(DataError, match=r"ended with code 1.*data\.workers"):
        prepare(run_config(tmp_path / "c", "files", paths=many, workers=2))


def test_shuffle_deduplicate_and_split(tmp_path: Path):
    records = [{"text": f"document {i % 60}"} for i in range(100)]
    paths = [str(write_jsonl(tmp_path / "a.jsonl", records))]
    base = {"paths": paths, "validation_fraction": 0.1}
    plain, _ = prepared(run_config(tmp_path / "c", "files", **base))
    (folder,) = prepare(run_config(tmp_path / "c", "files", **base))
    held_out = documents(TokenFile(folder / "validation"))
    assert len(plain) + len(held_out) == 100 and not set(plain) & set(held_out), "copies are on one side"
    unique, manifest = prepared(run_config(tmp_path / "c", "files", deduplicate=True, **base))
    assert (len(unique), len(set(unique)), manifest["left_out"]) == (54, 54, {"duplicate": 40})
    shuffled, _ = prepared(run_config(tmp_path / "c", "files", deduplicate=True, shuffle_documents=True, **base))
    assert shuffled != unique and sorted(shuffled) == sorted(unique)


def test_tail_of_a_single_document_is_held_out(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x" * 99)
    config = run_config(tmp_path / "c", "files", paths=[str(tmp_path / "a.txt")], validation_fraction=0.1)
    data = build_data(config)
    assert data.validation is not None and data.validation.targets == 9
    assert data.train.source.tokens == 90  # type: ignore[attr-defined]


def test_a_document_of_ten_sequences_gives_ten_samples(tmp_path: Path):
    """trl#4554: the tail beyond the sequence length was cut off and never trained on."""
    (tmp_path / "a.txt").write_text("".join(chr(65 + i % 50) for i in range(160)))
    data = build_data(run_config(tmp_path / "c", "files", paths=[str(tmp_path / "a.txt")], seq_len=16))
    assert "10 samples an epoch, 0 tokens over" in data.info
    labels = data.train.samples(np.arange(10))[:, 1:].flatten()
    expected = data.train.source.read(1, 160)  # type: ignore[attr-defined]
    assert sorted(labels.tolist()) == sorted(expected.tolist())


def test_validation_files_of_their_own(tmp_path: Path):
    (tmp_path / "a.txt").write_text("train " * 20)
    (tmp_path / "v.txt").write_text("held out " * 20)
    paths = {"paths": [str(tmp_path / "a.txt")], "validation_paths": [str(tmp_path / "v.txt")]}
    data = build_data(run_config(tmp_path / "c", "files", validation_fraction=0.1, **paths))
    assert data.validation is not None
    assert BytesTokenizer().decode(data.validation.window(0)).startswith("held out")
    assert data.train.source.tokens == 121  # type: ignore[attr-defined]


def test_a_changed_file_is_prepared_anew(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "old"}])
    config = run_config(tmp_path / "c", "files", paths=[str(path)])
    assert prepared(config)[0] == ["old"]
    write_jsonl(path, [{"text": "newer"}])
    assert prepared(config)[0] == ["newer"]


def test_text_files_and_folders(tmp_path: Path):
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "b.txt").write_text("one\ntwo\n")
    (tmp_path / "d" / "e" / "a.md").write_text("three")
    (tmp_path / "d" / "ignored.bin").write_text("")
    assert prepared(run_config(tmp_path / "c", "files", paths=[str(tmp_path / "d")]))[0] == ["one\ntwo\n", "three"]
    lines = run_config(tmp_path / "c", "files", paths=[str(tmp_path / "d")], txt_documents="line")
    assert prepared(lines)[0] == ["one", "two", "three"]
    with pytest.raises(DataError, match="matches no file"):
        prepare(run_config(tmp_path / "c", "files", paths=[str(tmp_path / "x*.txt")]))
    with pytest.raises(DataError, match=r"needs data\.paths"):
        prepare(run_config(tmp_path / "c", "files"))


def test_zstandard(tmp_path: Path):
    import zstandard

    content = b'{"text": "a"}\n' * 3
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(content) + zstandard.compress(content))
    assert prepared(run_config(tmp_path / "c", "files", paths=[str(tmp_path / "a.jsonl.zst")]))[0] == ["a"] * 6
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(content * 999)[:-5])
    with pytest.raises(DataError, match="cannot be read to its end"):
        prepare(run_config(tmp_path / "c", "files", paths=[str(tmp_path / "a.jsonl.zst")]))


@pytest.mark.parametrize("kind", ["shakespeare_bpe", "gpt2"])
def test_long_documents_are_encoded_in_stretches_without_a_trace(kind: str, monkeypatch: pytest.MonkeyPatch):
    from gpt3d.data import worker
    from gpt3d.data.embedded import shakespeare

    monkeypatch.setattr(worker, "_CHUNK", 1000)
    tokenizer, text = load_tokenizer(TokenizerConfig(kind=kind)), shakespeare()[3]
    stretches = encode_long(tokenizer, text)
    assert len(stretches) > 50
    assert [i for ids in stretches for i in ids.tolist()] == tokenizer.encode(text).tolist()


def test_stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The few files of one package of the library stand for all of it here."""
    root = Path(pieces.sysconfig.get_path("stdlib"))
    everything = list(pieces._stdlib())
    assert len(everything) > 300 and not [p for p in everything if "site-packages" in p.parts or "test" in p.parts]
    monkeypatch.setattr(pieces, "_stdlib", lambda: sorted((root / "json").glob("*.py")))
    texts, _ = prepared(run_config(tmp_path, "stdlib"))
    assert any("class JSONDecoder" in text for text in texts)


def test_trained_tokenizer(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "the cat and the hat " * 50}, {"text": "sat on the mat " * 50}])
    kind, settings = TokenizerConfig(kind="trained", vocab_size=270), {"paths": [str(path)], "seq_len": 8}
    config = run_config(tmp_path / "c", "files", kind, **settings)
    data = build_data(config)
    assert (data.tokenizer.vocab_size, data.tokenizer.eod) == (270, 269)
    assert data.tokenizer.decode(data.tokenizer.encode("the \u00e9 hat")) == "the \u00e9 hat"
    assert len(data.tokenizer.encode("the cat and the hat")) < 10
    assert data.tokenizer.fingerprint == build_data(config).tokenizer.fingerprint
    config.tokenizer.vocab_size = 1000
    with pytest.raises(DataError, match=r"tokenizer\.vocab_size=1000.*it gives 2\d\d"):
        build_data(config)
