"""Proof that the schedules of all ranks fit together: complete, in order, free of deadlock, and how much they hold.

Model of the transport: a message travels on a one-directional first-in-first-out channel (source rank, destination
rank, activations or gradients). Sends do not block, receives block. Each rank runs its list in order, so what a receive
gets does not depend on timing, and one run that ends proves every run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from gpt3d.pipeline.schedule import Action, Kind, global_stage, receives_from, sends_to

Schedules = Sequence[Sequence[Action]]


class ScheduleError(ValueError):
    """The schedules do not fit together; `rank` and `action` are the first offender."""

    def __init__(self, rank: int, action: Action, why: str) -> None:
        super().__init__(f"pipeline schedule, rank {rank}, action {action}: {why}")
        self.rank = rank
        self.action = action


@dataclass(frozen=True)
class Report:
    """What a valid schedule costs. In flight counts (microbatch, chunk) pairs, the largest number at once, per rank."""

    microbatches: int
    messages: int  # between ranks, both directions, all channels together
    in_flight: list[int]  # forwards whose weight gradient is still to come: what activation memory is sized by
    in_flight_input: list[int]  # forwards whose input gradient is still to come; equal to the former unless split


# A first-in-first-out connection: source rank, destination rank, True for activations (forward) or False for gradients.
Channel = tuple[int, int, bool]


def check(schedules: Schedules, stages: int, chunks: int, microbatches: int | None = None) -> Report:
    """Prove `schedules` (by rank) or raise ScheduleError. `microbatches` None: as many as the highest number says."""
    if len(schedules) != stages:
        raise ValueError(f"{len(schedules)} schedules given for {stages} pipeline stages")
    if microbatches is None:
        microbatches = 1 + max((action.microbatch for actions in schedules for action in actions), default=-1)
    held = [_check_rank(rank, actions, chunks, microbatches) for rank, actions in enumerate(schedules)]
    messages = 0
    for rank, action in execution_order(schedules, chunks):
        messages += sends_to(action, rank, stages, chunks) not in (None, rank)
    return Report(microbatches, messages, [weight for weight, _ in held], [inputs for _, inputs in held])


# How far a (microbatch, chunk) pair has come, and what each kind of action makes of it; the rest is an error.
_NEXT: dict[tuple[str, Kind], str] = {
    ("not started", Kind.FORWARD): "forward done",
    ("forward done", Kind.BACKWARD): "done",
    ("forward done", Kind.BACKWARD_INPUT): "input gradient done",
    ("input gradient done", Kind.BACKWARD_WEIGHT): "done",
}


def _check_rank(rank: int, actions: Sequence[Action], chunks: int, microbatches: int) -> tuple[int, int]:
    """Every pair once and in order on this rank; returns the peaks in flight, until weight and until input gradient."""
    state = {(i, chunk): "not started" for i in range(microbatches) for chunk in range(chunks)}
    weight = weight_peak = inputs = inputs_peak = 0
    for action in actions:
        kind = action.kind
        pair = (action.microbatch, action.chunk)
        if pair not in state:
            raise ScheduleError(rank, action, f"outside {microbatches} microbatches and {chunks} chunks")
        after = _NEXT.get((state[pair], kind))
        if after is None:
            raise ScheduleError(rank, action, f"not possible when this microbatch and chunk is: {state[pair]}")
        state[pair] = after
        if kind is Kind.FORWARD:
            weight, inputs = weight + 1, inputs + 1
            weight_peak, inputs_peak = max(weight_peak, weight), max(inputs_peak, inputs)
        else:
            weight -= kind is not Kind.BACKWARD_INPUT
            inputs -= kind is not Kind.BACKWARD_WEIGHT
    for (microbatch, chunk), last in state.items():
        if last != "done":
            missing = next(kind for before, kind in _NEXT if before == last)
            raise ScheduleError(rank, Action(missing, microbatch, chunk), f"missing: the list ends with it {last}")
    return weight_peak, inputs_peak


def execution_order(schedules: Schedules, chunks: int) -> Iterator[tuple[int, Action]]:
    """All (rank, action) in one order in which they can run; ScheduleError at a crossed message or a deadlock."""
    stages = len(schedules)
    sent: defaultdict[Channel, deque[tuple[int, int]]] = defaultdict(deque)  # (microbatch, global stage it is for)
    position = [0] * stages
    waiting: dict[Channel, int] = {}
    runnable = deque(range(stages))
    while runnable:
        rank = runnable.popleft()
        for action in islice(schedules[rank], position[rank], None):
            forward = action.kind is Kind.FORWARD
            stage = global_stage(rank, action.chunk, stages)
            source = receives_from(action, rank, stages, chunks)
            if source is not None:
                channel = (source, rank, forward)
                if not sent[channel]:
                    waiting[channel] = rank
                    break
                got = sent[channel].popleft()
                if got != (action.microbatch, stage):
                    why = f"the next message from rank {source} is microbatch {got[0]} for global stage {got[1]}"
                    raise ScheduleError(rank, action, f"{why}: sent and received in different orders")
            yield rank, action
            position[rank] += 1
            destination = sends_to(action, rank, stages, chunks)
            if destination is not None:
                channel = (rank, destination, forward)
                sent[channel].append((action.microbatch, stage + 1 if forward else stage - 1))
                if channel in waiting:
                    runnable.append(waiting.pop(channel))
    if waiting:
        stuck = [(source, rank, schedules[rank][position[rank]]) for source, rank, _ in waiting]
        why = "; ".join(f"rank {rank} waits at {action} for rank {source}" for source, rank, action in stuck)
        raise ScheduleError(stuck[0][1], stuck[0][2], f"deadlock: {why}")
