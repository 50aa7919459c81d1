"""Names, commit, discovery and retention of checkpoint folders. No torch here: the commands must start fast.

A checkpoint is written under a temporary name, synced, marked and renamed, in this order; so a folder with its final
name is whole, at whatever point a machine stopped. Nothing is ever written into a folder that has its final name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt3d.checkpoint.blocks import CorruptCheckpoint, write_file
from gpt3d.config.problems import ConfigError, Problem

FORMAT = 1  # of all files in a checkpoint
MARK = "COMMITTED"
INDEX, STATE, SUMMARY = "index.json", "state.json", "summary.txt"
TEMPORARY, DELETED = ".tmp-", ".del-"
_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Folder of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The inverse of `step_name`; None for every other name, `step-00000010.backup` among them."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def is_committed(folder: Path) -> bool:
    return (folder / MARK).is_file()


def committed(root: Path) -> list[Path]:
    """The committed checkpoints of a run, newest first."""
    if not root.is_dir():
        return []
    found = [(step, path) for path in root.iterdir() if (step := step_of(path)) is not None and is_committed(path)]
    return [path for _, path in sorted(found, reverse=True)]


def commit(temporary: Path, final: Path, texts: Mapping[str, str]) -> None:
    """Add the small files `texts` and the mark, and give the folder its final name. Raises OSError.

    A folder that has the name already (a damaged one that was passed over) is kept under another.
    """
    for name, text in texts.items():
        write_file(temporary / name, [memoryview(text.encode())])
    lines = []
    for name in (INDEX, *texts):
        data = (temporary / name).read_bytes()
        lines.append(f"{zlib.crc32(data):08x} {len(data)} {name}\n")
    write_file(temporary / MARK, [memoryview("".join(lines).encode())])
    sync_folder(temporary)
    if final.exists():
        final.rename(_free_name(final.with_name(f"replaced-{final.name}")))
    temporary.rename(final)
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    """Make names in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(folder: Path) -> dict[str, Any]:
    """The contents of state.json, after checking the small files against the mark.

    Raises CorruptCheckpoint; ConfigError for a sound checkpoint of a format that this version does not know.
    """
    mark = folder / MARK
    if not mark.is_file():
        raise CorruptCheckpoint(f"{folder} is incomplete: it has no {MARK} file, so it was never finished")
    contents: dict[str, bytes] = {}
    for line in mark.read_text(errors="replace").splitlines():
        try:
            crc, size, name = line.split(" ")
            data = (folder / name).read_bytes()
            intact = len(data) == int(size) and zlib.crc32(data) == int(crc, 16)
        except (ValueError, OSError):
            raise CorruptCheckpoint(f"{mark} is damaged, or a file that it lists is missing: {line[:100]!r}") from None
        if not intact:
            raise CorruptCheckpoint(f"{folder / name} is damaged: it is not what {MARK} says")
        contents[name] = data
    if not {INDEX, STATE} <= contents.keys():
        raise CorruptCheckpoint(f"{mark} is damaged: it does not list {INDEX} and {STATE}")
    state: dict[str, Any] = json.loads(contents[STATE])
    if state["format"] != FORMAT:
        why = f"is of format {state['format']}, and this version of gpt3d reads {FORMAT}"
        raise ConfigError([Problem("checkpoint", str(folder), why, "the version of gpt3d that wrote it")])
    return state


def unmarked(root: Path) -> list[Path]:
    """Folders with the name of a checkpoint and without its mark: a copy that is not whole, for instance."""
    found = root.iterdir() if root.is_dir() else ()
    return sorted(path for path in found if step_of(path) is not None and not is_committed(path))


def sweep(root: Path) -> None:
    """Remove what a stopped process left behind. Only at the start, when nobody writes."""
    if root.is_dir():
        for path in root.iterdir():
            if path.name.startswith((TEMPORARY, DELETED)):
                shutil.rmtree(path, ignore_errors=True)


def retain(root: Path, keep_last: int, keep_every: int) -> None:
    """Remove all but the newest `keep_last` checkpoints and those at multiples of `keep_every` steps (0: none).

    Each is renamed before its files go, so no stop in between leaves a folder that looks whole.
    """
    for path in committed(root)[keep_last:]:
        step = step_of(path)
        if keep_every and step is not None and step % keep_every == 0:
            continue
        doomed = _free_name(root / f"{DELETED}{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint so that it is not tried again; nothing of it is removed."""
    target = _free_name(folder.with_name(f"damaged-{folder.name}"))
    folder.rename(target)
    return target


def _free_name(path: Path) -> Path:
    free, count = path, 2
    while free.exists():
        free, count = path.with_name(f"{path.name}-{count}"), count + 1
    return free
