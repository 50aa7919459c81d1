"""Tokens that can be read by position: a token file, a flat `.bin` without index, a stretch of one, or several."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from gpt3d.data.errors import DataError


class TokenSource(Protocol):
    """`tokens` ids, `documents` documents."""

    name: str
    tokens: int
    documents: int

    def read(self, start: int, count: int) -> np.ndarray:
        """Ids [count] from position `start`."""

    def document_lengths(self) -> np.ndarray:
        """Tokens of each document [documents], int64."""


class FlatFile:
    """A `.bin` of ids and nothing else, as nanoGPT writes it: one document."""

    documents = 1

    def __init__(self, path: Path, dtype: str) -> None:
        self.name, self.dtype = str(path), np.dtype(dtype).newbyteorder("<")
        size = path.stat().st_size
        if size % self.dtype.itemsize:
            raise DataError(f"{path} has {size:,} bytes, no multiple of data.token_dtype={dtype}")
        self.tokens = size // self.dtype.itemsize
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (open while in use)

    def read(self, start: int, count: int) -> np.ndarray:
        """Ids [count] from position `start`."""
        return pread_tokens(self._file.fileno(), self.name, self.dtype, start, count)

    def document_lengths(self) -> np.ndarray:
        return np.array([self.tokens])


class TokenSlice:
    """The tokens [start, end) of another source, whole documents or the tail of one."""

    def __init__(self, source: TokenSource, start: int, end: int) -> None:
        self.source, self.start = source, start
        self.name, self.tokens = source.name, end - start
        self.documents = len(self.document_lengths())

    def read(self, start: int, count: int) -> np.ndarray:
        """Ids [count] from position `start`."""
        if start < 0 or start + count > self.tokens:
            raise DataError(f"{self.name}: tokens {start:,} to {start + count:,} asked of {self.tokens:,}")
        return self.source.read(self.start + start, count)

    def document_lengths(self) -> np.ndarray:
        bounds = np.cumsum(np.concatenate([[0], self.source.document_lengths()]))
        lengths = np.diff(np.clip(bounds, self.start, self.start + self.tokens))
        return lengths[lengths > 0]


class Concatenation:
    """Several sources, one after the other."""

    def __init__(self, sources: Sequence[TokenSource]) -> None:
        self.sources = sources
        self._starts = np.cumsum([0, *(source.tokens for source in sources)])
        self.name = sources[0].name if len(sources) == 1 else f"{sources[0].name} and {len(sources) - 1} more"
        self.tokens, self.documents = int(self._starts[-1]), sum(source.documents for source in sources)

    def read(self, start: int, count: int) -> np.ndarray:
        """Ids [count] from position `start`."""
        parts, i = [], int(np.searchsorted(self._starts, start, side="right")) - 1
        while True:
            offset = start - int(self._starts[i])
            here = min(count, self.sources[i].tokens - offset) if i + 1 < len(self.sources) else count
            parts.append(self.sources[i].read(offset, here))
            start, count, i = start + here, count - here, i + 1
            if not count:
                return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def document_lengths(self) -> np.ndarray:
        return np.concatenate([source.document_lengths() for source in self.sources])


def hold_out(source: TokenSource, fraction: float) -> tuple[TokenSource, TokenSource]:
    """Cut off the last documents, about `fraction` of the tokens; inside a document if there is no boundary near."""
    cut = source.tokens - round(source.tokens * fraction)
    bounds = np.cumsum(source.document_lengths())
    nearest = int(bounds[np.argmin(np.abs(bounds - cut))]) if len(bounds) else 0
    if abs(nearest - cut) * 2 <= source.tokens - cut and 0 < nearest < source.tokens:
        cut = nearest
    return TokenSlice(source, 0, cut), TokenSlice(source, cut, source.tokens)


def content_digest(source: TokenSource, blocks: int = 64, block: int = 4096) -> str:
    """A digest of the length and of evenly spaced blocks: quick, whatever the size."""
    digest = hashlib.blake2b(f"{source.tokens}/{source.documents}".encode(), digest_size=16)
    for start in np.unique(np.linspace(0, max(0, source.tokens - block), blocks).astype(np.int64)).tolist():
        digest.update(source.read(start, min(block, source.tokens - start)).astype(np.int64).tobytes())
    return digest.hexdigest()


def pread_tokens(fd: int, name: str, dtype: np.dtype, start: int, count: int) -> np.ndarray:
    """Ids [count] of an open file from position `start`. A file that was cut meanwhile is an error, not a SIGBUS."""
    chunks, position, wanted = [], start * dtype.itemsize, count * dtype.itemsize
    while wanted:
        chunk = os.pread(fd, min(wanted, 1 << 30), position)
        if not chunk:
            raise DataError(f"{name} ended at byte {position:,}: the file was cut while in use")
        chunks.append(chunk)
        wanted, position = wanted - len(chunk), position + len(chunk)
    return np.frombuffer(chunks[0] if len(chunks) == 1 else b"".join(chunks), dtype)
