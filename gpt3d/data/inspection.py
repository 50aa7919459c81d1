"""A look into token files: counts, lengths, a few samples with their boundaries, and whether the checksums hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gpt3d.config.schema import TokenizerConfig
from gpt3d.data.cache import read_manifest
from gpt3d.data.errors import DataError
from gpt3d.data.token_file import TokenFile, with_suffix
from gpt3d.data.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer

_SHOWN_TOKENS = 40
_BAR = 40


def inspect(path: Path) -> str:
    """The report on a prepared folder, or on one pair of files by its name with or without `.bin` or `.idx`."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if path.is_dir():
        prefixes = sorted(p.with_suffix("") for p in path.glob("*.idx"))
    else:
        prefixes = [prefix] if with_suffix(prefix, ".idx").is_file() else []
    if not prefixes:
        raise DataError(f"{path} is no folder with .idx files and no name of a .bin/.idx pair")
    manifest = read_manifest(prefixes[0].parent) or {}
    tokenizer = _tokenizer(prefixes[0].parent, manifest)
    lines = [f"{key}: {manifest[key]}" for key in ("tokenizer", "left_out", "recipe") if key in manifest]
    for prefix in prefixes:
        lines += ["", *_report(prefix, manifest.get(prefix.name), tokenizer)]
    return "\n".join(lines)


def _report(prefix: Path, recorded: Any, tokenizer: Tokenizer | None) -> list[str]:
    file = TokenFile(prefix)
    lengths = file.document_lengths()
    lines = [f"{prefix}: {file.documents:,} documents, {file.tokens:,} tokens, {file.dtype}"]
    if isinstance(recorded, dict) and "checksum" in recorded:
        good = file.checksum() == recorded["checksum"]
        lines.append(f"checksum: {'good' if good else 'WRONG: the files are not what was written'}")
    else:
        lines.append("checksum: none recorded")
    if len(lengths):
        lines += ["tokens a document:", *_histogram(lengths)]
        lines += [_document(file, lengths, d, tokenizer) for d in sorted({0, len(lengths) // 2, len(lengths) - 1})]
    return lines


def _histogram(lengths: np.ndarray) -> list[str]:
    """Counts by powers of two."""
    powers = np.where(lengths > 0, np.log2(np.maximum(lengths, 1)).astype(int) + 1, 0)
    counts = np.bincount(powers)
    rows = []
    for power in range(int(powers.min()), len(counts)):
        low, high = (2 ** (power - 1), 2**power - 1) if power else (0, 0)
        bar = "#" * int(np.ceil(_BAR * counts[power] / counts.max()))
        rows.append(f"  {low:>11,} to {high:>11,} {counts[power]:>12,} {bar}")
    mean, median, longest = lengths.mean(), np.median(lengths), lengths.max()
    return [*rows, f"  mean {mean:,.1f}, median {median:,.0f}, longest {longest:,}"]


def _document(file: TokenFile, lengths: np.ndarray, number: int, tokenizer: Tokenizer | None) -> str:
    start, length = int(lengths[:number].sum()), int(lengths[number])
    ids = file.read(start, length).astype(np.int64)
    head, tail = ids[:_SHOWN_TOKENS], ids[max(_SHOWN_TOKENS, length - _SHOWN_TOKENS // 2) :]
    gap = " ... " if length > len(head) + len(tail) else ""
    return f"[document {number:,} at token {start:,}] |{_show(head, tokenizer)}{gap}{_show(tail, tokenizer)}|"


def _show(ids: np.ndarray, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None or (len(ids) and ids.max() >= tokenizer.vocab_size):
        return " ".join(map(str, ids.tolist()))
    return tokenizer.decode(ids).replace("\n", "\\n")


def _tokenizer(folder: Path, manifest: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer that made a folder: the copy in it, or one that is built in; None if it is not to be found."""
    made = manifest.get("tokenizer")
    if not isinstance(made, dict):
        return None
    copy = folder / "tokenizer.json"
    if copy.is_file():
        return JsonTokenizer(copy.read_text(encoding="utf-8"), str(made["name"]), made.get("eod_token"))
    return load_tokenizer(TokenizerConfig(kind="bytes")) if made["name"] == "bytes" else None
