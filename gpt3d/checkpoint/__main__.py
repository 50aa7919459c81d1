"""Look at checkpoints: `python -m gpt3d.checkpoint show|verify|diff PATH`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from gpt3d.checkpoint import folder, settings
from gpt3d.checkpoint.blocks import CorruptCheckpoint
from gpt3d.checkpoint.reader import SavedTensors
from gpt3d.config.ending import end_with_reader
from gpt3d.config.problems import ConfigError, show

SHOWN = 20  # lines of a long list


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit code: 0 all well, 1 damaged or different, 2 not there."""
    parser = argparse.ArgumentParser(prog="python -m gpt3d.checkpoint", description="Look at checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = "a run's folder (its newest checkpoint) or a step-* folder"
    shown = commands.add_parser("show", help="what a checkpoint is: step, model, layout, versions")
    shown.add_argument("path", type=Path, help=one)
    shown.add_argument("--tensors", action="store_true", help="list every tensor with its global shape")
    verified = commands.add_parser("verify", help="check every byte against its checksum")
    verified.add_argument("path", type=Path, help="a run's folder (all its checkpoints) or a step-* folder")
    compared = commands.add_parser("diff", help="settings, progress and numbers of two checkpoints")
    compared.add_argument("path", type=Path, help=one)
    compared.add_argument("other", type=Path, help=one)
    given = parser.parse_args(arguments)
    try:
        if given.command == "show":
            return show_checkpoint(settings.named(given.path, "PATH")[0], given.tensors)
        if given.command == "verify":
            return max([verify(path) for path in settings.named(given.path, "PATH")])
        return diff(*(settings.named(path, "PATH")[0] for path in (given.path, given.other)))
    except ConfigError as error:
        print("\n".join(f"{problem.value}: {problem.why}" for problem in error.problems), file=sys.stderr)
        return 2
    except CorruptCheckpoint as error:
        print(error, file=sys.stderr)
        return 1


def show_checkpoint(path: Path, tensors: bool) -> int:
    """The summary, and the table of tensors if asked for."""
    folder.read_state(path)
    print(f"{path}\n{(path / folder.SUMMARY).read_text()}", end="")
    if tensors:
        saved = SavedTensors(path)
        for key in saved.tensors:
            print(f"{key:<60} {'x'.join(map(str, saved.shape(key)))}")
    return 0


def verify(path: Path) -> int:
    """Check everything; 1 if something is damaged, or of a format that is not known here."""
    try:
        saved = SavedTensors(path)
        damages = list(saved.damages())
    except CorruptCheckpoint as error:
        damages = [str(error)]
    except ConfigError as error:
        damages = [f"{problem.value}: {problem.why}" for problem in error.problems]
    if damages:
        print("\n".join(damages))
        return 1
    print(f"{path}: whole; {len(saved.sums)} files, {saved.size / 1e9:.3f} GB, {len(saved.tensors)} tensors")
    return 0


def diff(a: Path, b: Path) -> int:
    """Print what differs; 1 if any number or setting of what is learned does."""
    one, other = SavedTensors(a), SavedTensors(b)
    lines = [str(change) for change in settings.changed(one.state["config"], other.state["config"])]
    for name in ("progress", "optimizer", "data"):
        old, new = one.state[name], other.state[name]
        lines += [f"{name}.{c}" for c in settings.changed(old, new) if c.key not in ("seconds",)]
    for line in lines:
        print(line)
    differing = []
    for key in sorted({*one.tensors, *other.tensors}):
        if key not in one.tensors or key not in other.tensors:
            differing.append(f"{key}: only in {b if key in other.tensors else a}")
        elif one.shape(key) != other.shape(key):
            differing.append(f"{key}: shape {show(list(one.shape(key)))} -> {show(list(other.shape(key)))}")
        else:
            x, y = one.read(key), other.read(key)
            if not np.array_equal(x.view(np.uint32), y.view(np.uint32)):
                differing.append(f"{key}: largest difference {np.abs(x - y).max():.3g}")
    print("\n".join(differing[:SHOWN]) + (f"\n... and {len(differing) - SHOWN} more" if differing[SHOWN:] else ""))
    print(f"{len(differing)} of {len({*one.tensors, *other.tensors})} tensors differ, {len(lines)} other values")
    return 1 if differing else 0


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
