"""The learning rate as a function of the step."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gpt3d.config.schema import LrConfig
from gpt3d.optim.lr import lr_at


def curve(total: int, **settings: object) -> list[float]:
    return [lr_at(step, 1.0, LrConfig(**settings), total) for step in range(total)]  # type: ignore[arg-type]


def test_warmup_reaches_the_peak_on_its_last_step_and_never_wastes_the_first() -> None:
    values = curve(20, schedule="constant", warmup_steps=4)
    assert values[:5] == [0.25, 0.5, 0.75, 1.0, 1.0] and set(values[4:]) == {1.0}


def test_cosine_at_half_way() -> None:
    # the value that a run of 100 steps with 10 of warm-up must resume with at step 50
    assert curve(100, schedule="cosine", warmup_steps=10, min_ratio=0.0)[50] == pytest.approx(0.5868, abs=5e-5)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_ends_at_the_floor_and_stays(schedule: str) -> None:
    values = curve(30, schedule=schedule, warmup_steps=2, decay_steps=20, min_ratio=0.1)
    assert values[2] == 1.0 and values[20:] == pytest.approx([0.1] * 10)
    assert all(a >= b for a, b in pairwise(values[2:]))


def test_wsd_is_flat_then_falls_over_the_last_steps() -> None:
    values = curve(100, schedule="wsd", warmup_steps=5, decay_steps=10, min_ratio=0.0)
    assert values[5:91] == [1.0] * 86 and values[99] == pytest.approx(0.1)
    assert curve(100, schedule="wsd", min_ratio=0.0)[89:92] == pytest.approx([1.0, 1.0, 0.9])


def test_it_depends_on_the_step_alone() -> None:
    values = curve(50, schedule="cosine", warmup_steps=5)
    assert [lr_at(s, 1.0, LrConfig(schedule="cosine", warmup_steps=5), 50) for s in range(25, 50)] == values[25:]
