"""Tokens on disk: Megatron's `.bin` / `.idx` pair (MMIDIDX version 1), byte-compatible both ways.

.bin   tokens back to back, no header
.idx   9s magic, u64 version, u8 dtype code, u64 sequences n, u64 document boundaries d (34 bytes, little-endian)
       i32[n] lengths in tokens, i64[n] byte offsets into .bin, i64[d] first sequence of each document, closing with n
       (i8[n] modes in multimodal files: only the file's size tells)
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gpt3d.data.errors import DataError
from gpt3d.data.token_source import pread_tokens

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {code: np.dtype(d) for code, d in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_COPY_TOKENS = 1 << 22


def token_dtype(vocab_size: int) -> np.dtype:
    """Megatron's choice: uint16 below 65,500 ids, else int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


class TokenFileWriter:
    """Writes `prefix.bin` as documents come and `prefix.idx` on `close`. Ids that do not fit the dtype are an error."""

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        self.documents, self.tokens, self.largest_id = 0, 0, -1
        self._limit = np.iinfo(self.dtype).max
        self._lengths: list[np.ndarray] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._file = open(with_suffix(self.prefix, ".bin"), "wb")  # noqa: SIM115  (closed by `close`)

    def add(self, tokens: np.ndarray, lengths: np.ndarray | None = None) -> None:
        """Append documents: their ids back to back, and the length of each (by default one document)."""
        sizes = np.asarray([len(tokens)] if lengths is None else lengths, np.int64)
        if sizes.sum() != len(tokens) or (sizes < 0).any() or (sizes > np.iinfo(np.int32).max).any():
            raise DataError(f"document lengths {sizes.tolist()[:8]} do not describe {len(tokens):,} tokens")
        if len(tokens):
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high > self._limit:
                raise DataError(f"token id {low if low < 0 else high} does not fit {self.dtype} (0 to {self._limit:,})")
            self.largest_id = max(self.largest_id, high)
        raw = np.ascontiguousarray(tokens, self.dtype).view(np.uint8).data
        self._digest.update(raw)
        self._file.write(raw)
        self._lengths.append(sizes.astype("<i4"))
        self.documents, self.tokens = self.documents + len(sizes), self.tokens + len(tokens)

    def close(self) -> str:
        """Write the index, flush both files to the disk; returns the checksum (blake2b) of the tokens and lengths."""
        _sync_and_close(self._file)
        lengths = np.concatenate([np.zeros(0, "<i4"), *self._lengths])
        offsets = np.zeros(len(lengths), "<i8")
        np.cumsum(lengths[:-1].astype(np.int64) * self.dtype.itemsize, out=offsets[1:])
        with open(with_suffix(self.prefix, ".idx"), "wb") as index:
            index.write(HEADER.pack(MAGIC, 1, CODES[self.dtype], len(lengths), len(lengths) + 1))
            for array in (lengths, offsets, np.arange(len(lengths) + 1, dtype="<i8")):
                index.write(array.view(np.uint8).data)
            _sync_and_close(index)
        self._digest.update(lengths.view(np.uint8).data)
        return self._digest.hexdigest()


class TokenFile:
    """Reads a pair. Tokens are read by position with `pread`: no memory is mapped, a truncated file is an error."""

    def __init__(self, prefix: Path) -> None:
        self.prefix, self.name = Path(prefix), str(prefix)
        index, binary = with_suffix(self.prefix, ".idx"), with_suffix(self.prefix, ".bin")
        try:
            with open(index, "rb") as opened:
                header = opened.read(HEADER.size)
            size, bytes_ = index.stat().st_size, binary.stat().st_size
        except OSError as error:
            raise DataError(f"cannot open the token files {self.prefix}.bin and .idx: {error}") from error
        if header[:6] == b"TNTIDX":
            raise DataError(f"{index} is in the legacy TNTIDX format; write it anew with Megatron's preprocess_data.py")
        if len(header) < HEADER.size or header[:9] != MAGIC:
            raise DataError(f"{index} is no Megatron index: it starts with {header[:9]!r}, expected {MAGIC!r}")
        _, version, code, sequences, boundaries = HEADER.unpack(header)
        if version != 1 or code not in DTYPES or DTYPES[code].kind == "f":
            raise DataError(f"{index}: version {version} with dtype code {code} is not supported")
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if size not in (expected, expected + sequences):
            raise DataError(f"{index} has {size:,} bytes, its header asks for {expected:,}: truncated copy?")
        self.dtype = DTYPES[code]
        mapped = np.memmap(index, mode="r", dtype=np.uint8)
        self.lengths = mapped[HEADER.size : HEADER.size + 4 * sequences].view("<i4")
        self.document_index = mapped[HEADER.size + 12 * sequences : expected].view("<i8")
        self.documents = max(0, boundaries - 1)
        self.tokens = int(self.lengths.sum(dtype=np.int64))
        # Offsets follow from the lengths, so damaged ones (int32 overflow in merged files) do not matter.
        if self.tokens * self.dtype.itemsize != bytes_:
            need = self.tokens * self.dtype.itemsize
            raise DataError(f"{binary} has {bytes_:,} bytes, its index describes {need:,}: truncated copy?")
        self._file = open(binary, "rb", buffering=0)  # noqa: SIM115  (open while in use)

    def document_lengths(self) -> np.ndarray:
        """Tokens of each document [documents], int64; a document may consist of several sequences."""
        bounds = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])[np.asarray(self.document_index)]
        return np.diff(bounds)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [count] from position `start` of the whole file, in the file's dtype."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise DataError(f"{self.prefix}: tokens {start:,} to {start + count:,} asked of {self.tokens:,}")
        return pread_tokens(self._file.fileno(), f"{self.prefix}.bin", self.dtype, start, count)

    def checksum(self) -> str:
        """The writer's checksum, computed anew from what is on the disk."""
        digest = hashlib.blake2b(digest_size=16)
        for start in range(0, self.tokens, _COPY_TOKENS):
            digest.update(self.read(start, min(_COPY_TOKENS, self.tokens - start)).view(np.uint8).data)
        digest.update(np.ascontiguousarray(self.lengths).view(np.uint8).data)
        return digest.hexdigest()


def with_suffix(prefix: Path, suffix: str) -> Path:
    """`prefix` + `suffix`, also where the prefix has a dot in its name."""
    return Path(f"{prefix}{suffix}")


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
