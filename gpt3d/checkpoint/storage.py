"""Storage of torch's distributed checkpoint (DCP): one raw file a rank, one JSON index.

torch's own file storage loads flipped bits without a word, hides the errors of its writer threads and reads whole
chunks for a part of one.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from gpt3d.checkpoint.blocks import FileSums, VerifiedFile, write_file
from gpt3d.checkpoint.folder import FORMAT, INDEX
from gpt3d.checkpoint.reader import read_index

VISIBLE_SECONDS = 30.0
BOUNCE = 1 << 24  # bytes copied from a device at once


@dataclass(frozen=True)
class Location:
    """Where a piece lies."""

    file: str
    offset: int
    length: int


class RawWriter(StorageWriter):
    """Writes each rank's pieces into `folder`; `finish` (on the coordinator) writes the index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to reset: a writer is made for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [SavePlan(plan.items, storage_data=f"rank{rank:05d}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        name: str = plan.storage_data
        results: list[WriteResult] = []
        sums = FileSums()
        if plan.items:
            sums = write_file(self.folder / name, self._bytes(plan, planner, results))
        done: Future[list[WriteResult]] = Future()
        # the sums of the file travel with its first piece
        done.set_result(
            [
                WriteResult(r.index, r.size_in_bytes, (r.storage_data, None if i else sums))
                for i, r in enumerate(results)
            ]
        )
        return done

    def _bytes(self, plan: SavePlan, planner: SavePlanner, results: list[WriteResult]) -> Iterator[memoryview]:
        offset = 0
        for item in plan.items:
            values = planner.resolve_data(item)
            assert isinstance(values, Tensor)
            length = values.numel() * values.element_size()
            results.append(WriteResult(item.index, length, Location(plan.storage_data, offset, length)))
            offset += length
            yield from _host_bytes(values)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors: dict[str, dict[str, Any]] = {}
        for key, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            tensors[key] = {"shape": list(tensor.size), "dtype": str(tensor.properties.dtype)[6:], "pieces": []}
        sizes = {
            (key, tuple(chunk.offsets)): list(chunk.sizes)
            for key, tensor in metadata.state_dict_metadata.items()
            for chunk in tensor.chunks  # type: ignore[union-attr]
        }
        files: dict[str, dict[str, Any]] = {}
        for result in (r for rank in results for r in rank):
            location, sums = result.storage_data
            if sums is not None:
                files[location.file] = {"size": sums.size, "xxh3": sums.sums}
            at = tuple(result.index.offset or ())
            size = sizes.pop((result.index.fqn, at))
            tensors[result.index.fqn]["pieces"].append([list(at), size, location.file, location.offset])
        if sizes:
            raise RuntimeError(f"{len(sizes)} of the planned pieces were not written")
        for name, entry in files.items():
            _await_visible(self.folder / name, entry["size"])
        index = {"format": FORMAT, "tensors": tensors, "files": files}
        write_file(self.folder / INDEX, [memoryview(json.dumps(index, separators=(",", ":")).encode())])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class RawReader(StorageReader):
    """Reads pieces, or parts of them, of a checkpoint folder; `every` as in VerifiedFile."""

    def __init__(self, folder: Path, every: int = 1) -> None:
        self.folder, self.every = folder, every
        self.files: dict[str, FileSums] = {}
        self.locations: dict[MetadataIndex, Location] = {}
        self.sizes: dict[MetadataIndex, torch.Size] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to reset: a reader is made for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = read_index(self.folder)
        self.files = {name: FileSums(entry["size"], entry["xxh3"]) for name, entry in index["files"].items()}
        metadata = Metadata({}, storage_data=self.locations)
        for key, tensor in index["tensors"].items():
            dtype = getattr(torch, tensor["dtype"])
            chunks = []
            for offsets, sizes, file, offset in tensor["pieces"]:
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                place = MetadataIndex(key, chunk.offsets)
                self.locations[place] = Location(file, offset, chunk.sizes.numel() * dtype.itemsize)
                self.sizes[place] = chunk.sizes
                chunks.append(chunk)
            metadata.state_dict_metadata[key] = TensorStorageMetadata(
                TensorProperties(dtype=dtype), torch.Size(tensor["shape"]), chunks
            )
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: `read_metadata` has filled the tables."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file = defaultdict(list)
        for item in plan.items:
            by_file[self.locations[item.storage_index].file].append(item)
        for name, items in by_file.items():
            file = VerifiedFile(self.folder / name, self.files[name], self.every)
            for item in items:
                target = planner.resolve_tensor(item).detach()
                at = MetadataIndex(item.storage_index.fqn, item.storage_index.offset)
                target.copy_(self._part(file, at, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _part(self, file: VerifiedFile, at: MetadataIndex, offsets: torch.Size, lengths: torch.Size) -> Tensor:
        """A rectangle of a saved piece, as a view of the file; only its rows are read and verified."""
        place, shape = self.locations[at], self.sizes[at]
        row = place.length // shape[0]
        first, count = offsets[0], lengths[0]
        data = file.read(place.offset + first * row, count * row)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a read-only map of a file is not writable: true
            values = torch.frombuffer(data, dtype=torch.float32).view(count, *shape[1:])
        for dim in range(1, len(shape)):
            values = values.narrow(dim, offsets[dim], lengths[dim])
        return values

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


def _await_visible(path: Path, size: int) -> None:
    """Other nodes' files may show up late on a network file system, and never on a local one."""
    end = time.monotonic() + VISIBLE_SECONDS
    while not path.exists() or path.stat().st_size != size:
        if time.monotonic() > end:
            raise OSError(
                f"{path}, written by another rank, is not visible here: run_dir must be on a shared file system"
            )
        time.sleep(0.1)


def _host_bytes(values: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order, without a copy where they lie so in host memory already."""
    if values.device.type == "cpu" and values.is_contiguous():
        yield _bytes(values)
        return
    rows = max(1, BOUNCE // max(1, values[0].numel() * values.element_size()))
    for part in values.split(rows):
        yield _bytes(part.contiguous().cpu())


def _bytes(values: Tensor) -> memoryview:
    data: Any = values.view(-1).view(torch.uint8).numpy()
    return memoryview(data)
