"""Several corpora with weights, as one stream in closed form: sample k -> (corpus, its u-th sample)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gpt3d.data.dataset import Dataset
from gpt3d.data.errors import DataError
from gpt3d.data.order import derive_keys, mix

PATTERN = 1 << 16  # samples after which the pattern repeats: weights are met to within half a sample in this many


class BlendPattern:
    """A fixed pattern of `length` corpora in which each appears evenly; tiled for ever.

    A corpus that runs out begins its next epoch: the weights hold from the first sample to the last.
    """

    def __init__(self, weights: Sequence[float], seed: int, length: int = PATTERN) -> None:
        counts = _apportion(np.asarray(weights, np.float64), length)
        jitter = mix(np.arange(length, dtype=np.uint64), derive_keys(1, "blend", seed)[0]) / 2.0**64
        corpus = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(length) - np.repeat(np.cumsum(counts) - counts, counts)
        order = np.argsort((within + jitter) / counts[corpus], kind="stable")
        self.counts, self.length = counts, length
        self.corpus = corpus[order]
        self.rank = within[order]
        for c in range(len(counts)):  # jitter may swap neighbours of one corpus: number them as they come
            self.rank[self.corpus == c] = np.arange(counts[c])

    def __call__(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Corpus [k] and number of the sample within it [k], for the samples `index` [k]."""
        tile, place = np.divmod(np.asarray(index, np.int64), self.length)
        corpus = self.corpus[place]
        return corpus, tile * self.counts[corpus] + self.rank[place]


class BlendedDataset:
    """Samples of several datasets by weight."""

    interleaved = False

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float], seed: int) -> None:
        self.datasets, self.seq_len, self.mask_eod = datasets, datasets[0].seq_len, datasets[0].mask_eod
        self.pattern = BlendPattern(weights, seed)

    def samples(self, index: np.ndarray) -> np.ndarray:
        """Tokens [k, seq_len + 1] int64."""
        corpus, number = self.pattern(index)
        out = np.empty((len(index), self.seq_len + 1), np.int64)
        for c in np.unique(corpus).tolist():
            here = corpus == c
            out[here] = self.datasets[c].samples(number[here])
        return out


def normalized(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights as shares that sum to 1; those of 0 are left out."""
    if any(not np.isfinite(w) or w < 0 for w in weights.values()) or not sum(weights.values()):
        raise DataError(f"data.blend: weights must be 0 or more and not all 0: {dict(weights)}")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items() if weight > 0}


def _apportion(weights: np.ndarray, length: int) -> np.ndarray:
    """Whole numbers that sum to `length`, in proportion to the weights, at least 1 each (largest remainders)."""
    exact = weights / weights.sum() * length
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while (missing := length - counts.sum()) > 0:
        counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    while counts.sum() > length:
        counts[np.argmax(counts - np.maximum(exact, 1))] -= 1
    return counts
