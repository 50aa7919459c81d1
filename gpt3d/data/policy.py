"""What happens to bad input: `on_error=raise` stops with file and line, `skip` leaves it out, `replace` repairs it.

Nothing is dropped without being counted. Empty documents and null are no errors: they are left out and counted.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt3d.data.errors import DataError

_LISTED = 5  # places kept for the summary


@dataclass(frozen=True)
class Place:
    """Where a document is: the n-th line after byte `start` of a file, or the n-th row of `unit` (both from 1)."""

    path: str
    number: int
    start: int = 0
    unit: str = "line"

    def __str__(self) -> str:
        if self.unit != "line":
            return f"{self.path}: {self.unit} {self.number}"
        return f"{self.path}:{self.number + _lines_before(self.path, self.start)}"


@dataclass
class Policy:
    """Applies `on_error` and keeps count: `counts` by kind, and the first places of each run of bad input."""

    on_error: str
    column: str = "text"
    counts: Counter[str] = field(default_factory=Counter)
    places: list[tuple[str, Place]] = field(default_factory=list)

    def bad(self, kind: str, place: Place, detail: str = "") -> None:
        """A document that cannot be used."""
        if self.on_error == "raise":
            why = f"{kind}: {detail}" if detail else kind
            raise DataError(
                f"{place}: {why} (data.on_error=skip leaves such documents out, replace repairs what it can)"
            )
        self.count(kind, place)

    def count(self, kind: str, place: Place) -> None:
        """Something that is no error, to be told in the end."""
        self.counts[kind] += 1
        if len(self.places) < _LISTED:
            self.places.append((kind, place))

    def from_json(self, line: bytes, place: Place) -> str | None:
        """Text of one JSON line, None if there is none."""
        text = self.decode(line, place)
        if text is None or not text.strip():
            return None
        try:
            record = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            self.bad("not valid JSON", place, str(error))
            return None
        if not isinstance(record, dict):
            self.bad("not a JSON object", place, f"found {type(record).__name__}")
            return None
        if self.column not in record:
            self.bad("no text column", place, f"data.text_column={self.column}, the columns are {sorted(record)}")
            return None
        return self.from_value(record[self.column], place)

    def from_value(self, value: Any, place: Place) -> str | None:
        """Text of a column's value, None if there is none."""
        if value is None:
            self.count("null", place)
            return None
        if not isinstance(value, str):
            if self.on_error != "replace" or isinstance(value, dict | list):
                self.bad("not text", place, f"{self.column} is {json.dumps(value, default=str)[:80]}")
                return None
            self.count("replaced: not text", place)
            value = json.dumps(value, default=str)
        if not value.strip():
            self.count("empty", place)
            return None
        return value if value.isascii() else self._without_surrogates(value, place)

    def from_bytes(self, content: bytes, place: Place) -> str | None:
        """Text of a plain text document, None if there is none."""
        text = self.decode(content, place)
        if text is not None and not text.strip():
            self.count("empty", place)
            return None
        return text

    def decode(self, content: bytes, place: Place) -> str | None:
        """UTF-8 to text; a byte-order mark at the front is no text."""
        try:
            return content.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
        except UnicodeDecodeError as error:
            if self.on_error != "replace":
                around = content[max(0, error.start - 10) : error.start + 10]
                self.bad("invalid UTF-8", place, f"byte {error.start + 1} of the document, in {around!r}")
                return None
            self.count("replaced: invalid UTF-8", place)
            return content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")

    def _without_surrogates(self, text: str, place: Place) -> str | None:
        try:
            text.encode("utf-8")
            return text
        except UnicodeEncodeError as error:
            if self.on_error != "replace":
                self.bad("lone surrogate", place, f"{text[error.start]!r} at character {error.start + 1}")
                return None
            self.count("replaced: lone surrogate", place)
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _lines_before(path: str, offset: int) -> int:
    """Newlines in the first `offset` bytes of a plain file."""
    count = 0
    if offset:
        with Path(path).open("rb") as file:
            while offset > 0 and (block := file.read(min(offset, 1 << 20))):
                count, offset = count + block.count(b"\n"), offset - len(block)
    return count
