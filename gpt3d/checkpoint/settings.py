"""What a run starts from, and which settings may differ from the ones that made it. No torch here.

model         what defines the network must be equal: another value is another model
optimizer, lr, batch, seed, dropout, data
              change what is learned: refused unless `checkpoint.accept_changes` names them
all others    (layout, ZeRO, precision, length, tracking) may change freely; they are listed
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gpt3d.checkpoint import folder, huggingface
from gpt3d.checkpoint.blocks import CorruptCheckpoint
from gpt3d.checkpoint.lock import RunLock
from gpt3d.config.problems import ConfigError, Problem, show
from gpt3d.config.schema import RunConfig

FREE_IN_MODEL = ("model.name", "model.vocab_multiple", "model.init_std")
LEARNING = (
    "optimizer", "lr", "seed", "trainer.global_batch_size", "model.hidden_dropout", "model.attention_dropout",
)  # fmt: skip
UNLISTED = ("checkpoint", "cluster", "data", "debug", "run_dir", "run_name", "tokenizer", "tracking")


@dataclass(frozen=True)
class Change:
    """One setting that differs from the checkpoint's."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {show(self.old)} -> {show(self.new)}"


def candidates(config: RunConfig) -> list[Path]:
    """The checkpoints that `checkpoint.resume` names, the best first; empty to start afresh. Raises ConfigError."""
    wanted = config.checkpoint.resume
    own = folder.committed(Path(config.run_dir) / "checkpoints") if config.run_dir else []
    if wanted == "auto":
        return own
    if own:  # else the newest of them would outlive all that this run saves
        why = f"the folder holds checkpoints of an earlier run ({own[0].name}), and checkpoint.resume={wanted}"
        fix = "checkpoint.resume=auto to go on with that run, or another run_dir"
        raise ConfigError([Problem("run_dir", config.run_dir, why, fix)])
    return [] if wanted == "none" else named(Path(wanted), "checkpoint.resume")


def named(path: Path, key: str) -> list[Path]:
    """Checkpoints at `path`: itself, or those of a run's folder, newest first. Raises ConfigError if there is none."""
    if folder.is_committed(path):
        return [path]
    for root in (path / "checkpoints", path):
        if found := folder.committed(root):
            return found
    if not path.exists():
        raise ConfigError([Problem(key, str(path), "there is no such folder", "a run's folder, or one of its step-*")])
    if folder.step_of(path) is not None or path.name.startswith(folder.TEMPORARY):
        why = f"this checkpoint is incomplete: it has no {folder.MARK} file, so it was never finished"
        raise ConfigError([Problem(key, str(path), why, "an earlier step-* folder, or the run's folder")])
    raise ConfigError(
        [Problem(key, str(path), "holds no committed checkpoint", "a run's folder, or one of its step-*")]
    )


def check_start(config: RunConfig) -> None:
    """Refuse, before anything is started, a checkpoint that is missing or of another model. Raises ConfigError."""
    check_wishes(config)
    if config.run_dir and Path(config.run_dir).is_dir():
        lock = RunLock(Path(config.run_dir))
        lock.take()
        lock.release()  # the run's first rank takes it for good
    found = candidates(config)
    if not found:
        check_initial(config)
        return
    try:
        state = folder.read_state(found[0])
    except CorruptCheckpoint as error:
        if len(found) > 1:
            return  # loading falls back to the next one
        raise ConfigError([Problem("checkpoint.resume", config.checkpoint.resume, str(error))]) from None
    check_settings(config, state, found[0])


def check_wishes(config: RunConfig) -> None:
    """Refuse two beginnings, and a name in `accept_changes` that accepts nothing. Raises ConfigError."""
    tree, problems = plain(config), list[Problem]()
    if config.init_from is not None and config.checkpoint.resume not in ("none", "auto"):
        why = f"checkpoint.resume={config.checkpoint.resume} already says where the weights come from"
        problems.append(Problem("init_from", config.init_from, why, "only one of the two"))
    for name in config.checkpoint.accept_changes:
        group, _, key = name.partition(".")
        if name != "data" and name not in LEARNING and not (group in LEARNING and key in tree[group]):
            accepted = ", ".join(("data", *LEARNING))
            fix = f"names of these, or one key of a group: {accepted}"
            problems.append(Problem("checkpoint.accept_changes", [name], "accepts nothing", fix))
    if problems:
        raise ConfigError(problems)


def check_initial(config: RunConfig) -> None:
    """Refuse an `init_from` that is not there, or of another model than the configured one. Raises ConfigError."""
    if config.init_from is None:
        return
    path = Path(config.init_from)
    try:
        theirs = _model_at(path, config)
    except ConfigError:
        raise
    except KeyError as error:
        raise ConfigError([Problem("init_from", config.init_from, f"its config.json has no {error}")]) from None
    except json.JSONDecodeError as error:
        raise ConfigError([Problem("init_from", config.init_from, f"its config.json is no JSON: {error}")]) from None
    except (huggingface.NoEquivalent, CorruptCheckpoint) as error:
        raise ConfigError([Problem("init_from", config.init_from, str(error))]) from None
    problems = [
        Problem(f"model.{name}", ours, f"{path} has {show(value)}", f"model.{name}={show(value)}")
        for name, value in theirs.items()
        if (ours := attrgetter(name)(config.model)) != value
    ]
    if problems:
        raise ConfigError(problems)
    if (path / "config.json").is_file():
        from gpt3d.checkpoint.initial import check_folder  # it imports torch

        try:
            check_folder(path, config.model)
        except CorruptCheckpoint as error:
            raise ConfigError([Problem("init_from", config.init_from, str(error))]) from None


def _model_at(path: Path, config: RunConfig) -> dict[str, Any]:
    """Model settings, by name, of a Hugging Face folder; of a checkpoint those that differ and define the model."""
    if (path / "config.json").is_file():
        return huggingface.from_config(json.loads((path / "config.json").read_text()))
    saved = folder.read_state(named(path, "init_from")[0])["config"]
    differing = [change for change in changed(saved, plain(config)) if defines_model(change.key, config)]
    return {change.key.removeprefix("model."): change.old for change in differing}


def check_settings(config: RunConfig, state: Mapping[str, Any], where: Path) -> list[Change]:
    """The changes that will be applied. Raises ConfigError naming those that are refused."""
    changes = list(changed(state["config"], plain(config)))
    problems = [_problem(change, where) for change in changes if _refused(change.key, config)]
    if (done := state["progress"]["step"]) > config.trainer.steps:
        why, fix = f"the checkpoint {where} has done {done} steps", f"trainer.steps={done} or more"
        problems.append(Problem("trainer.steps", config.trainer.steps, why, fix))
    if problems:
        raise ConfigError(problems)
    return [change for change in changes if not _within(change.key, UNLISTED)]


def check_data(
    config: RunConfig, state: Mapping[str, Any], fingerprint: Mapping[str, str], where: Path
) -> list[Change]:
    """The same for the data: its order must go on where it stopped, unless `accept_changes` names `data`."""
    old = state["data"]
    names = sorted(old.keys() | fingerprint.keys())
    changes = [Change(n, old.get(n), fingerprint.get(n)) for n in names if old.get(n) != fingerprint.get(n)]
    if changes and "data" not in config.checkpoint.accept_changes:
        listed = "; ".join(str(change) for change in changes)
        why = (
            f"differs from what {where} was trained on ({listed}), so the run would not go on with the samples it has "
        )
        fix = "the data of the checkpoint, or checkpoint.accept_changes=[data]"
        raise ConfigError([Problem("data", None, why + "not seen yet", fix)])
    return changes


def plain(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested dictionaries."""
    tree = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def changed(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    """Every leaf that differs; a key that only one side has (another version wrote it) counts as no change."""
    for name in [name for name in new if name in old]:
        key, a, b = f"{prefix}{name}", old[name], new[name]
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from changed(a, b, f"{key}.")
        elif a != b:
            yield Change(key, a, b)


def _refused(key: str, config: RunConfig) -> bool:
    if _within(key, LEARNING):
        return not _within(key, config.checkpoint.accept_changes)
    return defines_model(key, config)


def defines_model(key: str, config: RunConfig) -> bool:
    """Another value of this key is another model."""
    if key == "model.max_seq_len" and config.model.position == "rope":
        return False
    return key.startswith("model.") and key not in FREE_IN_MODEL and not _within(key, LEARNING)


def _problem(change: Change, where: Path) -> Problem:
    why = f"the checkpoint {where} has {show(change.old)}"
    if _within(change.key, LEARNING):
        fix = (
            f"{change.key}={show(change.old)}, or checkpoint.accept_changes=[{change.key}] to go on with the new value"
        )
    else:
        fix = f"{change.key}={show(change.old)}: with another value it is another model"
    return Problem(change.key, change.new, why, fix)


def _within(key: str, names: Any) -> bool:
    """`key` is one of `names` or in one of these groups."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
