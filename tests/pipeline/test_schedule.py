"""Schedules are proved, not sampled: completeness, order, no deadlock, peaks; and the checker finds planted faults."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt3d.pipeline.check import ScheduleError, check
from gpt3d.pipeline.schedule import KINDS, Action, Kind, all_ranks, global_stage, receives_from, schedule, sends_to

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT
CHUNKS = {"gpipe": (1, 2, 3, 4), "1f1b": (1,), "interleaved": (2, 3, 4), "zb_h1": (1,)}
CASES = [(kind, chunks) for kind in KINDS for chunks in CHUNKS[kind]]


def text(actions: list[Action]) -> str:
    return " ".join(map(str, actions))


def prove(kind: str, stages: int, chunks: int, microbatches: int) -> None:
    """The checker passes and the peaks are those that the papers give."""
    report = check(all_ranks(kind, stages, chunks, microbatches), stages, chunks, microbatches)
    to_last = [stages - rank for rank in range(stages)]
    assert report.messages == (2 * microbatches * (stages * chunks - 1) if stages > 1 else 0)
    if kind == "gpipe":
        assert report.in_flight == report.in_flight_input == [microbatches * chunks] * stages
    elif kind == "1f1b":
        assert report.in_flight == report.in_flight_input == [min(microbatches, n) for n in to_last]
    elif kind == "zb_h1":
        assert report.in_flight == [min(microbatches, stages)] * stages
        assert report.in_flight_input == [min(microbatches, n) for n in to_last]
    else:
        bound = [min(microbatches * chunks, 2 * n - 1 + (chunks - 1) * stages) for n in to_last]
        exact = microbatches % stages == 0
        assert report.in_flight == bound if exact else all(map(int.__le__, report.in_flight, bound))


@pytest.mark.parametrize(("kind", "chunks"), CASES)
def test_every_stage_count_at_the_borders(kind: str, chunks: int) -> None:
    for stages in range(1, 17):
        around = {1, 2, 3, stages - 1, stages, stages + 1, 2 * stages - 1, 2 * stages, 2 * stages + 1}
        for microbatches in around - {0}:
            prove(kind, stages, chunks, microbatches)


@settings(max_examples=150)
@given(st.sampled_from(CASES), st.integers(1, 16), st.integers(1, 64))
def test_any_size(case: tuple[str, int], stages: int, microbatches: int) -> None:
    prove(case[0], stages, case[1], microbatches)


def test_orders_of_the_papers() -> None:
    assert [text(s) for s in all_ranks("1f1b", 3, 1, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert text(schedule("1f1b", 1, 1, 3, 0)) == "F0 B0 F1 B1 F2 B2"
    assert text(schedule("gpipe", 2, 1, 3, 1)) == "F0 F1 F2 B0 B1 B2"
    assert [text(s) for s in all_ranks("interleaved", 2, 2, 2)] == [
        "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1",
    ]
    assert [text(s) for s in all_ranks("zb_h1", 3, 1, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_the_routes_walk_through_the_whole_model(stages: int) -> None:
    chunks, rank, chunk = 3, 0, 0
    visited = [global_stage(rank, chunk, stages)]
    while (following := sends_to(Action(F, 0, chunk), rank, stages, chunks)) is not None:
        chunk += following <= rank
        assert receives_from(Action(F, 0, chunk), following, stages, chunks) == rank
        assert sends_to(Action(Kind.BACKWARD_INPUT, 0, chunk), following, stages, chunks) == rank
        rank = following
        visited.append(global_stage(rank, chunk, stages))
    assert visited == list(range(stages * chunks))
    assert receives_from(Action(B, 0, chunk), rank, stages, chunks) is None
    assert receives_from(Action(W, 0, 0), 0, stages, chunks) is sends_to(Action(W, 0, 1), 0, stages, chunks) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpip", 2, 1, 2, 0), "gpipe, 1f1b, interleaved, zb_h1"),
        (("interleaved", 2, 1, 2, 0), "pipeline.chunks to 2 or more"),
        (("1f1b", 2, 2, 2, 0), "pipeline.schedule=interleaved"),
        (("1f1b", 2, 1, 0, 0), "microbatches >= 1"),
        (("1f1b", 2, 1, 2, 2), "rank 2"),
    ],
)
def test_unsuitable_sizes_are_refused(arguments: tuple[str, int, int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        schedule(*arguments)


def broken(kind: str, rank: int, edit: str) -> list[list[Action]]:
    """A valid schedule of 3 stages and 4 microbatches with one fault planted on `rank`."""
    ranks = all_ranks(kind, 3, 1, 4)
    actions = ranks[rank]
    if edit == "swap first two forwards":
        actions[0], actions[1] = actions[1], actions[0]
    elif edit == "drop last":
        actions.pop()
    elif edit == "repeat first":
        actions.insert(3, actions[0])
    elif edit == "backward first":
        actions.insert(0, actions.pop(actions.index(Action(B, 0))))
    elif edit == "weight first":
        actions.insert(1, actions.pop(actions.index(Action(W, 0))))
    elif edit == "whole and split":
        actions.append(Action(W, 3))
    elif edit == "unknown chunk":
        actions[0] = Action(F, 0, 1)
    return ranks


@pytest.mark.parametrize(
    ("kind", "rank", "edit", "action", "words"),
    [
        ("1f1b", 1, "swap first two forwards", "F1", "different orders"),
        ("1f1b", 0, "drop last", "B3", "missing"),
        ("zb_h1", 1, "drop last", "W3", "missing"),
        ("1f1b", 1, "repeat first", "F0", "is: done"),
        ("1f1b", 2, "backward first", "B0", "not started"),
        ("zb_h1", 1, "weight first", "W0", "is: forward done"),
        ("1f1b", 1, "whole and split", "W3", "is: done"),
        ("1f1b", 1, "unknown chunk", "F0.1", "outside"),
    ],
)
def test_the_checker_names_the_offender(kind: str, rank: int, edit: str, action: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words) as error:
        check(broken(kind, rank, edit), 3, 1)
    assert (error.value.rank, str(error.value.action)) == (rank, action)


def test_a_deadlock_is_found_and_every_blocked_rank_named() -> None:
    ranks = [[Action(F, 0), Action(F, 1), Action(B, 0), Action(B, 1)] for _ in range(2)]
    check(ranks, 2, 1)
    ranks[0] = [Action(F, 0), Action(B, 0), Action(F, 1), Action(B, 1)]  # wants B0 before it sends what rank 1 wants
    with pytest.raises(ScheduleError, match="deadlock") as error:
        check(ranks, 2, 1)
    assert "rank 0 waits at B0 for rank 1" in str(error.value)
    assert "rank 1 waits at F1 for rank 0" in str(error.value)


def test_a_microbatch_that_all_ranks_forget_is_found() -> None:
    check(all_ranks("1f1b", 2, 1, 3), 2, 1)
    with pytest.raises(ScheduleError, match="missing"):
        check(all_ranks("1f1b", 2, 1, 3), 2, 1, microbatches=4)
    with pytest.raises(ValueError, match="2 schedules given for 3"):
        check(all_ranks("1f1b", 2, 1, 3), 3, 1)
