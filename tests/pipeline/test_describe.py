"""Numbers about a pipeline that come from the configuration alone."""

from __future__ import annotations

from typing import Any

import pytest

from gpt3d.config.arithmetic import World, stage_layers
from gpt3d.config.load import compose
from gpt3d.config.notes import notes
from gpt3d.config.rules import check
from gpt3d.pipeline.describe import ideal_bubble, stage_text
from gpt3d.planner.memory import stage_parameters
from gpt3d.planner.traffic import zero_bytes


def test_weights_of_the_ends_move_layers_away_from_them() -> None:
    config = compose(["model=125m", "parallel.pp=4", "parallel.head_layers=1.5", "parallel.embedding_layers=0.5"])
    assert check(config, World()) == []
    assert stage_layers(config) == [3, 4, 3, 2]
    assert stage_layers(compose(["model=125m", "parallel.pp=4"])) == [3, 3, 3, 3]


def test_weights_beside_a_split_by_hand_are_refused() -> None:
    config = compose(["model=125m", "parallel.pp=2", "parallel.layers_per_stage=[7,5]", "parallel.head_layers=2"])
    assert [problem.key for problem in check(config, World())] == ["parallel.head_layers"]


def test_stage_table_has_every_layer_and_parameter() -> None:
    config = compose(["model=125m", "parallel.pp=2", "pipeline=interleaved"])
    lines = stage_text(config).splitlines()[1:]
    assert [line.split()[:3] for line in lines] == [["0", "0", "0"], ["1", "1", "0"], ["2", "0", "1"], ["3", "1", "1"]]
    counts = [int(line.split()[-1].replace(",", "")) for line in lines]
    assert counts[0] + counts[2] == stage_parameters(config, 0)
    assert counts[1] + counts[3] == stage_parameters(config, 1)


@pytest.mark.parametrize(
    "schedule, want", [("1f1b", 3 / 11), ("gpipe", 3 / 11), ("interleaved", 3 / (2 * 8 + 3)), ("zb_h1", 3 / 27)]
)
def test_ideal_bubble(schedule: str, want: float) -> None:
    config = compose(["model=125m", "parallel.pp=4", f"pipeline={schedule}", "trainer.global_batch_size=8"])
    config.trainer.micro_batch_size = 1
    assert ideal_bubble(config, 1) == pytest.approx(want)


def traffic(**changes: Any) -> list[int]:
    overrides = ["model=125m", "parallel.pp=2", "trainer.global_batch_size=16", "trainer.micro_batch_size=1"]
    config = compose([*overrides, *(f"{key}={value}" for key, value in changes.items())])
    return [zero_bytes(config, 2, stage) for stage in range(4)]


def test_zero_traffic_counts_each_collective() -> None:
    config = compose(["model=125m", "parallel.pp=2"])
    n = max(stage_parameters(config, stage) for stage in range(2)) // 2  # half is sent between two ranks
    # Gradients go by all-reduce, twice their bytes, but under ZeRO-3, and from stage 2 on with each of 8 microbatches.
    assert traffic() == pytest.approx([8 * n, (8 + 4) * n, (8 * 8 + 4) * n, 8 * (4 + 2 * 4) * n], rel=1e-6)
    # Parameters travel in bf16, gradients in fp32; a split backward gathers a third time.
    assert traffic(precision="bf16")[1:] == pytest.approx([(8 + 2) * n, (64 + 2) * n, 8 * (4 + 4) * n], rel=1e-6)
    assert traffic(pipeline="zb_h1")[3] == pytest.approx(8 * (4 + 3 * 4) * n, rel=1e-6)


def test_costly_combinations_are_told_with_what_is_cheaper() -> None:
    def told(*overrides: str) -> list[str]:
        base = ["parallel.pp=2", "parallel.dp=2", "parallel.tp=1", "trainer.micro_batch_size=1"]
        return [note for note in notes(compose([*base, *overrides]), World()) if note.startswith("ZeRO-")]

    assert told("zero=0") == told("zero=1") == told("zero=3", "parallel.dp=1") == []
    (two,), (three,) = told("zero=2"), told("zero=3")
    assert "zero=1 sends" in two and "zero=2" not in two
    assert "zero=1 sends" in three and "zero=2" in three and "MB" in three
