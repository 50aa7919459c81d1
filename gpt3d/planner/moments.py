"""The moments of a step at which a pipeline rank may hold most, read off its schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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
    """Those that no other moment of the same action exceeds in everything.

    A forward counts with its own microbatch; a backward at its start, with all of it, and at its end, without.
    """
    if kind != "gpipe":  # the others have reached their steady state by then
        microbatches = min(microbatches, 4 * stages)
    if kind == "interleaved" and chunks == 1:
        kind = "1f1b"
    held, postponed, graded = Counter[int](), Counter[int](), set[int]()
    found: set[Moment] = set()

    def note(action: Kind, chunk: int, ending: bool) -> None:
        in_held, in_postponed = (tuple(counter[c] for c in range(chunks)) for counter in (held, postponed))
        found.add(Moment(action, chunk, ending, in_held, in_postponed, tuple(c in graded for c in range(chunks))))

    for action in schedule(kind, stages, chunks, microbatches, rank):
        if action.kind is Kind.FORWARD:
            held[action.chunk] += 1
            note(action.kind, action.chunk, False)
            continue
        note(action.kind, action.chunk, False)
        if action.kind is Kind.BACKWARD_WEIGHT:
            postponed[action.chunk] -= 1
        else:
            held[action.chunk] -= 1
        if action.kind is Kind.BACKWARD_INPUT:
            postponed[action.chunk] += 1
        else:
            graded.add(action.chunk)
        note(action.kind, action.chunk, True)
    return tuple(_largest(found))


def _largest(found: Iterable[Moment]) -> list[Moment]:
    """Without moments that another one of the same kind covers in every count."""
    kept: list[Moment] = []
    for moment in sorted(found, key=lambda m: (sum(m.held) + sum(m.postponed), m), reverse=True):
        if not any(_covers(other, moment) for other in kept):
            kept.append(moment)
    return kept


def _covers(a: Moment, b: Moment) -> bool:
    if a[:3] != b[:3]:
        return False
    mine, theirs = (*a.held, *a.postponed, *a.graded), (*b.held, *b.postponed, *b.graded)
    return all(x >= y for x, y in zip(mine, theirs, strict=True))
