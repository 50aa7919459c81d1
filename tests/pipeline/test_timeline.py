"""Recording a step, and what is drawn from it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpt3d.pipeline.picture import bubble_in_words, chrome_trace, write_timelines
from gpt3d.pipeline.schedule import all_ranks
from gpt3d.pipeline.simulate import Timeline, ideal_of, simulate
from gpt3d.verification.cases import LR, Case
from tests.pipeline import runs


def recorded_step(case: Case, count: int) -> Timeline | None:
    learner = runs.new_learner(case)
    learner.step(runs.rows(count, case.micro), LR)
    learner.start_recording()
    learner.step(runs.rows(count, case.micro), LR)
    timeline = learner.take_timeline()
    learner.step(runs.rows(count, case.micro), LR)  # no longer recorded
    assert learner.executor.recorder is None
    return timeline


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 2), ("zb_h1", 1)])
def test_every_action_is_recorded_in_order(world: Callable[..., list[Any]], schedule: str, chunks: int) -> None:
    case = Case(pp=2, tp=2, micro=1, schedule=schedule, chunks=chunks)
    timeline, *others = world(recorded_step, case, 4, n=4)
    assert others == [None] * 3
    assert isinstance(timeline, Timeline)
    assert [[span.action for span in spans] for spans in timeline.ranks] == all_ranks(schedule, 2, chunks, 4)
    for spans in timeline.ranks:
        assert all(span.start <= span.end for span in spans)
        assert all(first.end <= second.start for first, second in pairwise(spans))
    assert 0 < timeline.bubble < 1


def test_a_single_stage_has_a_timeline_too(world: Callable[..., list[Any]]) -> None:
    (timeline,) = world(recorded_step, Case(micro=1, zero=0), 3, n=1)
    assert len(timeline.ranks) == 1 and len(timeline.ranks[0]) == 6


def test_ideal_of_an_ideal_timeline_is_itself() -> None:
    for kind, chunks in (("1f1b", 1), ("zb_h1", 1), ("interleaved", 2), ("gpipe", 2)):
        timeline = simulate(all_ranks(kind, 4, chunks, 8), 1.0, 2.0)
        assert ideal_of(timeline, chunks) == timeline


def test_pictures_and_trace(tmp_path: Path) -> None:
    steps = [simulate(all_ranks("zb_h1", 4, 1, 8), 0.020, 0.040, p2p_time=0.002)] * 2
    png, svg, trace = write_timelines(steps, 1, "zb_h1, 4 stages, 8 microbatches", tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000
    assert ET.parse(svg).getroot().tag.endswith("svg")
    events = json.loads(trace.read_text())["traceEvents"]
    actions = [event for event in events if event["ph"] == "X"]
    assert len(actions) == 2 * sum(len(spans) for spans in steps[0].ranks)
    assert {event["tid"] for event in actions} == {0, 1, 2, 3}
    assert max(event["ts"] + event["dur"] for event in actions) == pytest.approx(2 * steps[0].makespan * 1e6)
    assert min(event["dur"] for event in actions) == pytest.approx(20_000)
    assert chrome_trace([]) == {"displayTimeUnit": "ms", "traceEvents": []}
    assert f"{steps[0].bubble:.1%} measured" in bubble_in_words(steps, 1)
