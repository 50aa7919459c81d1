"""The one folder of a run, made by rank 0 or the supervisor; no earlier run is ever overwritten."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "deepspeed", "hydra-core", "omegaconf", "numpy", "datasets", "tokenizers", "tiktoken")
RECORDS = ("config.yaml", "overrides.yaml", "command.txt", "environment.json")
MOST_NAMES = 10_000


class RunDirError(RuntimeError):
    """The folder asked for holds another run, or cannot be made."""

    show_traceback = False


def create(
    path: Path | str, config: dict[str, Any], overrides: Sequence[str], *, exact: bool = False, go_on: bool = False
) -> dict[str, Any]:
    """Make the folder of a run and record in it what the run is; returns `config` with `run_dir` set to it (absolute).

    A folder that holds a run (a `config.yaml`) is left alone: the next free of `path-2`, `path-3`, ... is taken, or,
    with `exact` (the user named the folder), RunDirError is raised. `go_on`: the run in it is continued; what it
    recorded of itself is kept under numbered names (`config-1.yaml`).
    """
    from omegaconf import OmegaConf

    for folder in _candidates(Path(path).absolute(), exact):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirError(f"run_dir={path}: the folder cannot be made ({error})") from None
        recorded = {**config, "run_dir": str(folder)}
        if go_on:
            _number_records(folder)
        try:
            with open(folder / "config.yaml", "x") as file:  # "x": of two runs that want the folder one gets it
                file.write(OmegaConf.to_yaml(OmegaConf.create(recorded)))
        except FileExistsError:
            continue
        (folder / "overrides.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(list(overrides))))
        (folder / "command.txt").write_text(shlex.join(sys.orig_argv) + "\n")
        (folder / "environment.json").write_text(json.dumps(describe_environment(), indent=2) + "\n")
        return recorded
    raise RunDirError(
        f"run_dir={path}: the folder holds an earlier run; go on with it (checkpoint.resume=auto), name another one, "
        "or remove it yourself"
    )


def _number_records(folder: Path) -> None:
    """Give the records of an earlier start in `folder` the next free number."""
    number = 1 + sum(1 for _ in folder.glob("config-*.yaml"))
    for name in RECORDS:
        path = folder / name
        if path.exists():
            path.rename(path.with_name(f"{path.stem}-{number}{path.suffix}"))


def describe_environment() -> dict[str, Any]:
    """Versions, machine and source state: what is needed to tell later why two runs differ."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "cwd": os.getcwd(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("gpt3d", *PACKAGES)},
        "git": _git_state(Path(__file__).resolve().parents[2]),
    }


def _candidates(path: Path, exact: bool) -> list[Path]:
    return [path] if exact else [path, *(path.with_name(f"{path.name}-{n}") for n in range(2, MOST_NAMES))]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state(root: Path) -> dict[str, Any] | None:
    """Commit of this source tree and whether it has changes; None when installed, or without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return None  # some other project's checkout, with this package inside
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
