"""The numbers of a checkpoint, by canonical key, as this rank holds them."""

from __future__ import annotations

import math
import zlib

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
    result: State = {}
    for fragment in state.fragments():
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
    """A copy of a state in host memory that is allocated once; pinned where the state is on a GPU."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0)

    def take(self, state: State) -> State:
        """Copy now; the result is valid until the next call."""
        total = sum(pieces.numel for pieces in state.values())
        device = next((part.values.device for pieces in state.values() for part in pieces.parts), torch.device("cpu"))
        if self.buffer.numel() < total:
            self.buffer = torch.empty(total, pin_memory=device.type == "cuda")
        copied: State = {}
        at = 0
        for key, pieces in state.items():
            copied[key] = Pieces(pieces.shape)
            for part in pieces.parts:
                count = math.prod(part.values.shape)
                target = self.buffer[at : at + count].view(part.values.shape)
                target.copy_(part.values, non_blocking=True)
                copied[key].parts.append(Piece(part.offsets, target))
                at += count
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return copied
