"""Tokenizes one piece of a corpus; runs in the calling process or in a helper (`gpt3d.data.helper`)."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpt3d.config.schema import SourceConfig
from gpt3d.data.errors import DataError
from gpt3d.data.pieces import Piece
from gpt3d.data.policy import Place, Policy
from gpt3d.data.readers import read_part
from gpt3d.data.split import document_hash
from gpt3d.data.token_file import token_dtype
from gpt3d.data.tokenizer import Tokenizer

_BUFFER = 1 << 20  # tokens held before they are written
_CHUNK = 1 << 20  # characters encoded at once
_CUT = re.compile(r"(?<=\S\n)(?=\S)")


@dataclass
class Step:
    """Progress since the last report."""

    units: int = 0
    documents: int = 0
    tokens: int = 0


@dataclass
class Outcome:
    """What became of a piece: the counts of bad input, or the error that stops everything."""

    number: int
    counts: Counter[str] = field(default_factory=Counter)
    places: list[tuple[str, Place]] = field(default_factory=list)
    error: str | None = None


@dataclass
class Job:
    """What is the same for all pieces."""

    config: SourceConfig
    tokenizer: Tokenizer
    folder: Path

    def part_file(self, number: int, suffix: str) -> Path:
        """Result of piece `number`: `.bin` tokens, `.npy` lengths and hashes [2, documents]."""
        return self.folder / f"part-{number:06d}{suffix}"


def tokenize_piece(job: Job, number: int, piece: Piece, report: Callable[[Step], None]) -> Outcome:
    """Write tokens, lengths and hashes of the documents of a piece; each document ends with the end-of-document id."""
    policy = Policy(job.config.on_error, job.config.text_column)
    dtype, eod = token_dtype(job.tokenizer.vocab_size), np.array([job.tokenizer.eod])
    lengths: list[int] = []
    hashes: list[int] = []
    buffer: list[np.ndarray] = []
    step, buffered, last = Step(), 0, time.monotonic()

    def progress(units: int) -> None:
        nonlocal step, last
        step.units += units
        if time.monotonic() - last > 0.5:
            report(step)
            step, last = Step(), time.monotonic()

    try:
        with open(job.part_file(number, ".bin"), "wb") as file:
            for part in piece.parts:
                for text in read_part(part, job.config, policy, progress):
                    ids = [encoded.astype(dtype) for encoded in encode_long(job.tokenizer, text)]
                    buffer += [*ids, eod.astype(dtype)]
                    lengths.append(1 + sum(map(len, ids)))
                    hashes.append(document_hash(text))
                    step.documents, step.tokens = step.documents + 1, step.tokens + lengths[-1]
                    if (buffered := buffered + lengths[-1]) > _BUFFER:
                        np.concatenate(buffer).tofile(file)
                        buffer, buffered = [], 0
            np.concatenate([np.zeros(0, dtype), *buffer]).tofile(file)
    except DataError as error:
        return Outcome(number, error=str(error))
    np.save(job.part_file(number, ".npy"), np.array([lengths, hashes], np.uint64))
    report(step)
    return Outcome(number, policy.counts, policy.places)


def encode_long(tokenizer: Tokenizer, text: str) -> list[np.ndarray]:
    """Ids of a text, about a megabyte at a time to bound memory; cut where no token can span: `x\\n|y`."""
    pieces, start = [], 0
    while len(text) - start > _CHUNK and (cut := _CUT.search(text, start + _CHUNK)):
        pieces.append(tokenizer.encode(text[start : cut.start()]))
        start = cut.start()
    return [*pieces, tokenizer.encode(text[start:] if start else text)]
