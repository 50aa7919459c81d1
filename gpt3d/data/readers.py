"""Parts of files to documents. Each reader yields the text of one document after another, read as a stream."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from gpt3d.config.schema import SourceConfig
from gpt3d.data import embedded, hub
from gpt3d.data.pieces import COMPRESSED, Part
from gpt3d.data.policy import Place, Policy

Progress = Callable[[int], None]  # called with the units (bytes or rows) done since the last call


def read_part(part: Part, config: SourceConfig, policy: Policy, progress: Progress) -> Iterator[str]:
    """The documents of a part."""
    if part.kind == "shakespeare":
        yield from embedded.shakespeare()[part.start : part.end]
        progress(part.size)
    elif part.kind == "hf":
        yield from _hf(part, config, policy, progress)
    elif part.kind == "parquet":
        yield from _parquet(part, policy, progress)
    else:
        yield from _file(part, policy, progress)


def _file(part: Part, policy: Policy, progress: Progress) -> Iterator[str]:
    place = Place(part.path, 1, part.start)
    readers = {"jsonl": _jsonl, "json": _json, "txt": _txt, "lines": _lines}
    try:
        with _open(part.path) as (file, raw):
            if part.path.endswith(COMPRESSED):
                part = Part(part.kind, part.path, 0, 1 << 62, part.size)
            yield from readers[part.kind](part, file, policy, _by_position(raw, progress))
    except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
        policy.bad("cannot be read to its end", place, f"{error} (truncated or damaged copy?)")


def _jsonl(part: Part, file: BinaryIO, policy: Policy, progress: Callable[[], None]) -> Iterator[str]:
    for place, line in _stretch(part, file, progress):
        if line.strip() and (text := policy.from_json(line, place)) is not None:
            yield text


def _lines(part: Part, file: BinaryIO, policy: Policy, progress: Callable[[], None]) -> Iterator[str]:
    for place, line in _stretch(part, file, progress):
        if line.strip() and (text := policy.from_bytes(line.rstrip(b"\r\n"), place)) is not None:
            yield text


def _txt(part: Part, file: BinaryIO, policy: Policy, progress: Callable[[], None]) -> Iterator[str]:
    content = b"".join(line for _, line in _stretch(part, file, progress))
    if part.start:
        policy.count("cut of a text file beyond 32 MB", Place(part.path, 1, part.start))
    if (text := policy.from_bytes(content, Place(part.path, 1, part.start))) is not None:
        yield text


def _json(part: Part, file: BinaryIO, policy: Policy, progress: Callable[[], None]) -> Iterator[str]:
    """A `.json` file: one array of objects, or in truth JSON lines."""
    head = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
    file.seek(0)
    if not head.startswith(b"["):
        yield from _jsonl(part, file, policy, progress)
        return
    text = policy.decode(file.read(), Place(part.path, 1))
    try:
        records = json.loads(text or "[]")
    except json.JSONDecodeError as error:
        policy.bad("not valid JSON", Place(part.path, 1), str(error))
        return
    for number, record in enumerate(records, start=1):
        place = Place(part.path, number, unit="record")
        if not isinstance(record, dict) or policy.column not in record:
            found = sorted(record) if isinstance(record, dict) else type(record).__name__
            policy.bad("no text column", place, f"data.text_column={policy.column}, found {found}")
        elif (value := policy.from_value(record[policy.column], place)) is not None:
            yield value
    progress()


def _stretch(part: Part, file: BinaryIO, progress: Callable[[], None]) -> Iterator[tuple[Place, bytes]]:
    """The lines that begin in bytes [start, end) of a file."""
    position, number = part.start, 0
    if position:
        file.seek(position - 1)
        position += len(file.readline()) - 1
    first = position
    while position < part.end and (line := file.readline()):
        number += 1
        yield Place(part.path, number, first), line
        position += len(line)
        progress()


def _parquet(part: Part, policy: Policy, progress: Progress) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = Place(part.path, part.start + 1, unit="row group")
    try:
        with pq.ParquetFile(part.path) as file:
            if policy.column not in file.schema_arrow.names:
                columns = sorted(file.schema_arrow.names)
                policy.bad("no text column", first, f"data.text_column={policy.column}, the columns are {columns}")
                return
            number, unit = 0, f"row group {part.start + 1}, row"
            for batch in file.iter_batches(1000, row_groups=[part.start], columns=[policy.column]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    if (text := policy.from_value(value, Place(part.path, number, unit=unit))) is not None:
                        yield text
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        policy.bad("cannot be read", first, f"{error} (truncated or damaged copy?)")
    progress(part.size)


def _hf(part: Part, config: SourceConfig, policy: Policy, progress: Progress) -> Iterator[str]:
    rows = hub.load(config.hf, policy.column)
    for begin in range(part.start, part.end, 1000):
        end = min(part.end, begin + 1000)
        for number, value in enumerate(rows[begin:end][policy.column], start=begin + 1):
            if (text := policy.from_value(value, Place(hub.describe(config.hf), number, unit="row"))) is not None:
                yield text
        progress(end - begin)


class _open:
    """Opens a plain or compressed file: (stream of its content, the raw file whose position shows the progress)."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> tuple[BinaryIO, BinaryIO]:
        self._raw = open(self._path, "rb")
        stream: Any = self._raw
        if self._path.endswith(".gz"):
            stream = gzip.GzipFile(fileobj=self._raw)
        elif self._path.endswith(".zst"):
            stream = io.BufferedReader(_Zstd(self._raw), 1 << 17)
        return stream, self._raw

    def __exit__(self, *error: object) -> None:
        self._raw.close()


class _Zstd(io.RawIOBase):
    """Content of a .zst file. The package's own reader takes a truncated file for a complete one."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw, self._new_frame = raw, zstandard.ZstdDecompressor().decompressobj
        self._error: type[Exception] = zstandard.ZstdError
        self._frame: Any = None
        self._compressed, self._ready = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._compressed = self._compressed or self._raw.read(1 << 17)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the last zstd frame has no end")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._ready = self._frame.decompress(self._compressed)
            except self._error as error:
                raise OSError(str(error)) from error
            self._compressed = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _by_position(raw: BinaryIO, progress: Progress) -> Callable[[], None]:
    """Turns positions in the raw file into steps of progress."""
    last = raw.tell()

    def step() -> None:
        nonlocal last
        if (now := raw.tell()) > last:
            progress(now - last)
            last = now

    return step
