"""A corpus as a list of pieces of work. It depends on the corpus alone, so the result doesn't depend on the workers."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from gpt3d.config.schema import SourceConfig
from gpt3d.data.errors import DataError

PIECE_BYTES = 16 << 20
PIECE_ROWS = 20_000
COMPRESSED = (".gz", ".zst")
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".txt": "txt", ".md": "txt", ".py": "txt"}
KINDS |= {".parquet": "parquet"}
# Of the standard library: no tests, no generated tables, nothing that was installed later.
_STDLIB_SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "lib2to3"}


@dataclass(frozen=True)
class Part:
    """A stretch of one file: bytes, or row groups of a parquet file, or rows of a dataset."""

    kind: str  # "jsonl", "json", "txt", "lines", "parquet", "hf", "shakespeare"
    path: str
    start: int
    end: int
    size: int


@dataclass(frozen=True)
class Piece:
    """What one worker does at a time: parts of about 16 MB together."""

    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes, or rows of a dataset."""
        return sum(part.size for part in self.parts)


def find_files(paths: Iterable[str], suffixes: Iterable[str]) -> list[Path]:
    """Files named, matched by a glob or below a folder, each once and sorted by name within what was given."""
    found: dict[Path, None] = {}
    wanted = tuple(suffixes)
    for given in paths:
        expanded = str(Path(given).expanduser())
        if Path(expanded).is_dir():
            matches = [p for p in sorted(Path(expanded).rglob("*")) if p.is_file() and p.name.endswith(wanted)]
        elif has_magic(expanded) and not Path(expanded).exists():
            matches = [Path(p) for p in sorted(glob(expanded, recursive=True)) if Path(p).is_file()]
        else:
            matches = [Path(expanded)] if Path(expanded).is_file() else []
        if not matches:
            kinds = ", ".join(suffix for suffix in wanted if not suffix.endswith(COMPRESSED))
            raise DataError(f"data.paths: {given} matches no file ({kinds}); the current folder is {Path.cwd()}")
        found |= dict.fromkeys(path.resolve() for path in matches)
    return list(found)


def file_kind(path: Path, txt_documents: str) -> str:
    """Format of a file by its name, a compression suffix aside."""
    name = path.name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    kind = KINDS.get(Path(name).suffix)
    if kind is None or (kind == "parquet" and path.suffix in COMPRESSED):
        raise DataError(f"{path}: unknown format; data.source=files reads {', '.join(KINDS)}, and .gz or .zst of them")
    return "lines" if kind == "txt" and txt_documents == "line" else kind


def source_files(config: SourceConfig, paths: list[str]) -> list[Path]:
    """The files of a source that is read from files."""
    if config.source == "stdlib":
        return list(_stdlib())
    if not paths:
        raise DataError("data.source=files needs data.paths, for example data.paths=[corpus/*.jsonl.gz]")
    return find_files(paths, [k + c for k in KINDS for c in ("", *COMPRESSED)])


def file_pieces(config: SourceConfig, files: list[Path]) -> list[Piece]:
    """Pieces of these files, in order."""
    pieces: list[list[Part]] = [[]]
    for path in files:
        for part in _parts(path, file_kind(path, config.txt_documents)):
            if pieces[-1] and sum(p.size for p in pieces[-1]) + part.size > PIECE_BYTES:
                pieces.append([])
            pieces[-1].append(part)
    return [Piece(tuple(parts)) for parts in pieces if parts]


def row_pieces(kind: str, rows: int) -> list[Piece]:
    """Pieces of something that is read by row number."""
    steps = range(0, rows, PIECE_ROWS)
    return [Piece((Part(kind, "", i, min(rows, i + PIECE_ROWS), min(rows, i + PIECE_ROWS) - i),)) for i in steps]


def identity(files: list[Path]) -> list[list[Any]]:
    """What is taken to determine the content of files without reading them: path, size, time of change."""
    return [[str(path), (stat := path.stat()).st_size, stat.st_mtime_ns] for path in files]


def _parts(path: Path, kind: str) -> Iterator[Part]:
    size = path.stat().st_size
    if kind == "parquet":
        yield from _row_groups(path)
    elif path.suffix in COMPRESSED or kind == "json":
        yield Part(kind, str(path), 0, size, size)
    else:
        # A line belongs to the stretch in which it begins. A text file beyond 2 pieces is cut the same way.
        step = PIECE_BYTES if kind != "txt" or size > 2 * PIECE_BYTES else max(1, size)
        for start in range(0, max(1, size), step):
            end = min(size, start + step)
            yield Part(kind, str(path), start, end, end - start)


def _row_groups(path: Path) -> Iterator[Part]:
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(path)
    except Exception:  # damaged: the reader reports it by the rules of on_error
        yield Part("parquet", str(path), 0, 1, path.stat().st_size)
        return
    for group in range(metadata.num_row_groups):
        yield Part("parquet", str(path), group, group + 1, metadata.row_group(group).total_byte_size)


def _stdlib() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    if not (root / "os.py").is_file():
        raise DataError(f"data.source=stdlib: {root} holds no .py files (frozen or zipped Python); use another source")
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if not any(name in _STDLIB_SKIP or name.startswith("config-") for name in folders):
            yield path
