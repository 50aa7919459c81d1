"""Bad input: each kind gives file and line, obeys `on_error`, and is counted."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpt3d.data import DataError
from tests.data.helpers import prepared, run_config, write_jsonl

GOOD = b'{"text": "good"}\n'
BAD_LINES = {
    "invalid UTF-8": b'{"text": "caf\xe9"}\n',
    "lone surrogate": b'{"text": "a\\ud800b"}\n',
    "not valid JSON": b'{"text": "cut\n',
    "not a JSON object": b'["text"]\n',
    "no text column": b'{"content": "a", "meta": 1}\n',
    "not text": b'{"text": 5}\n',
}


def corpus(tmp_path: Path, content: bytes, name: str = "a.jsonl") -> list[str]:
    (tmp_path / name).write_bytes(content)
    return [str(tmp_path / name)]


@pytest.mark.parametrize("kind", BAD_LINES)
def test_raise_names_file_and_line(tmp_path: Path, kind: str):
    """huggingface/datasets#6641: an abort with a byte offset that names neither file nor line."""
    paths = corpus(tmp_path, GOOD * 3 + BAD_LINES[kind] + GOOD)
    with pytest.raises(DataError, match=rf"a\.jsonl:4: {kind}.*data\.on_error=skip"):
        prepared(run_config(tmp_path / "c", "files", paths=paths))
    assert not [p for p in (tmp_path / "c").iterdir() if p.suffix != ".lock"], "no partial result is kept"


@pytest.mark.parametrize("kind", BAD_LINES)
def test_skip_counts(tmp_path: Path, kind: str):
    paths = corpus(tmp_path, GOOD + BAD_LINES[kind] * 2 + GOOD)
    texts, manifest = prepared(run_config(tmp_path / "c", "files", paths=paths, on_error="skip"))
    assert texts == ["good", "good"]
    assert manifest["left_out"] == {kind: 2}
    assert manifest["places"] == [f"{kind}: {paths[0]}:{line}" for line in (2, 3)]


def test_replace_repairs_what_can_be_repaired(tmp_path: Path):
    paths = corpus(tmp_path, b"".join(BAD_LINES.values()))
    texts, manifest = prepared(run_config(tmp_path / "c", "files", paths=paths, on_error="replace"))
    assert texts == ["caf\ufffd", "a\ufffdb", "5"]
    assert manifest["left_out"] == {
        "replaced: invalid UTF-8": 1,
        "replaced: lone surrogate": 1,
        "replaced: not text": 1,
        "not valid JSON": 1,
        "not a JSON object": 1,
        "no text column": 1,
    }


def test_column_names_are_listed(tmp_path: Path):
    """axolotl#2254: a missing key error although the right name was set."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"content": "a b c", "meta": 1}])
    texts, _ = prepared(run_config(tmp_path / "c", "files", paths=[str(path)], text_column="content"))
    assert texts == ["a b c"]
    with pytest.raises(DataError, match=r"data.text_column=text, the columns are \['content', 'meta'\]"):
        prepared(run_config(tmp_path / "c", "files", paths=[str(path)]))


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [1, 0, 2, 3, 4], [1, 2, 0, 3, 4], [1, 2, 3, 4, 0]])
def test_empty_and_null_documents_are_counted_wherever_they_stand(tmp_path: Path, order: list[int]):
    """NVIDIA/Megatron-LM#62: an empty first document was an index error."""
    lines = ['{"text": ""}', '{"text": "ab"}', '{"text": "   "}', '{"text": null}', '{"text": "c"}']
    paths = corpus(tmp_path, "\n\n".join(lines[i] for i in order).encode())
    texts, manifest = prepared(run_config(tmp_path / "c", "files", paths=paths))
    assert texts == ["ab", "c"]
    assert manifest["left_out"] == {"empty": 2, "null": 1}
    null_line = 1 + 2 * order.index(3)
    assert f"null: {paths[0]}:{null_line}" in manifest["places"]


def test_only_empty_documents(tmp_path: Path):
    paths = corpus(tmp_path, b'{"text": ""}\n{"text": null}\n')
    with pytest.raises(DataError, match=r"no text: 0 documents; left out: \{'empty': 1, 'null': 1\}"):
        prepared(run_config(tmp_path / "c", "files", paths=paths))
    with pytest.raises(DataError, match="0 documents"):
        prepared(run_config(tmp_path / "c", "files", paths=corpus(tmp_path, b"")))


def test_harmless_oddities(tmp_path: Path):
    """NUL, a byte-order mark, CRLF, no newline at the end, text like a special token, a 10 MB line."""
    big = "x" * 10_000_000
    content = b"\xef\xbb\xbf" + b'{"text": "a\\u0000b"}\r\n{"text": "<|endoftext|>"}\n'
    paths = corpus(tmp_path, content + json.dumps({"text": big}).encode())
    texts, manifest = prepared(run_config(tmp_path / "c", "files", paths=paths))
    assert texts == ["a\0b", "<|endoftext|>", big]
    assert manifest["left_out"] == {}


def test_truncated_gz(tmp_path: Path):
    paths = corpus(tmp_path, gzip.compress(GOOD * 20_000)[:-20], "a.jsonl.gz")
    with pytest.raises(DataError, match=r"a\.jsonl\.gz.*cannot be read to its end.*truncated"):
        prepared(run_config(tmp_path / "c", "files", paths=paths))
    texts, manifest = prepared(run_config(tmp_path / "c", "files", paths=paths, on_error="skip"))
    assert len(texts) > 0 and manifest["left_out"] == {"cannot be read to its end": 1}


def test_parquet(tmp_path: Path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["a", None, "", "b" * 50, "c"], "id": [1, 2, 3, 4, 5]})
    pq.write_table(table, path, row_group_size=2)
    texts, manifest = prepared(run_config(tmp_path / "c", "files", paths=[str(path)]))
    assert texts == ["a", "b" * 50, "c"]
    assert manifest["left_out"] == {"null": 1, "empty": 1}
    assert f"null: {path}: row group 1, row 2" in manifest["places"]
    with pytest.raises(DataError, match=r"row group 1: no text column.*\['id', 'text'\]"):
        prepared(run_config(tmp_path / "c", "files", paths=[str(path)], text_column="body"))
    with pytest.raises(DataError, match="row group 1, row 1: not text"):
        prepared(run_config(tmp_path / "c", "files", paths=[str(path)], text_column="id"))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"a\.parquet: row group 1: cannot be read"):
        prepared(run_config(tmp_path / "c", "files", paths=[str(path)]))


def test_latin_1_text_file(tmp_path: Path):
    paths = corpus(tmp_path, b"first\nsecond caf\xe9\n", "a.txt")
    with pytest.raises(DataError, match=r"a\.txt:1: invalid UTF-8: byte 17 of the document"):
        prepared(run_config(tmp_path / "c", "files", paths=paths))
    with pytest.raises(DataError, match=r"a\.txt:2: invalid UTF-8"):
        prepared(run_config(tmp_path / "c", "files", paths=paths, txt_documents="line"))


def test_json_array_and_unknown_format(tmp_path: Path):
    paths = corpus(tmp_path, b' [{"text": "a"}, {"text": "b"}]', "a.json")
    assert prepared(run_config(tmp_path / "c", "files", paths=paths))[0] == ["a", "b"]
    assert prepared(run_config(tmp_path / "c", "files", paths=corpus(tmp_path, GOOD, "b.json")))[0] == ["good"]
    with pytest.raises(DataError, match=r"a\.json: record 2: no text column.*found \['t'\]"):
        corpus(tmp_path, b'[{"text": "a"}, {"t": "b"}]', "a.json")
        prepared(run_config(tmp_path / "c", "files", paths=paths))
    with pytest.raises(DataError, match="unknown format"):
        prepared(run_config(tmp_path / "c", "files", paths=corpus(tmp_path, b"x", "a.docx")))
