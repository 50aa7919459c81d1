"""Pipeline schedules as data: for each rank the list of actions it runs, in order.

A rank holds `chunks` model chunks (virtual stages); chunk c of rank r is global stage `c * stages + r`. Activations
travel up the global stages and gradients down. The executor runs these lists, `check` proves them, `simulate` puts
times on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action computes. BACKWARD is BACKWARD_INPUT and BACKWARD_WEIGHT in one."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


class Action(NamedTuple):
    """One piece of work of a rank: `kind` for microbatch `microbatch` on local model chunk `chunk`."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


def schedule(kind: str, stages: int, chunks: int, microbatches: int, rank: int) -> list[Action]:
    """The actions of pipeline rank `rank` out of `stages`, in order. ValueError if `kind` does not suit the sizes."""
    if kind not in KINDS:
        raise ValueError(f"pipeline.schedule={kind} is not known; choose one of {', '.join(KINDS)}")
    for name, value in (("stages", stages), ("chunks", chunks), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"a pipeline schedule needs {name} >= 1, got {name}={value}")
    if not 0 <= rank < stages:
        raise ValueError(f"rank {rank} is not one of the {stages} pipeline ranks, 0 to {stages - 1}")
    if kind == "interleaved" and chunks == 1:
        raise ValueError(
            "pipeline.schedule=interleaved with pipeline.chunks=1 has nothing to interleave; "
            "set pipeline.chunks to 2 or more, or pipeline.schedule=1f1b"
        )
    if kind in ("1f1b", "zb_h1") and chunks > 1:
        raise ValueError(
            f"pipeline.schedule={kind} runs one model chunk per rank, not pipeline.chunks={chunks}; "
            "set pipeline.chunks=1, or pipeline.schedule=interleaved"
        )
    return list(_GENERATORS[kind](stages, chunks, microbatches, rank))


def all_ranks(kind: str, stages: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """The schedules of all pipeline ranks, by rank."""
    return [schedule(kind, stages, chunks, microbatches, rank) for rank in range(stages)]


def global_stage(rank: int, chunk: int, stages: int) -> int:
    """Place of a rank's chunk in the whole model, 0 to `stages * chunks - 1`."""
    return chunk * stages + rank


def receives_from(action: Action, rank: int, stages: int, chunks: int) -> int | None:
    """The rank that sends what `action` needs (activation or output gradient), or None. One stage sends to itself."""
    if action.kind is Kind.FORWARD:
        return _below(action.chunk, rank, stages)
    return None if action.kind is Kind.BACKWARD_WEIGHT else _above(action.chunk, rank, stages, chunks)


def sends_to(action: Action, rank: int, stages: int, chunks: int) -> int | None:
    """The rank that needs the result of `action` (activation or input gradient), or None. One stage sends to itself."""
    if action.kind is Kind.FORWARD:
        return _above(action.chunk, rank, stages, chunks)
    return None if action.kind is Kind.BACKWARD_WEIGHT else _below(action.chunk, rank, stages)


def _below(chunk: int, rank: int, stages: int) -> int | None:
    """The rank of the global stage before this one."""
    return (rank - 1) % stages if rank or chunk else None


def _above(chunk: int, rank: int, stages: int, chunks: int) -> int | None:
    """The rank of the global stage after this one."""
    return (rank + 1) % stages if rank < stages - 1 or chunk < chunks - 1 else None


def _gpipe(stages: int, chunks: int, microbatches: int, rank: int) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al. 2019); several chunks one after the other, breadth first."""
    for chunk in range(chunks):
        yield from (Action(Kind.FORWARD, i, chunk) for i in range(microbatches))
    for chunk in reversed(range(chunks)):
        yield from (Action(Kind.BACKWARD, i, chunk) for i in range(microbatches))


def _1f1b(stages: int, chunks: int, microbatches: int, rank: int) -> Iterator[Action]:
    """Warm-up just long enough for the first gradient to come back, then one forward, one backward in turn.

    At most `stages - rank` microbatches in flight, however many there are (Narayanan et al. 2019, 2021).
    """
    warmup = min(microbatches, stages - rank - 1)
    yield from (Action(Kind.FORWARD, i) for i in range(warmup))
    for i in range(warmup, microbatches):
        yield Action(Kind.FORWARD, i)
        yield Action(Kind.BACKWARD, i - warmup)
    yield from (Action(Kind.BACKWARD, i) for i in range(microbatches - warmup, microbatches))


def _interleaved(stages: int, chunks: int, microbatches: int, rank: int) -> Iterator[Action]:
    """1F1B over chunks: `stages` microbatches go through chunk 0, then chunk 1, ...; then the next `stages`.

    The bubble shrinks by `chunks`, messages grow by it (Narayanan et al. 2021, section 2.2). A last group that is not
    full is scheduled as if it were; leaving the absent microbatches out, on all ranks alike, keeps every order valid.
    """
    steps = -(-microbatches // stages) * stages * chunks
    warmup = min(steps, 2 * (stages - rank - 1) + (chunks - 1) * stages)

    def action(kind: Kind, step: int) -> Action:
        chunk = step // stages % chunks
        microbatch = step // (stages * chunks) * stages + step % stages
        return Action(kind, microbatch, chunk if kind is Kind.FORWARD else chunks - 1 - chunk)

    def full() -> Iterator[Action]:
        yield from (action(Kind.FORWARD, step) for step in range(warmup))
        for step in range(warmup, steps):
            yield action(Kind.FORWARD, step)
            yield action(Kind.BACKWARD, step - warmup)
        yield from (action(Kind.BACKWARD, step) for step in range(steps - warmup, steps))

    return (a for a in full() if a.microbatch < microbatches)


def _zb_h1(stages: int, chunks: int, microbatches: int, rank: int) -> Iterator[Action]:
    """1F1B with a split backward: input gradients go out at once, weight gradients fill the cool-down (Qi et al. 2023).

    Rank r runs r weight gradients late, so every rank holds at most `stages` microbatches, as rank 0 does under 1F1B.
    Rank 0 sends no gradient on: it has nothing to gain from the split and runs plain 1F1B.
    """
    if rank == 0:
        yield from _1f1b(stages, chunks, microbatches, rank)
        return
    for action in _1f1b(stages, chunks, microbatches, rank):
        if action.kind is Kind.FORWARD:
            yield action
        else:
            yield Action(Kind.BACKWARD_INPUT, action.microbatch)
            if action.microbatch >= rank:
                yield Action(Kind.BACKWARD_WEIGHT, action.microbatch - rank)
    yield from (Action(Kind.BACKWARD_WEIGHT, i) for i in range(max(0, microbatches - rank), microbatches))


_GENERATORS: dict[str, Callable[[int, int, int, int], Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zb_h1": _zb_h1,
}
KINDS: tuple[str, ...] = tuple(_GENERATORS)
