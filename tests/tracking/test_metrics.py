"""The names: documented, grouped, finite; and the moving average."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

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


def test_jsonl_is_json_for_every_reader_and_counts_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        sink = JsonLines(path)
        sink.log({"step": 1, "grad_norm": math.inf, "loss": math.nan, "mfu": None})
        sink.close()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [(m["step"], m["grad_norm"], m["loss"]) for m in lines] == [(1, None, None)] * 2
    assert JsonLines(path).lines == 2


def test_a_full_disk_costs_one_warning() -> None:
    said: list[str] = []
    sink = JsonLines(Path("/dev/full"), said.append)
    for step in range(3):
        sink.log({"step": step})
    sink.close()
    assert said == ["warning: /dev/full cannot be written (No space left on device)"]


def test_perplexity_is_finite() -> None:
    assert perplexity(math.log(50.0)) == pytest.approx(50.0) and perplexity(1e6) < math.inf
