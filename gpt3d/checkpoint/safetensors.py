"""The safetensors file format: 8 bytes of header length, a JSON header, raw little-endian tensors. Written as a stream.

https://github.com/huggingface/safetensors#format; an own reader and writer need one tensor in memory at a time.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt3d.checkpoint.blocks import CorruptCheckpoint

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
INDEX = "model.safetensors.index.json"


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, read: Callable[[str], Tensor]
) -> None:
    """Write the tensors named in `shapes`, asking `read` for one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            values = read(name).to(dtype).contiguous()
            if tuple(values.shape) != shape:
                raise RuntimeError(f"{name} has the shape {list(values.shape)}, not {list(shape)}")
            data: Any = values.view(-1).view(torch.uint8).numpy()
            file.write(memoryview(data))
        file.flush()
        os.fsync(file.fileno())


class SafetensorsFolder:
    """The tensors of all `*.safetensors` in a folder, mapped: only what is looked at is read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.entries = folder, dict[str, tuple[Path, dict[str, Any], int]]()
        self.maps: dict[Path, mmap.mmap] = {}
        index = folder / INDEX
        try:
            names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else None
        except (ValueError, KeyError, AttributeError) as error:
            raise CorruptCheckpoint(f"{index} is no index of files: {error!r}") from None
        for path in sorted(folder.glob("*.safetensors")) if names is None else [folder / n for n in sorted(names)]:
            self._open(path)
        if not self.maps:
            raise CorruptCheckpoint(f"{folder} holds no *.safetensors file: the weights must be in this format")

    def _open(self, path: Path) -> None:
        try:
            with open(path, "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
                self.maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, struct.error, MemoryError) as error:
            raise CorruptCheckpoint(f"{path} is not a whole safetensors file: {error}") from None
        for name, entry in header.items():
            if name != "__metadata__":
                self.entries[name] = (path, entry, 8 + length)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, after checking that the tensor is whole and of a known number format. Raises CorruptCheckpoint."""
        return tuple(self[name].shape)

    def __getitem__(self, name: str) -> Tensor:
        """A view of the file. Raises CorruptCheckpoint if it is not there, or its file ends before it."""
        if name not in self.entries:
            raise CorruptCheckpoint(f"{self.folder} has no tensor {name}")
        path, entry, base = self.entries[name]
        if entry["dtype"] not in DTYPES:
            raise CorruptCheckpoint(f"{path}: {name} is {entry['dtype']}; {', '.join(DTYPES)} can be read")
        begin, end = entry["data_offsets"]
        dtype, shape = DTYPES[entry["dtype"]], torch.Size(entry["shape"])
        if base + end > len(self.maps[path]) or end - begin != shape.numel() * dtype.itemsize:
            raise CorruptCheckpoint(f"{path} ends before {name} does: the file is cut off")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a read-only map of a file is not writable: true
            return torch.frombuffer(self.maps[path], dtype=dtype, count=shape.numel(), offset=base + begin).view(shape)
