"""Times on a schedule: when each action begins and ends, the makespan and the bubble.

The executor fills the same `Timeline` with measured times, so that ideal and measured are compared and drawn alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpt3d.pipeline.check import Schedules, execution_order
from gpt3d.pipeline.schedule import Action, Kind, global_stage, receives_from

Times = float | Sequence[float]  # one time for all, or one for each global stage; any unit


class Span(NamedTuple):
    """One action and when it ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each rank, in the order they ran."""

    ranks: list[list[Span]]

    @property
    def start(self) -> float:
        """Start of the first action on any rank."""
        return min(span.start for spans in self.ranks for span in spans)

    @property
    def makespan(self) -> float:
        """From the first start to the last end on any rank."""
        return max(span.end for spans in self.ranks for span in spans) - self.start

    @property
    def bubble(self) -> float:
        """Idle share of ranks x makespan: (p - 1) / (m + p - 1) for 1F1B with equal times."""
        total = len(self.ranks) * self.makespan
        busy = sum(span.end - span.start for spans in self.ranks for span in spans)
        return (total - busy) / total if total else 0.0


def simulate(
    schedules: Schedules,
    forward_time: Times,
    backward_time: Times,
    input_time: Times | None = None,
    weight_time: Times | None = None,
    p2p_time: float = 0,
) -> Timeline:
    """Run `schedules` (by rank) as early as they can: in list order, each action when its message has come.

    `input_time` and `weight_time` are of the split backward, each half of `backward_time` if not given. A message takes
    `p2p_time` and holds up neither sender nor link. ScheduleError if the schedules deadlock.
    """
    stages = len(schedules)
    chunks = 1 + max((action.chunk for actions in schedules for action in actions), default=0)
    backward = _per_stage("backward_time", backward_time, stages * chunks)
    half = [time / 2 for time in backward]
    times = {
        Kind.FORWARD: _per_stage("forward_time", forward_time, stages * chunks),
        Kind.BACKWARD: backward,
        Kind.BACKWARD_INPUT: half if input_time is None else _per_stage("input_time", input_time, stages * chunks),
        Kind.BACKWARD_WEIGHT: half if weight_time is None else _per_stage("weight_time", weight_time, stages * chunks),
    }
    ranks: list[list[Span]] = [[] for _ in range(stages)]
    ended: dict[tuple[bool, int, int], float] = {}  # (forward, microbatch, global stage) -> when its result was there
    for rank, action in execution_order(schedules, chunks):
        stage, forward = global_stage(rank, action.chunk, stages), action.kind is Kind.FORWARD
        start: float = ranks[rank][-1].end if ranks[rank] else 0
        source = receives_from(action, rank, stages, chunks)
        if source is not None:
            sent = ended[forward, action.microbatch, stage - 1 if forward else stage + 1]
            start = max(start, sent + (p2p_time if source != rank else 0))
        end = start + times[action.kind][stage]
        ranks[rank].append(Span(action, start, end))
        if action.kind is not Kind.BACKWARD_WEIGHT:
            ended[forward, action.microbatch, stage] = end
    return Timeline(ranks)


def draw(timeline: Timeline, unit: float | None = None) -> str:
    """Text picture, one line a rank, one cell a `unit` of time (default: the shortest action).

    F forward, B backward, I input gradient, W weight gradient, then microbatch.chunk; `=` runs on, `.` is idle.
    """
    spans = [span for rank in timeline.ranks for span in rank]
    unit = unit or min(span.end - span.start for span in spans if span.end > span.start)
    width = max(len(str(span.action)) for span in spans) + 1
    lines = []
    for rank, row in enumerate(timeline.ranks):
        cells = ["."] * round(timeline.makespan / unit)
        for span in row:
            first, last = (round((time - timeline.start) / unit) for time in (span.start, span.end))
            cells[first:last] = [str(span.action), *["=" * (width - 1)] * (last - first - 1)][: last - first]
        lines.append(f"rank {rank}: " + "".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def _per_stage(name: str, times: Times, count: int) -> list[float]:
    """`times` as one time for each of `count` global stages."""
    if isinstance(times, Sequence):
        if len(times) != count:
            raise ValueError(f"{name} has {len(times)} entries for {count} global stages (stages x chunks)")
        return list(times)
    return [times] * count


def ideal_of(measured: Timeline, chunks: int) -> Timeline:
    """The same actions as early as the schedule allows, messages free, each taking its mean measured time."""
    stages = len(measured.ranks)
    spent: dict[tuple[Kind, int], list[float]] = {}
    for rank, spans in enumerate(measured.ranks):
        for span in spans:
            key = (span.action.kind, global_stage(rank, span.action.chunk, stages))
            spent.setdefault(key, []).append(span.end - span.start)

    def times(kind: Kind) -> list[float]:
        return [_mean(spent.get((kind, stage), [])) for stage in range(stages * chunks)]

    schedules = [[span.action for span in spans] for spans in measured.ranks]
    return simulate(
        schedules,
        times(Kind.FORWARD),
        times(Kind.BACKWARD),
        times(Kind.BACKWARD_INPUT),
        times(Kind.BACKWARD_WEIGHT),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
