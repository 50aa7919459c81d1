"""Whole tensors of a checkpoint, one at a time, without torch and without ranks: for export and inspection."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpt3d.checkpoint import folder
from gpt3d.checkpoint.blocks import CorruptCheckpoint, FileSums, VerifiedFile


class SavedTensors:
    """The tensors of one committed checkpoint by key (`weights/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`).

    Every byte that is read is checked, unless `every` says otherwise (see VerifiedFile). Raises CorruptCheckpoint.
    """

    def __init__(self, path: Path, every: int = 1) -> None:
        self.path, self.every = path, every
        self.state: dict[str, Any] = folder.read_state(path)
        index = read_index(path)
        self.tensors: dict[str, Any] = index["tensors"]
        self.sums = {name: FileSums(entry["size"], entry["xxh3"]) for name, entry in index["files"].items()}
        self.open: dict[str, VerifiedFile] = {}

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.tensors[key]["shape"])

    def read(self, key: str) -> np.ndarray:
        """The whole tensor, fp32."""
        whole = np.empty(self.shape(key), np.float32)
        for offsets, sizes, file, offset in self.tensors[key]["pieces"]:
            data = self._file(file).read(offset, 4 * math.prod(sizes))
            box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            whole[box] = np.frombuffer(data, np.float32).reshape(sizes)
        for open_file in self.open.values():
            open_file.release()
        return whole

    def damages(self) -> Iterator[str]:
        """What is wrong with any of the files; nothing if all are as they were written."""
        for name in self.sums:
            try:
                VerifiedFile(self.path / name, self.sums[name]).check_all()
            except CorruptCheckpoint as error:
                yield str(error)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(sums.size for sums in self.sums.values())

    def _file(self, name: str) -> VerifiedFile:
        if name not in self.open:
            self.open[name] = VerifiedFile(self.path / name, self.sums[name], self.every)
        return self.open[name]


def read_index(path: Path) -> dict[str, Any]:
    """The contents of index.json, which `folder.read_state` has checked."""
    index: dict[str, Any] = json.loads((path / folder.INDEX).read_text())
    return index
