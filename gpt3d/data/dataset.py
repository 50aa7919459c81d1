"""Datasets: sample k of the training stream, as a function of (seed, k)."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from gpt3d.data.errors import DataError
from gpt3d.data.order import SampleIndex, derive_keys, mix
from gpt3d.data.token_file import TokenFile

SYNTHETIC_VALIDATION_WINDOWS = 64


class Dataset(Protocol):
    """An endless stream of samples: `seq_len` inputs and the label after the last of them."""

    seq_len: int

    def samples(self, index: np.ndarray) -> np.ndarray:
        """Tokens [k, seq_len + 1] int64 of the samples with the global indices `index` [k]."""


class TokenDataset:
    """Windows of one token file, documents back to back, in the order of `SampleIndex`."""

    def __init__(self, file: TokenFile, seq_len: int, seed: int, stream: int | str = 0) -> None:
        if file.tokens < seq_len + 1:
            raise DataError(
                f"{file.prefix} has {file.tokens:,} tokens, one sample of data.seq_len={seq_len} needs "
                f"{seq_len + 1:,}; use more text or data.seq_len={max(1, file.tokens - 1)} or less"
            )
        self.file, self.seq_len = file, seq_len
        self.index = SampleIndex(file.tokens, seq_len, seed, stream)

    def sample(self, k: int) -> np.ndarray:
        """Tokens [seq_len + 1] int64 of sample k."""
        return self.samples(np.array([k]))[0]

    def samples(self, index: np.ndarray) -> np.ndarray:
        """Tokens [k, seq_len + 1] int64."""
        out = np.empty((len(index), self.seq_len + 1), np.int64)
        for row, start in zip(out, self.index.starts(index).tolist(), strict=True):
            head = min(len(row), self.file.tokens - start)
            row[:head] = self.file.read(start, head)
            row[head:] = self.file.read(0, len(row) - head)
        return out


class SyntheticDataset:
    """Uniform pseudo-random tokens from a hash of (seed, k, position): for benchmarks, reads no file."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int, stream: str = "train") -> None:
        self.vocab_size, self.seq_len = vocab_size, seq_len
        self._keys = derive_keys(2, "synthetic", seed, stream)

    def samples(self, index: np.ndarray) -> np.ndarray:
        """Tokens [k, seq_len + 1] int64."""
        rows = mix(np.asarray(index).astype(np.uint64), self._keys[0])[:, None]
        columns = np.arange(self.seq_len + 1, dtype=np.uint64)[None, :]
        return (mix(rows + columns, self._keys[1]) % np.uint64(self.vocab_size)).astype(np.int64)


class ValidationSet:
    """Fixed windows of the held-out tokens, one after the other, each label once; the last window may be short."""

    def __init__(self, source: TokenFile | SyntheticDataset, seq_len: int) -> None:
        self.source, self.seq_len = source, seq_len
        tokens = source.tokens if isinstance(source, TokenFile) else 1 + SYNTHETIC_VALIDATION_WINDOWS * seq_len
        self.targets = tokens - 1
        self.windows = -(-self.targets // seq_len)

    def window(self, w: int) -> np.ndarray:
        """Tokens [n + 1] of window w: n = `seq_len`, or less at the end, or none (an empty array) beyond it."""
        count = min(self.seq_len, self.targets - w * self.seq_len)
        if count <= 0:
            return np.zeros(0, np.int64)
        if isinstance(self.source, TokenFile):
            return self.source.read(w * self.seq_len, count + 1).astype(np.int64)
        return self.source.samples(np.array([w]))[0]


def unigram_entropy(train: TokenFile, validation: TokenFile, vocab_size: int, limit: int = 1 << 24) -> float:
    """Loss in nats per token on the held-out text of the best model that sees no context.

    Cross entropy of the validation tokens under the training frequencies with add-one smoothing. Beyond `limit` tokens,
    evenly spaced blocks are counted.
    """
    seen, held_out = (_count(file, vocab_size, limit) for file in (train, validation))
    log_p = np.log(seen + 1.0) - np.log(seen.sum() + vocab_size)
    return float(-(held_out * log_p).sum() / max(1, held_out.sum()))


def _count(file: TokenFile, vocab_size: int, limit: int, block: int = 1 << 16) -> np.ndarray:
    blocks = -(-file.tokens // block)
    step = max(1, -(-blocks * block // limit))
    counts = np.zeros(vocab_size, np.int64)
    for b in range(0, blocks, step):
        tokens = file.read(b * block, min(block, file.tokens - b * block))
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts
