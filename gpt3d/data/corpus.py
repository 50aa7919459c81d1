"""Opens one corpus, preparing it first if need be: its training tokens, its held-out tokens, and what it contains."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt3d.config.schema import DataConfig, SourceConfig
from gpt3d.data import embedded, hub
from gpt3d.data.cache import build_once, cache_root, read_manifest, recipe_key
from gpt3d.data.errors import DataError
from gpt3d.data.pieces import Piece, file_pieces, find_files, identity, row_pieces, source_files
from gpt3d.data.policy import Policy
from gpt3d.data.preparation import FORMAT, prepare_corpus
from gpt3d.data.readers import read_part
from gpt3d.data.token_file import TokenFile, with_suffix
from gpt3d.data.token_source import Concatenation, FlatFile, TokenSource, content_digest, hold_out
from gpt3d.data.tokenizer import Tokenizer
from gpt3d.data.worker import Job

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """`digest` depends on the training tokens alone, not on where they lie."""

    name: str
    train: TokenSource
    validation: TokenSource | None
    digest: str
    notes: str = ""


def open_corpus(name: str, source: SourceConfig, data: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """The corpus `source` describes; `data` has the settings that all corpora of a run share."""
    if source.source == "tokens":
        return _open_tokens(name, source, data, tokenizer)
    folder, manifest = prepared_folder(source, data, tokenizer)
    validation: TokenSource | None = TokenFile(folder / "validation")
    if source.validation_paths:
        held_out = replace(source, paths=source.validation_paths, validation_paths=[])
        validation = TokenFile(
            prepared_folder(held_out, replace(data, validation_fraction=0.0), tokenizer)[0] / "train"
        )
    elif data.validation_fraction == 0:
        validation = None
    left_out = ", ".join(f"{count:,} {kind}" for kind, count in manifest["left_out"].items() if count)
    notes = f"; left out or repaired: {left_out}" if left_out else ""
    return Corpus(name, TokenFile(folder / "train"), validation, manifest["train"]["checksum"], notes)


def prepared_folder(source: SourceConfig, data: DataConfig, tokenizer: Tokenizer) -> tuple[Path, dict[str, Any]]:
    """Folder and manifest of the prepared corpus; made now if it is missing."""
    if source.source == "stdlib":
        source = replace(source, on_error="skip", deduplicate=True)
    fraction = 0.0 if source.validation_paths else data.validation_fraction
    recipe = {
        "format": FORMAT,
        "source": source_identity(source),
        "tokenizer": tokenizer.fingerprint,
        "validation_fraction": fraction,
        "deduplicate": source.deduplicate,
        "shuffle_documents": source.shuffle_documents,
    }
    folder = cache_root(data.cache_dir) / f"{source.source}-{tokenizer.name}-{recipe_key(recipe)}"

    def build(target: Path) -> dict[str, Any]:
        pieces, unit = _pieces(source)
        log.info("preparing %s in %s", source.source, folder)
        manifest = prepare_corpus(Job(source, tokenizer, target), pieces, fraction, data.workers, unit)
        return manifest | {"recipe": recipe}

    return folder, build_once(folder, build)


def source_identity(source: SourceConfig) -> dict[str, Any]:
    """What is taken to determine the documents of a source, without reading them."""
    if source.source in ("tokens", "synthetic"):
        raise DataError(f"data.source={source.source} has no text: tokenizer.kind=trained needs a source of text")
    if source.source == "shakespeare":
        return {"sha256": embedded.SHA256["shakespeare.jsonl.xz"]}
    how = {"column": source.text_column, "txt_documents": source.txt_documents, "on_error": source.on_error}
    if source.source == "hf":
        return how | hub.identity(source.hf)
    if source.source == "stdlib":
        files = source_files(source, [])
        return {"python": platform.python_version(), "files": [[str(f), f.stat().st_size] for f in files]}
    return how | {"files": identity(source_files(source, source.paths))}


def _pieces(source: SourceConfig) -> tuple[list[Piece], str]:
    """The pieces of a source, and the unit of their size: bytes or rows."""
    if source.source == "shakespeare":
        return row_pieces("shakespeare", len(embedded.shakespeare())), "documents"
    if source.source == "hf":
        return row_pieces("hf", len(hub.load(source.hf, source.text_column))), "rows"
    return file_pieces(source, source_files(source, source.paths)), "B"


def _open_tokens(name: str, source: SourceConfig, data: DataConfig, tokenizer: Tokenizer) -> Corpus:
    train = _token_source(source.paths, source.token_dtype, tokenizer)
    validation: TokenSource | None = None
    if source.validation_paths:
        validation = _token_source(source.validation_paths, source.token_dtype, tokenizer)
    elif data.validation_fraction > 0:
        train, validation = hold_out(train, data.validation_fraction)
    return Corpus(name, train, validation, content_digest(train))


def _token_source(paths: list[str], dtype: str, tokenizer: Tokenizer) -> TokenSource:
    if not paths:
        raise DataError("data.source=tokens needs data.paths: names of .bin files, with or without .idx beside them")
    found = find_files([p if p.endswith(".bin") or Path(p).is_dir() else f"{p}.bin" for p in paths], [".bin"])
    sources: list[TokenSource] = []
    for path in found:
        prefix = path.with_suffix("")
        _check_tokenizer(prefix, tokenizer)
        sources.append(TokenFile(prefix) if with_suffix(prefix, ".idx").exists() else FlatFile(path, dtype))
    return sources[0] if len(sources) == 1 else Concatenation(sources)


def _check_tokenizer(prefix: Path, tokenizer: Tokenizer) -> None:
    """A folder of ours says which tokenizer made it: huggingface/nanotron#254."""
    try:
        manifest = read_manifest(prefix.parent)
    except json.JSONDecodeError:
        return
    made = (manifest or {}).get("tokenizer")
    if isinstance(made, dict) and made.get("fingerprint") != tokenizer.fingerprint:
        raise DataError(
            f"{prefix} was made with tokenizer {made.get('name')} ({made.get('fingerprint')}), the run has "
            f"{tokenizer.name} ({tokenizer.fingerprint}); set tokenizer= to the one of the data"
        )


def sample_texts(sources: list[SourceConfig], limit: int) -> Iterator[str]:
    """Documents of the sources, up to `limit` characters in all, for training a tokenizer."""
    for source in sources:
        left = limit // len(sources)
        pieces, _ = _pieces(source)
        policy = Policy(source.on_error, source.text_column)
        for part in (part for piece in pieces for part in piece.parts):
            for text in read_part(part, source, policy, lambda units: None):
                if left <= 0:
                    break
                left -= len(text)
                yield text
