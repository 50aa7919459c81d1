"""Times on schedules against the closed forms of the papers; integers in, so that equal means equal."""

import pytest

from gpt3d.pipeline.check import ScheduleError
from gpt3d.pipeline.schedule import Action, Kind, all_ranks
from gpt3d.pipeline.simulate import Span, Timeline, draw, simulate

STAGES = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("backward", [1, 2, 3])
def test_bubble_of_gpipe_and_1f1b(kind: str, backward: int) -> None:
    for p in STAGES:
        for m in (1, 2, 3, 7, 8, 16):
            assert simulate(all_ranks(kind, p, 1, m), 1, backward).bubble == (p - 1) / (m + p - 1)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("backward", [1, 2, 3])
def test_interleaving_divides_the_bubble(chunks: int, backward: int) -> None:
    for p in STAGES:
        for m in (p, 2 * p, 5 * p):
            timeline = simulate(all_ranks("interleaved", p, chunks, m), 1, backward)
            assert timeline.bubble == (p - 1) / (chunks * m + p - 1)
        for m in (1, p + 1, 3 * p - 1):  # as long as the full group at most
            full = simulate(all_ranks("interleaved", p, chunks, -(-m // p) * p), 1, backward)
            assert simulate(all_ranks("interleaved", p, chunks, m), 1, backward).makespan <= full.makespan


@pytest.mark.parametrize(("forward", "inputs", "weight"), [(1, 1, 1), (2, 2, 1), (3, 2, 2)])
def test_zero_bubble_h1(forward: int, inputs: int, weight: int) -> None:
    for p in STAGES:
        for m in (p, p + 1, 3 * p):
            timeline = simulate(all_ranks("zb_h1", p, 1, m), forward, inputs + weight, inputs, weight)
            idle = (p - 1) * (forward + inputs - weight)  # Qi et al. 2023; 1F1B: (p - 1) (F + B + W)
            assert timeline.makespan == m * (forward + inputs + weight) + idle
        for m in range(1, p):
            plain = simulate(all_ranks("1f1b", p, 1, m), forward, inputs + weight)
            split = simulate(all_ranks("zb_h1", p, 1, m), forward, inputs + weight, inputs, weight)
            assert split.makespan < plain.makespan


def test_zero_bubble_h1_is_a_third_of_the_1f1b_bubble() -> None:
    idle = [simulate(all_ranks(kind, 4, 1, 12), 1, 2).makespan - 12 * 3 for kind in ("1f1b", "zb_h1")]
    assert idle == [9, 3]


def test_the_slowest_stage_sets_the_pace() -> None:
    assert simulate(all_ranks("1f1b", 3, 1, 50), [1, 2, 1], [1, 2, 1]).makespan == 1 + 50 * 4 + 1
    by_stage = simulate(all_ranks("interleaved", 2, 2, 2), [1, 2, 3, 4], 1).ranks
    assert [by_stage[1][0], by_stage[1][2]] == [
        Span(Action(Kind.FORWARD, 0), 1, 3),
        Span(Action(Kind.FORWARD, 0, 1), 6, 10),
    ]
    with pytest.raises(ValueError, match="forward_time has 3 entries for 2"):
        simulate(all_ranks("1f1b", 2, 1, 2), [1, 2, 1], 1)


def test_messages_take_time_between_ranks_only() -> None:
    assert simulate(all_ranks("1f1b", 3, 1, 1), 1, 2, p2p_time=5).makespan == 9 + 4 * 5
    assert simulate(all_ranks("interleaved", 1, 2, 3), 1, 2, p2p_time=5).bubble == 0


def test_a_deadlock_is_an_error_not_a_time() -> None:
    forward, backward = Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0)
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate([[backward, forward], [forward, backward]], 1, 1)


def test_measured_times_give_a_bubble_wherever_the_clock_begins() -> None:
    forward, backward = Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0)
    timeline = Timeline([[Span(forward, 100, 101), Span(backward, 103, 104)], [Span(forward, 101, 103)]])
    assert (timeline.makespan, timeline.bubble) == (4, 0.5)


def test_drawing() -> None:
    assert draw(simulate(all_ranks("1f1b", 2, 1, 2), 1, 2)).splitlines() == [
        "rank 0: F0 F1 .  .  B0 == .  B1 ==",
        "rank 1: .  F0 B0 == F1 B1 == .  .",
    ]
    assert draw(simulate(all_ranks("interleaved", 2, 2, 2), 10, 10)).splitlines() == [
        "rank 0: F0   F1   F0.1 F1.1 .    B0.1 .    B1.1 B0   B1",
        "rank 1: .    F0   F1   F0.1 B0.1 F1.1 B1.1 B0   B1   .",
    ]
