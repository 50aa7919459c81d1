"""Planners of torch's distributed checkpoint (DCP) for pieces of global tensors.

DCP's own planners take one rectangle a tensor a rank, and do not notice a tensor that is only partly saved or loaded.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from gpt3d.checkpoint.pieces import Piece


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used or made; the message says which, why, and what to do."""

    show_traceback = False


@dataclass
class Pieces:
    """This rank's pieces of one global tensor: a value of the state dict."""

    shape: tuple[int, ...]
    parts: list[Piece] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(part.values.numel() for part in self.parts)

    def at(self, offsets: Any) -> Tensor:
        return next(part.values for part in self.parts if part.offsets == tuple(offsets))

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(part.offsets), part.values.shape) for part in self.parts]


State = dict[str, Pieces]


class PieceSavePlanner(SavePlanner):
    """Every rank writes its pieces as they are; the coordinator checks that together they are whole tensors."""

    state: State

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state = state_dict

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, pieces in self.state.items():
            for part, chunk in zip(pieces.parts, pieces.chunks(), strict=True):
                data = TensorWriteData(chunk, TensorProperties(dtype=part.values.dtype), torch.Size(pieces.shape))
                items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans, rewrite_index_hints=False)
        for key, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            have, want = sum(math.prod(chunk.sizes) for chunk in tensor.chunks), math.prod(tensor.size)
            if have != want or len({chunk.offsets for chunk in tensor.chunks}) != len(tensor.chunks):
                raise RuntimeError(f"the ranks would write {have:,} of {want:,} elements of {key}, or some twice")
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.state[write_item.index.fqn].at(write_item.index.offset)


class PieceLoadPlanner(LoadPlanner):
    """Fills every element of this rank's pieces, or says which tensor is missing, has another shape or a gap."""

    state: State
    metadata: Metadata

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self.state, self.metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for key, pieces in self.state.items() for item in self._reads(key, pieces)])

    def _reads(self, key: str, pieces: Pieces) -> list[ReadItem]:
        saved = self.metadata.state_dict_metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"the checkpoint has no {key}: it is of another model")
        if tuple(saved.size) != pieces.shape:
            raise CheckpointError(
                f"{key} has the shape {list(saved.size)} in the checkpoint and {list(pieces.shape)} in this model"
            )
        if saved.properties.dtype != torch.float32:
            raise CheckpointError(f"{key} is {saved.properties.dtype} in the checkpoint, not float32")
        if len({part.offsets for part in pieces.parts}) != len(pieces.parts):
            raise RuntimeError(f"this rank holds two copies of {key}; only one of them would be filled")
        items = create_read_items_for_chunk_list(key, saved, pieces.chunks())
        covered = sum(math.prod(item.lengths) for item in items)
        if covered != pieces.numel:
            raise CheckpointError(f"the checkpoint holds {covered:,} of the {pieces.numel:,} elements wanted of {key}")
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor in this checkpoint")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self.state[read_item.dest_index.fqn].at(read_item.dest_index.offset)
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: `resolve_tensor` gave a view."""
