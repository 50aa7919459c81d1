"""Which documents are held out, and which are copies: decided by a hash of the text."""

from __future__ import annotations

import hashlib

import numpy as np


def document_hash(text: str) -> int:
    """64 bits of the text: decides the split, and finds identical documents."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def split(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """The share of each document that is held out [documents].

    Whole documents, those with the smallest hashes: independent of the order and equal for identical documents. With so
    few (different) documents that `fraction` is less than one of them, the tail of each is held out.
    """
    count = round(len(hashes) * fraction)
    if len(hashes) * fraction < 1:
        return np.full(len(hashes), fraction)
    held_out = hashes <= np.partition(hashes, count - 1)[count - 1]
    return np.full(len(hashes), fraction) if held_out.all() else held_out.astype(float)


def first_of_each(hashes: np.ndarray) -> np.ndarray:
    """True for the first document of those that are identical [documents]."""
    keep = np.zeros(len(hashes), bool)
    keep[np.unique(hashes, return_index=True)[1]] = True
    return keep
