"""From the configuration to what the trainer uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gpt3d.config.schema import DataConfig, RunConfig
from gpt3d.data.blend import BlendedDataset
from gpt3d.data.cache import build_once, cache_root, recipe_key
from gpt3d.data.corpus import Corpus, open_corpus, prepared_folder, sample_texts, source_identity
from gpt3d.data.dataset import Dataset, SyntheticDataset, TokenDataset, ValidationSet, count_ids, unigram_entropy
from gpt3d.data.errors import DataError
from gpt3d.data.order import ORDER_VERSION
from gpt3d.data.packing import PackedDataset
from gpt3d.data.settings import corpora
from gpt3d.data.streaming import open_stream
from gpt3d.data.token_source import Concatenation
from gpt3d.data.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from gpt3d.data.vocabulary import trained_json


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


def prepare(config: RunConfig) -> list[Path]:
    """Make the prepared corpora of this configuration if they are missing; their folders.

    Safe in any number of processes at once. Call it before the ranks start, so that one process shows the progress.
    """
    tokenizer = open_tokenizer(config)
    folders = []
    for source, _ in corpora(config.data).values():
        if source.source not in ("synthetic", "tokens") and not source.hf.streaming:
            folders.append(prepared_folder(source, config.data, tokenizer)[0])
            if source.validation_paths:
                held_out = replace(source, paths=source.validation_paths, validation_paths=[])
                folders.append(prepared_folder(held_out, replace(config.data, validation_fraction=0.0), tokenizer)[0])
    return folders


def build_data(config: RunConfig, dp_rank: int = 0, dp_size: int = 1) -> Data:
    """Open the data of a run, preparing it first if need be. Call it on every rank; no communication takes place."""
    if not 0 <= dp_rank < dp_size:
        raise DataError(f"data-parallel rank {dp_rank} is not within 0 to {dp_size - 1}")
    corpora(config.data)  # complains about settings first, before any work
    tokenizer = open_tokenizer(config)
    if config.data.source == "synthetic":
        return _synthetic(config, tokenizer)
    if config.data.source == "hf" and config.data.hf.streaming:
        return _streaming(config, tokenizer, dp_rank, dp_size)
    return _prepared(config, tokenizer)


def open_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer of the run; `tokenizer.kind=trained` is trained on its corpus once, and kept in the cache."""
    wanted = config.tokenizer
    if wanted.kind != "trained":
        return load_tokenizer(wanted)
    sources = [source for source, _ in corpora(config.data).values()]
    recipe: dict[str, Any] = {"vocab_size": wanted.vocab_size, "train_bytes": wanted.train_bytes}
    recipe["sources"] = [source_identity(source) for source in sources]
    folder = cache_root(config.data.cache_dir) / f"tokenizer-{recipe_key(recipe)}"

    def build(target: Path) -> dict[str, Any]:
        content = trained_json(sample_texts(sources, wanted.train_bytes), wanted.vocab_size)
        tokenizer = JsonTokenizer(content, "trained")
        if tokenizer.vocab_size != wanted.vocab_size:
            raise DataError(
                f"tokenizer.vocab_size={wanted.vocab_size}: the corpus is too small for so many; it gives "
                f"{tokenizer.vocab_size}"
            )
        (target / "tokenizer.json").write_text(content, encoding="utf-8")
        return {"recipe": recipe}

    build_once(folder, build)
    return JsonTokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"), f"trained-{wanted.vocab_size}")


def _prepared(config: RunConfig, tokenizer: Tokenizer) -> Data:
    data = config.data
    parts = corpora(data)
    opened = [open_corpus(name, source, data, tokenizer) for name, (source, _) in parts.items()]
    shares = [share for _, share in parts.values()]
    datasets = [_dataset(data, corpus, tokenizer, i) for i, corpus in enumerate(opened)]
    train: Dataset = datasets[0] if len(datasets) == 1 else BlendedDataset(datasets, shares, data.seed)
    held_out = [corpus.validation for corpus in opened if corpus.validation is not None]
    validation, entropy = None, None
    if held_out:
        tokens = held_out[0] if len(held_out) == 1 else Concatenation(held_out)
        if tokens.tokens < 2:
            raise DataError(
                f"data.validation_fraction={data.validation_fraction} of {opened[0].train.tokens:,} tokens leaves "
                "nothing to validate on; raise it, or set it to 0 to train on everything"
            )
        validation = ValidationSet(tokens, data.seq_len, train.mask_eod)
        counts = [count_ids(corpus.train, tokenizer.vocab_size) for corpus in opened]
        scale = min(c.sum() / share for c, share in zip(counts, shares, strict=True))
        blended = np.sum([c / c.sum() * s * scale for c, s in zip(counts, shares, strict=True)], axis=0)
        entropy = unigram_entropy(blended, count_ids(tokens, tokenizer.vocab_size))
    samples = config.trainer.steps * config.trainer.global_batch_size
    lines = [
        _describe(corpus, dataset, share, samples, tokenizer)
        for corpus, dataset, share in zip(opened, datasets, shares, strict=True)
    ]
    return Data(
        train=train,
        validation=validation,
        tokenizer=tokenizer,
        unigram_entropy=entropy,
        largest_id=tokenizer.vocab_size - 1,
        fingerprint=_fingerprint(
            config, tokenizer, [f"{c.digest}*{s:.6f}" for c, s in zip(opened, shares, strict=True)]
        ),
        info="\n".join(lines),
    )


def _dataset(data: DataConfig, corpus: Corpus, tokenizer: Tokenizer, stream: int) -> TokenDataset | PackedDataset:
    if data.packing == "best_fit":
        cache = cache_root(data.cache_dir)
        return PackedDataset(
            corpus.train, corpus.digest, data.seq_len, data.seed, cache, tokenizer.eod, stream, data.document_masks
        )
    mask_eod = tokenizer.eod if data.document_masks else None
    return TokenDataset(corpus.train, data.seq_len, data.seed, stream, mask_eod, tokenizer.vocab_size)


def _describe(
    corpus: Corpus, dataset: TokenDataset | PackedDataset, share: float, samples: int, tokenizer: Tokenizer
) -> str:
    held_out = corpus.validation
    passes = samples * share / dataset.samples_per_epoch
    often = " (beyond 4, repeated text teaches less and less)" if passes > 4 else ""
    kept = f"{held_out.documents:,} documents, {held_out.tokens:,} tokens" if held_out else "nothing"
    return (
        f"{corpus.name}{f' ({100 * share:.4g} % of the samples)' if share < 1 else ''}: "
        f"{corpus.train.documents:,} documents, {corpus.train.tokens:,} tokens of {tokenizer.name}; "
        f"{dataset.describe()}, {passes:.3g} passes in this run{often}; held out: {kept}"
        f"{corpus.notes}"
    )


def _synthetic(config: RunConfig, tokenizer: Tokenizer) -> Data:
    vocab_size, seq_len, seed = config.model.vocab_size, config.data.seq_len, config.data.seed
    return Data(
        train=SyntheticDataset(vocab_size, seq_len, seed),
        validation=ValidationSet(SyntheticDataset(vocab_size, seq_len, seed, stream="validation"), seq_len),
        tokenizer=tokenizer,
        unigram_entropy=math.log(vocab_size),
        largest_id=vocab_size - 1,
        fingerprint=_fingerprint(config, tokenizer, [f"synthetic-{vocab_size}"]),
        info=f"synthetic: uniform pseudo-random ids below {vocab_size:,}; the loss cannot fall below ln {vocab_size:,}",
    )


def _streaming(config: RunConfig, tokenizer: Tokenizer, dp_rank: int, dp_size: int) -> Data:
    stream = open_stream(config.data, tokenizer, dp_rank, dp_size)
    validation = ValidationSet(stream.held_out, config.data.seq_len, stream.mask_eod) if stream.held_out else None
    return Data(
        train=stream,
        validation=validation,
        tokenizer=tokenizer,
        unigram_entropy=None,
        largest_id=tokenizer.vocab_size - 1,
        fingerprint=_fingerprint(config, tokenizer, [stream.identity]),
        info=stream.describe(),
    )


def _fingerprint(config: RunConfig, tokenizer: Tokenizer, corpora: list[str]) -> dict[str, str]:
    return {
        "corpus": " ".join(corpora),
        "tokenizer": tokenizer.fingerprint,
        "data.seq_len": str(config.data.seq_len),
        "data.seed": str(config.data.seed),
        "data.packing": config.data.packing,
        "data.document_masks": str(config.data.document_masks),
        "order_version": str(ORDER_VERSION),
    }
