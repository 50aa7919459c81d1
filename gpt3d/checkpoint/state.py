"""The numbers of a checkpoint, by canonical key, as this rank holds them."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from gpt3d.checkpoint.pieces import Piece, global_pieces
from gpt3d.checkpoint.planner import Pieces, State
from gpt3d.config.schema import ModelConfig
from gpt3d.model.gpt import VOCABULARY
from gpt3d.parallel.placement import Placement
from gpt3d.zero.fragments import Fragment, OptimizerState


def held_state(state: OptimizerState, model: ModelConfig) -> State:
    """Every piece that this rank holds, to be read into."""
    return state_of(state.fragments(), model)


def state_of(fragments: Iterable[Fragment], model: ModelConfig) -> State:
    """The pieces of global tensors that these fragments are."""
    result: State = {}
    for fragment in fragments:
        _add(result, fragment, 0, fragment.tensors, model)
    return result


def owned_state(state: OptimizerState, model: ModelConfig) -> State:
    """The pieces that this rank writes: each number of the model is owned by exactly one rank, evenly spread."""
    result: State = {}
    for fragment in state.fragments():
        place = fragment.placement
        if zlib.crc32(place.name.encode()) % place.copies != place.copy:
            continue
        length = next(iter(fragment.tensors.values())).numel()
        low, high = (length * (fragment.copy + i) // fragment.copies for i in (0, 1))
        _add(result, fragment, low, {k: t[low:high] for k, t in fragment.tensors.items()}, model)
    return result


def _add(result: State, fragment: Fragment, skip: int, tensors: dict[str, Tensor], model: ModelConfig) -> None:
    place = fragment.placement
    shape = saved_shape(place, model)
    for kind, flat in tensors.items():
        parts = list(global_pieces(place, shape, fragment.start + skip, flat))
        if parts:
            result.setdefault(f"{kind}/{place.name}", Pieces(shape)).parts.extend(parts)


def saved_shape(place: Placement, model: ModelConfig) -> tuple[int, ...]:
    """The global shape without the padding of the vocabulary."""
    return (model.vocab_size, *place.shape[1:]) if place.name in VOCABULARY else place.shape


class HostCopy:
    """A copy of a state in host memory that is allocated once; pinned where the state is on a GPU.

    Forward and backward only read what is saved, so the copy is made beside them, and the next update waits for it
    (Maurya et al. 2024, DataStates-LLM): `begin` and `before_update` on the training thread, `complete` on
    the writer's.
    """

    def __init__(self) -> None:
        self.buffer = torch.empty(0)
        self.todo: list[tuple[Tensor, Tensor]] = []
        self.copied = threading.Event()
        self.copied.set()
        self.stream: torch.cuda.Stream | None = None
        self.done: torch.cuda.Event | None = None

    def begin(self, state: State) -> State:
        """Start copying; the result holds the values after `complete`, until the next call."""
        total = sum(pieces.numel for pieces in state.values())
        device = next((part.values.device for pieces in state.values() for part in pieces.parts), torch.device("cpu"))
        if self.buffer.numel() < total:
            self.buffer = torch.empty(total, pin_memory=device.type == "cuda")
        result: State = {}
        at = 0
        for key, pieces in state.items():
            result[key] = Pieces(pieces.shape)
            for part in pieces.parts:
                count = math.prod(part.values.shape)
                target = self.buffer[at : at + count].view(part.values.shape)
                self.todo.append((target, part.values))
                result[key].parts.append(Piece(part.offsets, target))
                at += count
        if device.type == "cuda":
            self._copy_on_stream(device)
        else:
            self.copied.clear()
        return result

    def _copy_on_stream(self, device: torch.device) -> None:
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))  # the update that made these values
        with torch.cuda.stream(self.stream):
            self._copy()
            self.done = self.stream.record_event()

    def _copy(self) -> None:
        for target, values in self.todo:
            target.copy_(values, non_blocking=True)
        self.todo = []

    def complete(self) -> None:
        """Return when the copy is whole; on a CPU this makes it."""
        if self.done is not None:
            self.done.synchronize()
            return
        try:
            self._copy()
        finally:
            self.copied.set()

    def before_update(self) -> None:
        """Let no update begin before the copy is whole. On a GPU its stream waits, not this thread."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        self.copied.wait()
