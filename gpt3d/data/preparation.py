"""From documents to a prepared corpus: `train` and `validation` token files and a manifest in one cache folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gpt3d.data.errors import DataError
from gpt3d.data.token_file import TokenFileWriter, token_dtype
from gpt3d.data.tokenizer import Tokenizer

FORMAT = 1  # part of every recipe: raise it when the content of a prepared folder changes


def build_corpus(
    documents: Iterable[str], tokenizer: Tokenizer, validation_fraction: float, folder: Path
) -> dict[str, Any]:
    """Tokenize `documents`, each closed by the end-of-document id, and write both splits into `folder`."""
    hashes, tokens, empty = [], [], 0
    for text in documents:
        if not text.strip():
            empty += 1
            continue
        hashes.append(document_hash(text))
        tokens.append(np.append(tokenizer.encode(text).astype(np.int64), tokenizer.eod))
    held_out = split(np.array(hashes, np.uint64), validation_fraction)
    pieces: dict[str, list[np.ndarray]] = {"train": [], "validation": []}
    for document, fraction in zip(tokens, held_out.tolist(), strict=True):
        cut = len(document) - int(len(document) * fraction)
        pieces["train"].append(document[:cut])
        pieces["validation"].append(document[cut:])
    manifest: dict[str, Any] = {"format": FORMAT, "tokenizer": tokenizer.fingerprint, "empty_documents": empty}
    for name, parts in pieces.items():
        writer = TokenFileWriter(folder / name, token_dtype(tokenizer.vocab_size))
        for part in parts:
            if len(part):
                writer.add(part)
        documents_written = sum(bool(len(part)) for part in parts)
        manifest[name] = {"documents": documents_written, "tokens": writer.tokens, "checksum": writer.close()}
    if not tokens:
        raise DataError(f"the corpus has no text: {empty} empty documents and no other")
    return manifest


def document_hash(text: str) -> int:
    """64 bits of the text: decides the split, and finds identical documents."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def split(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """The share of each document that is held out [documents].

    Whole documents, those with the smallest hashes: independent of the order and equal for identical documents. With so
    few documents that `fraction` is less than one of them, the tail of each is held out.
    """
    count = round(len(hashes) * fraction)
    if len(hashes) * fraction < 1:
        return np.full(len(hashes), fraction)
    threshold = np.partition(hashes, count - 1)[count - 1]
    return (hashes <= threshold).astype(float)
