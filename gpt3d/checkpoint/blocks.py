"""Files written with a checksum for each MiB, and read back only where the checksum agrees.

Checksums of blocks, not of files: a rank that needs a part of a large file verifies that part and reads nothing twice.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

BLOCK = 1 << 20
FLUSHED = 32 << 20  # bytes
SAMPLED = 16  # verify=sample looks at one block in so many


class CorruptCheckpoint(RuntimeError):
    """What is on disk is not what was written; the message names the file and the place."""

    show_traceback = False


@dataclass
class FileSums:
    """Size of a file and the XXH3 (64 bits) of each of its blocks: several times faster than zlib's CRC-32."""

    size: int = 0
    sums: list[int] = field(default_factory=list)
    _block: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)

    def add(self, data: memoryview) -> None:
        """The next bytes of the file."""
        while len(data):
            part = data[: BLOCK - self.size % BLOCK]
            self._block.update(part)
            self.size += len(part)
            if self.size % BLOCK == 0:
                self._end_block()
            data = data[len(part) :]

    def finish(self) -> FileSums:
        if self.size % BLOCK:
            self._end_block()
        return self

    def _end_block(self) -> None:
        self.sums.append(self._block.intdigest())
        self._block.reset()

    def __reduce__(self) -> tuple[Any, ...]:
        return FileSums, (self.size, self.sums)


def write_file(path: Path, buffers: Iterable[memoryview]) -> FileSums:
    """Write a new file to the disk, fsync included; raises OSError if it cannot be done whole.

    The disk begins early: a thread flushes what is written so far while the next bytes are summed and written.
    """
    sums, flushed, flushing = FileSums(), 0, Future[None]()
    flushing.set_result(None)
    with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(1, "gpt3d-flush") as flusher:
        for buffer in buffers:
            for start in range(0, len(buffer), FLUSHED):
                part = buffer[start : start + FLUSHED]
                sums.add(part)
                while len(part):
                    part = part[file.write(part) :]
                if sums.size - flushed >= FLUSHED and flushing.done():
                    flushing.result()  # Linux tells of a failed write once only
                    flushed, flushing = sums.size, flusher.submit(os.fdatasync, file.fileno())
        flushing.result()
        os.fsync(file.fileno())
    return sums.finish()


class VerifiedFile:
    """A read-only map of a file; `read` checks the blocks that it touches for the first time.

    `every`: 1 checks each block, n each n-th one, 0 none (the size is always checked). Raises CorruptCheckpoint.
    """

    def __init__(self, path: Path, sums: FileSums, every: int = 1) -> None:
        self.path, self.sums, self.every = path, sums, every
        self.checked: set[int] = set()
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != sums.size:
                    raise CorruptCheckpoint(f"{path} has {size:,} bytes, {sums.size:,} were written")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{path} is missing") from None

    def read(self, offset: int, length: int) -> memoryview:
        """Bytes offset..offset+length; no copy."""
        if offset + length > self.sums.size:
            raise CorruptCheckpoint(f"{self.path} ends before byte {offset + length:,}, which the index refers to")
        data = memoryview(self.map)
        for block in range(offset // BLOCK, -(-(offset + length) // BLOCK)):
            if block not in self.checked and self.every and block % self.every == 0:
                self.checked.add(block)
                if xxhash.xxh3_64_intdigest(data[block * BLOCK : (block + 1) * BLOCK]) != self.sums.sums[block]:
                    raise CorruptCheckpoint(f"{self.path} is damaged: checksum of its MiB {block} differs")
        return data[offset : offset + length]

    def release(self) -> None:
        """Give back the memory of the pages that were read; they are read again where they are needed again."""
        if isinstance(self.map, mmap.mmap):
            self.map.madvise(mmap.MADV_DONTNEED)

    def check_all(self) -> None:
        """Check the whole file."""
        self.read(0, self.sums.size)
