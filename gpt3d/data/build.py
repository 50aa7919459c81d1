"""From the configuration to what the trainer uses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt3d.config.schema import RunConfig
from gpt3d.data import embedded
from gpt3d.data.cache import build_once, cache_root, recipe_key
from gpt3d.data.dataset import Dataset, SyntheticDataset, TokenDataset, ValidationSet, unigram_entropy
from gpt3d.data.errors import DataError
from gpt3d.data.order import ORDER_VERSION
from gpt3d.data.preparation import FORMAT, build_corpus
from gpt3d.data.token_file import TokenFile
from gpt3d.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Data:
    """All that a run needs of its data.

    `unigram_entropy`: nats per validation token without any context. `largest_id`: no id above it can occur, so
    `model.vocab_size` must exceed it. `fingerprint`: what must be equal for a resumed run to continue the same stream.
    """

    train: Dataset
    validation: ValidationSet | None
    tokenizer: Tokenizer
    unigram_entropy: float | None
    largest_id: int
    fingerprint: dict[str, str]
    info: str


def prepare(config: RunConfig) -> Path | None:
    """Make the prepared corpus of this configuration if it is missing; its folder, or None where the source needs none.

    Safe in any number of processes at once. Call it before the ranks start, so that one process shows the progress.
    """
    if config.data.source == "synthetic":
        return None
    return _prepare(config, load_tokenizer(config.tokenizer))[0]


def build_data(config: RunConfig, dp_rank: int = 0, dp_size: int = 1) -> Data:
    """Open the data of a run, preparing it first if need be. Call it on every rank; no communication takes place."""
    if not 0 <= dp_rank < dp_size:
        raise DataError(f"data-parallel rank {dp_rank} is not within 0 to {dp_size - 1}")
    tokenizer = load_tokenizer(config.tokenizer)
    if config.data.source == "synthetic":
        return _synthetic(config, tokenizer)
    return _prepared(config, tokenizer)


def _prepare(config: RunConfig, tokenizer: Tokenizer) -> tuple[Path, dict[str, Any]]:
    recipe = {
        "format": FORMAT,
        "source": embedded.SHA256["shakespeare.jsonl.xz"],
        "tokenizer": tokenizer.fingerprint,
        "validation_fraction": config.data.validation_fraction,
    }
    folder = cache_root(config.data.cache_dir) / f"{config.data.source}-{tokenizer.name}-{recipe_key(recipe)}"
    manifest = build_once(
        folder, lambda target: build_corpus(embedded.shakespeare(), tokenizer, config.data.validation_fraction, target)
    )
    return folder, manifest


def _prepared(config: RunConfig, tokenizer: Tokenizer) -> Data:
    folder, manifest = _prepare(config, tokenizer)
    file, held_out = TokenFile(folder / "train"), TokenFile(folder / "validation")
    train = TokenDataset(file, config.data.seq_len, config.data.seed)
    validation, entropy = None, None
    if config.data.validation_fraction > 0:
        if held_out.tokens < 2:
            raise DataError(
                f"data.validation_fraction={config.data.validation_fraction} of {file.tokens:,} tokens leaves nothing "
                "to validate on; raise it, or set it to 0 to train on everything"
            )
        validation = ValidationSet(held_out, config.data.seq_len)
        entropy = unigram_entropy(file, held_out, tokenizer.vocab_size)
    index = train.index
    info = (
        f"{config.data.source}: {len(file):,} documents, {file.tokens:,} tokens of {tokenizer.name}; "
        f"{index.samples_per_epoch:,} samples of {config.data.seq_len:,} an epoch, {index.remainder:,} tokens over; "
        f"held out: {len(held_out):,} documents, {held_out.tokens:,} tokens"
    )
    return Data(
        train=train,
        validation=validation,
        tokenizer=tokenizer,
        unigram_entropy=entropy,
        largest_id=tokenizer.vocab_size - 1,
        fingerprint=_fingerprint(config, tokenizer, manifest["train"]["checksum"]),
        info=info,
    )


def _synthetic(config: RunConfig, tokenizer: Tokenizer) -> Data:
    vocab_size, seq_len, seed = config.model.vocab_size, config.data.seq_len, config.data.seed
    return Data(
        train=SyntheticDataset(vocab_size, seq_len, seed),
        validation=ValidationSet(SyntheticDataset(vocab_size, seq_len, seed, stream="validation"), seq_len),
        tokenizer=tokenizer,
        unigram_entropy=math.log(vocab_size),
        largest_id=vocab_size - 1,
        fingerprint=_fingerprint(config, tokenizer, f"synthetic-{vocab_size}"),
        info=f"synthetic: uniform pseudo-random ids below {vocab_size:,}; the loss cannot fall below ln {vocab_size:,}",
    )


def _fingerprint(config: RunConfig, tokenizer: Tokenizer, corpus: str) -> dict[str, str]:
    return {
        "corpus": corpus,
        "tokenizer": tokenizer.fingerprint,
        "data.seq_len": str(config.data.seq_len),
        "data.seed": str(config.data.seed),
        "order_version": str(ORDER_VERSION),
    }
