"""The moments of a step at which a pipeline rank may hold most, read off its schedule."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from gpt3d.pipeline.schedule import Kind, schedule


class Moment(NamedTuple):
    """The start of an action on `chunk`, or (`ending`) its end. For each chunk: microbatches between forward and input
    gradient (`held`) and between input and weight gradient (`postponed`), and whether weights have gradients yet."""

    kind: Kind
    chunk: int
    ending: bool
    held: tuple[int, ...]
    postponed: tuple[int, ...]
    graded: tuple[bool, ...]


@cache
def moments(kind: str, stages: int, chunks: int, microbatches: int, rank: int) -> tuple[Moment, ...]:
    """Of the actions of each kind, on the first chunk, the last and the others, the fullest: before any weight has a
    gradient, with some, and with all of them. A forward counts with its own microbatch; a backward at its start, with
    all of it, and at its end, without.
    """
    if kind != "gpipe":  # the others have reached their steady state by then
        microbatches = min(microbatches, 2 * stages)
    if kind == "interleaved" and chunks == 1:
        kind = "1f1b"
    held, postponed, graded = [0] * chunks, [0] * chunks, [False] * chunks
    most: dict[tuple[Kind, int, bool, int], tuple[int, Moment]] = {}
    total = 0

    def note(action: Kind, chunk: int, ending: bool) -> None:
        key = action, min(chunk, 1) if chunk < chunks - 1 else 2, ending, any(graded) + all(graded)
        if key not in most or total > most[key][0]:
            most[key] = total, Moment(action, chunk, ending, tuple(held), tuple(postponed), tuple(graded))

    for action in schedule(kind, stages, chunks, microbatches, rank):
        chunk, forward = action.chunk, action.kind is Kind.FORWARD
        if forward:
            held[chunk] += 1
            total += 1
        note(action.kind, chunk, False)
        if forward:
            continue
        if action.kind is Kind.BACKWARD_INPUT:
            postponed[chunk] += 1
        else:
            graded[chunk] = True
            total -= 1
        (postponed if action.kind is Kind.BACKWARD_WEIGHT else held)[chunk] -= 1
        note(action.kind, chunk, True)
    return tuple(moment for _, moment in most.values())
