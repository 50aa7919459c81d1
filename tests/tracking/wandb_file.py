"""Reads the file that wandb writes for a run: LevelDB's log format around protobuf records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7  # bytes; a record never crosses a block, its fragments do
FULL, FIRST, LAST = 1, 2, 4


@dataclass
class WandbFile:
    """What one start of a run left."""

    id: str = ""
    name: str = ""
    group: str = ""
    job_type: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    step_metrics: dict[str, str] = field(default_factory=dict)  # of define_metric
    exit_code: int | None = None


def read(folder: Path) -> WandbFile:
    """The one run in `folder` (an offline-run-* folder)."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    found = WandbFile()
    for payload in _payloads(path.read_bytes()):
        record = Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            found.id, found.name, found.group, found.job_type = (
                run.run_id,
                run.display_name,
                run.run_group,
                run.job_type,
            )
            found.tags = list(run.tags)
            found.config |= _values(run.config.update)
        elif kind == "history":
            found.history.append(_values(record.history.item))
        elif kind == "metric":
            found.step_metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def _payloads(data: bytes) -> Iterator[bytes]:
    at, parts = HEADER, b""  # the file begins with a header of its own, as long as a record's
    while at + HEADER <= len(data):
        room = BLOCK - at % BLOCK
        if room < HEADER:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += HEADER
        parts = (b"" if kind in (FULL, FIRST) else parts) + data[at : at + length]
        at += length
        if kind in (FULL, LAST):
            yield parts


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
