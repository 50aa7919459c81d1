"""The names: documented, grouped, finite; and the moving average."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from gpt3d.tracking.metrics import EMA_DECAY, METRICS, Ema, grouped, metric, perplexity
from gpt3d.tracking.sinks import JsonLines

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def test_the_table_in_the_docs_is_the_code_s() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.*?) ?\| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    assert rows == [(name, *entry) for name, entry in METRICS.items()]


def test_ema_of_a_constant_is_that_constant_from_the_first_value_on() -> None:
    ema = Ema()
    assert [ema.add(3.0, step) for step in (1, 10, 20, 500)] == pytest.approx([3.0] * 4)


def test_ema_does_not_depend_on_how_often_it_is_logged() -> None:
    """Ten steps of 5, then ten of 2, as twenty values, as two means, and by the definition."""
    often, seldom = Ema(), Ema()
    values = [5.0] * 10 + [2.0] * 10
    for step, value in enumerate(values, 1):
        last = often.add(value, step)
    seldom.add(5.0, 10)
    weights = [EMA_DECAY ** (20 - step) for step in range(1, 21)]
    want = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert last == pytest.approx(want) and seldom.add(2.0, 20) == pytest.approx(want)


def test_trackers_get_finite_values_in_groups() -> None:
    assert grouped({"step": 3, "loss": 1.5, "mfu": None, "grad_norm": math.inf, "memory_gb_stage_12": 2.0}) == {
        "step": 3,
        "train/loss": 1.5,
        "memory/memory_gb_stage_12": 2.0,
    }
    with pytest.raises(KeyError):
        metric("nobody_documented_this")


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_jsonl_is_json_for_every_reader_and_counts_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        sink = JsonLines(path)
        sink.append({"step": 1, "grad_norm": math.inf, "loss": math.nan, "mfu": None})
        sink.close()
    assert [(m["step"], m["grad_norm"], m["loss"]) for m in read(path)] == [(1, None, None)] * 2
    assert JsonLines(path).lines == 2


def test_a_start_after_half_a_line_begins_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    sink = JsonLines(path)
    sink.append({"step": 2})
    sink.close()
    assert [line["step"] for line in map(json.loads, path.read_text().splitlines()[2:])] == [2] and sink.lines == 3


@pytest.mark.parametrize("values", [1, 1000], ids=["short", "longer than any buffer"])
def test_a_full_disk_costs_one_warning(values: int) -> None:
    said: list[str] = []
    sink = JsonLines(Path("/dev/full"), said.append)
    for step in range(3):
        sink.append({"step": step, **{f"gradient_norm_layer_{i}": 1 / 3 for i in range(values)}})
    sink.close()
    assert said == ["warning: /dev/full cannot be written (No space left on device)"]


def test_what_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "gone" / "metrics.jsonl"
    sink = JsonLines(path, said.append)
    for step in range(3):
        sink.append({"step": step})
    path.parent.mkdir()
    sink.append({"step": 3})
    sink.close()
    assert [line["step"] for line in read(path)] == [0, 1, 2, 3] and len(said) == 1


def test_perplexity_is_finite() -> None:
    assert perplexity(math.log(50.0)) == pytest.approx(50.0) and perplexity(1e6) < math.inf
