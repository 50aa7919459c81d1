"""What is said to have arrived has, whatever the timing, and what is still open does not grow with the microbatches."""

from __future__ import annotations

import random

import pytest

from gpt3d.pipeline.delivery import Arrived, arrivals
from gpt3d.pipeline.schedule import Action, Kind, all_ranks, global_stage, sends_to
from gpt3d.pipeline.simulate import simulate

KINDS = [("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb_h1", 1)]


def most_open(kind: str, stages: int, chunks: int, microbatches: int) -> list[tuple[int, int]]:
    """For each rank the most activations and gradients sent and not yet known to have arrived."""
    schedules = all_ranks(kind, stages, chunks, microbatches)
    peaks = []
    for rank, known in enumerate(arrivals(schedules, chunks)):
        sent, peak = [0, 0], [0, 0]
        for action, arrived in zip(schedules[rank], known, strict=True):
            for direction in (0, 1):
                assert arrived[direction] <= sent[direction]
                peak[direction] = max(peak[direction], sent[direction] - arrived[direction])
            if sends_to(action, rank, stages, chunks) is not None:
                sent[action.kind is not Kind.FORWARD] += 1
        peaks.append((peak[0], peak[1]))
    return peaks


@pytest.mark.parametrize("stages", [2, 4, 7])
@pytest.mark.parametrize("kind, chunks", [(kind, chunks) for kind, chunks in KINDS if kind != "gpipe"])
def test_open_messages_do_not_grow_with_the_microbatches(kind: str, chunks: int, stages: int) -> None:
    few, many = most_open(kind, stages, chunks, 4 * stages), most_open(kind, stages, chunks, 12 * stages)
    assert few == many
    assert max(max(pair) for pair in many) <= 2 * stages * chunks


def test_1f1b_keeps_at_most_what_is_in_flight() -> None:
    assert most_open("1f1b", 4, 1, 32) == [(3, 0), (2, 3), (1, 2), (0, 1)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("kind, chunks", KINDS)
def test_arrived_is_never_claimed_too_early(kind: str, chunks: int, stages: int, seed: int) -> None:
    draw = random.Random(seed)
    schedules = all_ranks(kind, stages, chunks, 2 * stages + 1)
    times = [[draw.uniform(0.1, 5.0) for _ in range(stages * chunks)] for _ in range(2)]
    timeline = simulate(schedules, times[0], times[1], p2p_time=draw.uniform(0.0, 2.0))
    ended = {(rank, span.action): span.end for rank, spans in enumerate(timeline.ranks) for span in spans}

    def taken(rank: int, action: Action) -> float:
        """When the receiver of an action's result was done with its own action on it."""
        forward, destination = action.kind is Kind.FORWARD, sends_to(action, rank, stages, chunks)
        assert destination is not None
        chunk = (global_stage(rank, action.chunk, stages) + (1 if forward else -1)) // stages
        kinds = [Kind.FORWARD] if forward else [Kind.BACKWARD, Kind.BACKWARD_INPUT]
        return next(ended[key] for k in kinds if (key := (destination, Action(k, action.microbatch, chunk))) in ended)

    for rank, known in enumerate(arrivals(schedules, chunks)):
        sent: list[list[float]] = [[], []]
        for span, arrived in zip(timeline.ranks[rank], known, strict=True):
            for direction in (0, 1):
                assert all(end <= span.start for end in sent[direction][: arrived[direction]])
            if sends_to(span.action, rank, stages, chunks) is not None:
                sent[span.action.kind is not Kind.FORWARD].append(taken(rank, span.action))


def test_two_stages_by_hand() -> None:
    # Rank 0: F0 F1 B0 F2 B1 B2. The gradient of microbatch i says that its activation has arrived, and nothing more.
    (first, last) = arrivals(all_ranks("1f1b", 2, 1, 3), 1)
    assert first == [Arrived(0, 0), Arrived(0, 0), Arrived(1, 0), Arrived(1, 0), Arrived(2, 0), Arrived(3, 0)]
    # Rank 1: F0 B0 F1 B1 F2 B2. Rank 0 sends activation 2 after it took gradient 0.
    assert last == [Arrived(0, 0)] * 4 + [Arrived(0, 1)] * 2
