"""Which of its messages a rank knows to have arrived, at each of its actions.

A send is over only when its receiver takes it, and not every backend can be asked (gloo's sends are complete only once
waited for). But who receives a gradient knows that the activation it answers was received before. Following all such
chains (vector clocks; Fidge 1988, Mattern 1989) tells which sends can be waited for without waiting, so that their
memory is free again: a bound that depends on the schedule alone, not on timing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

from gpt3d.pipeline.check import Channel, Schedules, execution_order
from gpt3d.pipeline.schedule import Kind, global_stage, receives_from, sends_to


class Arrived(NamedTuple):
    """How many of the activations and gradients that a rank has sent in this step are surely with their receivers."""

    activations: int
    gradients: int


def arrivals(schedules: Schedules, chunks: int) -> list[list[Arrived]]:
    """For each rank and each of its actions: what has arrived when that action's own message is there."""
    stages = len(schedules)
    consumer = [
        {(a.kind is Kind.FORWARD, a.microbatch, a.chunk): i for i, a in enumerate(actions) if _receives(a.kind)}
        for actions in schedules
    ]
    known = [[0] * stages for _ in range(stages)]  # [rank][other]: actions of `other` that `rank` knows to be over
    travelling: defaultdict[Channel, deque[list[int]]] = defaultdict(deque)  # what the sender knew
    sent: defaultdict[tuple[int, bool], deque[tuple[int, int]]] = defaultdict(deque)  # (receiver, its action), waiting
    arrived: defaultdict[tuple[int, bool], int] = defaultdict(int)
    result: list[list[Arrived]] = [[] for _ in range(stages)]
    for rank, action in execution_order(schedules, chunks):
        forward = action.kind is Kind.FORWARD
        source = receives_from(action, rank, stages, chunks)
        if source is not None:
            known[rank] = list(map(max, known[rank], travelling[source, rank, forward].popleft()))
        for direction in (True, False):
            waiting = sent[rank, direction]
            while waiting and known[rank][waiting[0][0]] > waiting[0][1]:
                waiting.popleft()
                arrived[rank, direction] += 1
        result[rank].append(Arrived(arrived[rank, True], arrived[rank, False]))
        known[rank][rank] = len(result[rank])
        destination = sends_to(action, rank, stages, chunks)
        if destination is not None:
            travelling[rank, destination, forward].append(list(known[rank]))
            chunk = (global_stage(rank, action.chunk, stages) + (1 if forward else -1)) // stages
            position = consumer[destination][forward, action.microbatch, chunk]
            sent[rank, forward].append((destination, position))
    return result


def _receives(kind: Kind) -> bool:
    """Whether such an action can take a message."""
    return kind is not Kind.BACKWARD_WEIGHT
