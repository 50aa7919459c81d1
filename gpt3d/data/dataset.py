"""Datasets: sample k of the training stream, as a function of (seed, k)."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from gpt3d.data.errors import DataError
from gpt3d.data.order import SampleIndex, derive_keys, mix
from gpt3d.data.token_source import TokenSource

SYNTHETIC_VALIDATION_WINDOWS = 64
PADDING = -1  # in samples: no token here


class Dataset(Protocol):
    """An endless stream of samples: `seq_len` inputs and the label after the last of them.

    `mask_eod`: None, or with document masks the id that ends a document: attention and loss do not cross it.
    `interleaved`: a data-parallel rank asks for every DP-th sample only, in increasing order.
    """

    seq_len: int
    mask_eod: int | None
    interleaved: bool

    def samples(self, index: np.ndarray) -> np.ndarray:
        """Tokens [k, seq_len + 1] int64 of the samples with the global indices `index` [k]; `PADDING` at their end."""


class TokenDataset:
    """Windows of one token source, documents back to back, in the order of `SampleIndex`."""

    interleaved = False

    def __init__(
        self,
        source: TokenSource,
        seq_len: int,
        seed: int,
        stream: int | str = 0,
        mask_eod: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if source.tokens < seq_len + 1:
            raise DataError(
                f"{source.name} has {source.tokens:,} tokens, one sample of data.seq_len={seq_len} needs "
                f"{seq_len + 1:,}; use more text or data.seq_len={max(1, source.tokens - 1)} or less"
            )
        self.source, self.seq_len, self.mask_eod, self.vocab_size = source, seq_len, mask_eod, vocab_size
        self.index = SampleIndex(source.tokens, seq_len, seed, stream)
        self.samples_per_epoch = self.index.samples_per_epoch

    def sample(self, k: int) -> np.ndarray:
        """Tokens [seq_len + 1] int64 of sample k."""
        return self.samples(np.array([k]))[0]

    def samples(self, index: np.ndarray) -> np.ndarray:
        """Tokens [k, seq_len + 1] int64."""
        out = np.empty((len(index), self.seq_len + 1), np.int64)
        for row, start in zip(out, self.index.starts(index).tolist(), strict=True):
            head = min(len(row), self.source.tokens - start)
            row[:head] = self.source.read(start, head)
            if head < len(row):
                row[head:] = self.source.read(0, len(row) - head)
        check_ids(out, self.vocab_size, self.source.name)
        return out

    def describe(self) -> str:
        """Samples of an epoch and what is left over."""
        return f"{self.samples_per_epoch:,} samples an epoch, {self.index.remainder:,} tokens over"


class SyntheticDataset:
    """Uniform pseudo-random tokens from a hash of (seed, k, position): for benchmarks, reads no file."""

    mask_eod: int | None = None
    interleaved = False

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

    def __init__(self, source: TokenSource | SyntheticDataset, seq_len: int, mask_eod: int | None = None) -> None:
        self.source, self.seq_len, self.mask_eod = source, seq_len, mask_eod
        if isinstance(source, SyntheticDataset):
            self.targets = SYNTHETIC_VALIDATION_WINDOWS * seq_len
        else:
            self.targets = source.tokens - 1
        self.windows = -(-self.targets // seq_len)

    def window(self, w: int) -> np.ndarray:
        """Tokens [n + 1] of window w: n = `seq_len`, or less at the end, or none (an empty array) beyond it."""
        count = min(self.seq_len, self.targets - w * self.seq_len)
        if count <= 0:
            return np.zeros(0, np.int64)
        if isinstance(self.source, SyntheticDataset):
            return self.source.samples(np.array([w]))[0]
        return self.source.read(w * self.seq_len, count + 1).astype(np.int64)


def check_ids(tokens: np.ndarray, vocab_size: int | None, name: str) -> None:
    """Raise DataError if an id is beyond the vocabulary: token files are not read wholly when they are opened."""
    if vocab_size is not None and (largest := int(tokens.max(initial=0))) >= vocab_size:
        raise DataError(
            f"{name} has token id {largest:,}, the tokenizer has {vocab_size:,} ids: it was made with another "
            "tokenizer (or data.token_dtype is wrong)"
        )


def unigram_entropy(counts: np.ndarray, held_out: np.ndarray) -> float:
    """Loss in nats per token on held-out text of the best model that sees no context.

    Cross entropy of the validation tokens, counted in `held_out` [v], under the training frequencies `counts` [v] with
    add-one smoothing.
    """
    log_p = np.log(counts + 1.0) - np.log(counts.sum() + len(counts))
    return float(-(held_out * log_p).sum() / max(1, held_out.sum()))


def count_ids(source: TokenSource, vocab_size: int, limit: int = 1 << 24, block: int = 1 << 16) -> np.ndarray:
    """How often each id [vocab_size] occurs, in evenly spaced blocks of about `limit` tokens in all."""
    blocks = -(-source.tokens // block)
    step = max(1, -(-blocks * block // limit))
    counts = np.zeros(vocab_size, np.int64)
    for b in range(0, blocks, step):
        tokens = source.read(b * block, min(block, source.tokens - b * block))
        check_ids(tokens, vocab_size, source.name)
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts
