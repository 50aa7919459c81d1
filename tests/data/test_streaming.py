"""Streams: the same samples for any DP degree, exact after two resumes with and without saved state."""

import json
from pathlib import Path

import numpy as np
import pytest

from gpt3d.config.schema import RunConfig
from gpt3d.data import Batches, DataError, build_data
from gpt3d.data.tokenizer import BytesTokenizer
from tests.data.helpers import run_config, write_jsonl

SHARDS = 4


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files of 1, 2, 3 and 4 times 10 rows."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        rows = [{"text": f"shard {shard} row {row}: " + "x" * (7 * row % 23)} for row in range(10 * (shard + 1))]
        write_jsonl(folder / f"{shard}.jsonl", rows)
    return folder


def config(shards: Path, **data: object) -> RunConfig:
    hf = {"path": "json", "data_files": [str(shards / "*.jsonl")], "streaming": True, **data.pop("hf", {})}  # type: ignore[arg-type]
    return run_config(shards / "cache", "hf", hf=hf, **data)


def read(
    shards: Path, batch: int, dp: int, steps: int, start: int = 0, state: dict | None = None, **data: object
) -> tuple[list[list[int]], dict]:
    """Rows by k, from all ranks, and the joined state after the last step."""
    rows: dict[int, list[int]] = {}
    streams: dict = {}
    for rank in range(dp):
        train = build_data(config(shards, **data), rank, dp).train
        if state is not None:
            train.load_state_dict(state)  # type: ignore[attr-defined]
        batches = Batches(train, batch, 1, rank, dp, start)
        for step in range(steps):
            micro_batches = next(batches)
            assert [m["index"] for m in micro_batches] == [
                start + step * batch + rank + dp * i for i in range(batch // dp)
            ]
            rows |= {m["index"]: m["tokens"][0].tolist() for m in micro_batches}
        saved = json.loads(json.dumps(batches.state_dict()))
        assert saved["consumed_samples"] == start + steps * batch
        streams |= saved["streams"]
        batches.close()
    assert sorted(rows) == list(range(start, start + steps * batch))
    return [rows[k] for k in sorted(rows)], streams


def test_any_dp_degree_sees_the_same_samples(shards: Path):
    """huggingface/datasets#6437, #6623: shards of different length; 3 ranks do not divide 4 shards."""
    expected, _ = read(shards, 12, 1, 20)
    assert read(shards, 12, 2, 20)[0] == expected
    assert read(shards, 12, 4, 20)[0] == expected
    assert read(shards, 12, 3, 20)[0] == expected
    assert read(shards, 12, 6, 20)[0] == expected


@pytest.mark.parametrize("with_state", [True, False])
def test_two_resumes_with_another_dp_degree(shards: Path, with_state: bool):
    """huggingface/datasets#8308: the second resume began at 0. The samples here span several passes of each shard."""
    expected, _ = read(shards, 8, 1, 30)
    first, state = read(shards, 8, 2, 10)
    second, state = read(shards, 16, 4, 5, start=80, state=state if with_state else None)
    third, _ = read(shards, 8, 1, 10, start=160, state=state if with_state else None)
    assert first + second + third == expected


def test_streams_are_the_text_in_order(shards: Path):
    rows, _ = read(shards, 4, 1, 8)
    text = BytesTokenizer().decode([token for row in rows[1::SHARDS] for token in row])
    assert text.startswith("shard 1 row 0: <|endoftext|>shard 1 row 1: xxxxxxx<|endoftext|>")


def test_held_out_documents_are_not_trained_on(shards: Path):
    data = build_data(config(shards, validation_fraction=0.2))
    assert data.validation is not None
    held_out = (
        BytesTokenizer()
        .decode(np.concatenate([data.validation.window(w)[:-1] for w in range(data.validation.windows)]))
        .split("<|endoftext|>")
    )
    train = BytesTokenizer().decode(
        np.concatenate([data.train.samples(np.array([k]))[0][:-1] for v in range(4) for k in range(v, 400, 4)])
    )
    assert 8 <= len(held_out) <= 35
    assert not [document for document in held_out[:-1] if f"<|endoftext|>{document}<|endoftext|>" in train]


@pytest.mark.parametrize(
    "path", [{"packing": "concat"}, {"packing": "best_fit"}, {"hf": {"streaming": True}}, {"source": "files"}]
)
def test_the_text_column_is_honoured_on_every_path(tmp_path: Path, path: dict):
    """axolotl#2254: it was honoured on one of them; the others failed after the start, or only inside a worker."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"content": f"a b c {i}", "meta": 1} for i in range(30)])
    source = path.get("source", "hf")
    hf = {"path": "json", "data_files": [str(file)], **path.get("hf", {})}
    where = {"paths": [str(file)]} if source == "files" else {"hf": hf}
    settings = {"packing": path.get("packing", "concat"), **where}
    data = build_data(run_config(tmp_path / "c", source, text_column="content", **settings))
    assert "a b c" in BytesTokenizer().decode(data.train.samples(np.array([0]))[0][:16])
    with pytest.raises(DataError, match=r"column.*data\.text_column=text.*\['content', 'meta'\]"):
        build_data(run_config(tmp_path / "d", source, **settings))


def test_errors(shards: Path, tmp_path: Path):
    data = build_data(config(shards), 1, 2).train
    with pytest.raises(DataError, match="belongs to another data-parallel rank"):
        data.samples(np.array([0]))
    data.samples(np.array([5]))
    with pytest.raises(DataError, match="cannot go back"):
        data.samples(np.array([1]))
    with pytest.raises(DataError, match="lacks stream 1"):
        data.load_state_dict({})  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"data\.packing=best_fit needs a prepared corpus"):
        build_data(config(shards, packing="best_fit"))
    write_jsonl(tmp_path / "0.jsonl", [{"text": ""}])
    empty = build_data(config(tmp_path)).train
    with pytest.raises(DataError, match="has no text"):
        empty.samples(np.array([0]))
