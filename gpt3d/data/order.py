"""The order of samples as a pure function of (seed, k): nothing is stored, nothing is shuffled in memory.

Sample k of a corpus with n samples an epoch: epoch e = k // n, place j = k % n; a keyed permutation of range(n),
another one each epoch, gives the window. `ORDER_VERSION` names this function in the data fingerprint of a run.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

ORDER_VERSION = 1
ROUNDS = 6  # 2 rounds fail a chi-square test of pairs, 4 pass; 6 leave a margin


def derive_keys(count: int, *path: int | str) -> np.ndarray:
    """`count` 64-bit keys [count] that depend on every element of `path` (a seed, an epoch, a name)."""
    text = "/".join(str(part) for part in path).encode()
    salts = [block.to_bytes(8, "little") for block in range(-(-count // 8))]
    digests = [hashlib.blake2b(text, digest_size=64, salt=salt).digest() for salt in salts]
    return np.frombuffer(b"".join(digests), "<u8")[:count]


def mix(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """A hash of 64-bit integers (the finalizer of MurmurHash3, keyed)."""
    x = x ^ key
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


class Permutation:
    """A bijection of range(n) in constant memory.

    A Feistel network over Z_a x Z_b with a*b just above n; values that fall outside range(n) go round again.
    """

    def __init__(self, n: int, *path: int | str) -> None:
        self.n = n
        a = math.isqrt(max(n - 1, 0)) + 1
        self._a, self._b = np.uint64(a), np.uint64(-(-n // a))
        self._keys = derive_keys(ROUNDS, *path)

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Images [k] of `index` [k], int64."""
        x: np.ndarray = self._once(np.asarray(index).astype(np.uint64))
        while (outside := x >= self.n).any():
            x[outside] = self._once(x[outside])
        return x.astype(np.int64)

    def _once(self, x: np.ndarray) -> np.ndarray:
        left: np.ndarray = x // self._b
        right: np.ndarray = x % self._b
        for i, key in enumerate(self._keys):
            if i % 2:
                right = (right + mix(left, key) % self._b) % self._b
            else:
                left = (left + mix(right, key) % self._a) % self._a
        return left * self._b + right


class EpochOrder:
    """Sample k -> (its epoch, its place in the permuted range(n)); another permutation each epoch."""

    def __init__(self, n: int, *path: int | str) -> None:
        self.n, self._path = n, path
        self._permutations: dict[int, Permutation] = {}

    def __call__(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epochs [k] and places [k] of the samples `index` [k]."""
        epochs, places = np.divmod(np.asarray(index, np.int64), self.n)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            places[here] = self._permutation(epoch)(places[here])
        return epochs, places

    def _permutation(self, epoch: int) -> Permutation:
        if epoch not in self._permutations:
            if len(self._permutations) > 8:
                self._permutations.clear()
            self._permutations[epoch] = Permutation(self.n, *self._path, epoch)
        return self._permutations[epoch]


class SampleIndex:
    """Where sample k begins: the tokens, seen as a ring, are cut into windows and these permuted, anew each epoch.

    Later epochs begin at another phase: their windows cut the text elsewhere and use the first epoch's remainder.
    """

    def __init__(self, tokens: int, seq_len: int, seed: int, stream: int | str = 0) -> None:
        self.tokens, self.seq_len, self._path = tokens, seq_len, ("order", seed, stream)
        self.samples_per_epoch = (tokens - 1) // seq_len
        self._order = EpochOrder(self.samples_per_epoch, *self._path)

    @property
    def remainder(self) -> int:
        """Tokens at the end that the first epoch does not use as a label."""
        return self.tokens - 1 - self.samples_per_epoch * self.seq_len

    def starts(self, index: np.ndarray) -> np.ndarray:
        """Position of the first token [k] of the samples `index` [k]; a window may pass the end and go on at 0."""
        epochs, places = self._order(index)
        unique, which = np.unique(epochs, return_inverse=True)
        phases = np.array([self._phase(epoch) for epoch in unique.tolist()], np.int64)
        return (places * self.seq_len + phases[which]) % self.tokens

    def _phase(self, epoch: int) -> int:
        return int(derive_keys(1, *self._path, epoch, "phase")[0]) % self.tokens if epoch else 0
