"""Prepared results in a folder each: built once under a lock, visible only when complete."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gpt3d.data.errors import DataError

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"


def cache_root(cache_dir: str | None) -> Path:
    """`data.cache_dir`, or the user's cache folder by the XDG rule."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt3d"


def recipe_key(recipe: dict[str, Any]) -> str:
    """Short name of a result: a hash of all that determines it."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def build_once(folder: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """The manifest of `folder`; builds it first if it is missing. Any number of processes may call this at once.

    `build(temporary)` fills an empty folder and returns the manifest. One process per file system builds, the others
    wait. A builder that dies leaves only a temporary folder, which the next one removes.
    """
    if (manifest := read_manifest(folder)) is not None:
        return manifest
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        _acquire(lock, folder)
    except OSError as error:
        raise DataError(
            f"cannot write the data cache {folder.parent}: {error}; set data.cache_dir to a folder that every node can "
            "write to"
        ) from error
    try:
        if (manifest := read_manifest(folder)) is not None:
            return manifest
        for stale in folder.parent.glob(f"{folder.name}.tmp-*"):
            shutil.rmtree(stale)
        temporary = folder.parent / f"{folder.name}.tmp-{os.getpid()}"
        temporary.mkdir()
        try:
            manifest = build(temporary)
            with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
                json.dump(manifest, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            if folder.exists():  # without a manifest: not a result of ours
                raise DataError(f"{folder} exists but holds no {MANIFEST}; move it away")
            os.rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return manifest
    finally:
        lock.release()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished result, None where there is none."""
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _acquire(lock: FileLock, folder: Path) -> None:
    try:
        lock.acquire(timeout=5)
    except Timeout:
        log.info("waiting for another process that prepares %s", folder)
        lock.acquire()
