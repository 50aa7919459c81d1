"""What a run may start from, and what may have changed since."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpt3d.checkpoint import folder
from gpt3d.checkpoint.lock import RunLock
from gpt3d.checkpoint.settings import candidates, check_data, check_settings, check_start, plain
from gpt3d.config.arithmetic import World
from gpt3d.config.load import compose
from gpt3d.config.problems import ConfigError
from gpt3d.config.rules import check
from gpt3d.config.schema import RunConfig

WHERE = Path("somewhere")


base = cache(compose)  # composing is slow; a test changes a copy


def configured(*overrides: str) -> RunConfig:
    """The default run with plain `key=value` changes."""
    config = copy.deepcopy(base())
    for override in overrides:
        key, _, value = override.partition("=")
        group, _, name = key.rpartition(".")
        setattr(attrgetter(group)(config) if group else config, name, yaml.safe_load(value))
    return config


def compare(old: list[str], new: list[str]) -> list[str]:
    state = {"config": json.loads(json.dumps(plain(configured(*old)))), "progress": {"step": 5}}
    return [str(change) for change in check_settings(configured(*new), state, WHERE)]


def test_layout_precision_and_length_may_change_and_are_listed() -> None:
    changes = compare(
        [], ["parallel.tp=1", "zero.stage=3", "precision.dtype=bf16", "trainer.steps=900", "recompute=full"]
    )
    assert (
        "parallel.tp: 2 -> 1" in changes and "zero.stage: 1 -> 3" in changes and "trainer.steps: 300 -> 900" in changes
    )
    assert "precision.dtype: fp32 -> bf16" in changes
    assert compare([], ["tracking.log_interval=3", "checkpoint.interval=7", "run_name=other"]) == []


@pytest.mark.parametrize(
    "override",
    ["optimizer.lr=0.5", "lr.warmup_steps=7", "seed=3", "trainer.global_batch_size=64", "model.hidden_dropout=0.3"],
)
def test_what_is_learned_changes_only_when_accepted(override: str) -> None:
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=rf"{key}={value}.*\n.*accept_changes=\[{key}\]"):
        compare([], [override])
    assert [c.partition(":")[0] for c in compare([], [override, f"checkpoint.accept_changes=[{key}]"])] == [key]
    group = key.partition(".")[0]
    if group in ("optimizer", "lr"):
        assert len(compare([], [override, f"checkpoint.accept_changes=[{group}]"])) == 1


def test_another_model_is_refused_whatever_is_accepted() -> None:
    with pytest.raises(ConfigError, match=r"model\.num_layers=6") as error:
        compare([], ["model.num_layers=6", "model.rope_theta=7.0", "checkpoint.accept_changes=[model]"])
    assert len(error.value.problems) == 2
    assert compare([], ["model.vocab_multiple=64"]) == ["model.vocab_multiple: 128 -> 64"]


def test_changed_data_is_listed_and_refused() -> None:
    state: dict[str, Any] = {"data": {"corpus": "a", "data.seed": "0"}}
    new = {"corpus": "b", "data.seed": "0"}
    with pytest.raises(ConfigError, match="corpus: a -> b"):
        check_data(configured(), state, new, WHERE)
    assert len(check_data(configured("checkpoint.accept_changes=[data]"), state, new, WHERE)) == 1
    assert check_data(configured(), state, dict(state["data"]), WHERE) == []


def resume(value: str, run_dir: str = "null") -> Any:
    return configured(f"checkpoint.resume={value}", f"run_dir={run_dir}")


def test_a_checkpoint_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    unfinished = tmp_path / "run" / "checkpoints" / folder.step_name(3)
    unfinished.mkdir(parents=True)
    for path, why in [
        (tmp_path / "runn", "no such folder"),
        (tmp_path, "holds no committed checkpoint"),
        (unfinished, "incomplete"),
    ]:
        with pytest.raises(ConfigError, match=rf"checkpoint\.resume={path}: .*{why}"):
            candidates(resume(str(path)))
    assert candidates(resume("auto", str(tmp_path / "run"))) == []
    (unfinished / folder.MARK).touch()
    for value in (unfinished, unfinished.parent, unfinished.parent.parent):
        assert candidates(resume(str(value))) == [unfinished]
    assert candidates(resume("auto", str(tmp_path / "run"))) == [unfinished]
    with pytest.raises(ConfigError, match="damaged"):
        check_start(resume(str(unfinished)))
    assert candidates(resume("none")) == []


def committed_at(root: Path, state: dict[str, Any], step: int = 5) -> Path:
    """A checkpoint without tensors."""
    (root / ".tmp-1").mkdir(parents=True)
    (root / ".tmp-1" / folder.INDEX).write_text("{}")
    path = root / folder.step_name(step)
    folder.commit(root / ".tmp-1", path, {folder.STATE: json.dumps(state)})
    return path


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    """Not taken for damage: falling back to an older checkpoint would lose what was trained since."""
    newer = committed_at(tmp_path / "checkpoints", {"format": folder.FORMAT + 1})
    committed_at(tmp_path / "checkpoints", {"format": folder.FORMAT}, step=3)
    with pytest.raises(ConfigError, match=f"{newer}: is of format 2, and this version of gpt3d reads 1"):
        check_start(resume("auto", str(tmp_path)))


def test_fewer_steps_than_are_done_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.steps=4: the checkpoint somewhere has done 5 steps"):
        compare([], ["trainer.steps=4"])
    assert compare([], ["trainer.steps=5"]) == ["trainer.steps: 300 -> 5"]


def test_what_accepts_nothing_is_refused() -> None:
    for name in ("optimiser", "optimizer.learning_rate", "model", "data.seq_len"):
        with pytest.raises(ConfigError, match=rf"accept_changes=\[{name}\]: accepts nothing"):
            check_start(configured(f"checkpoint.accept_changes=[{name}]"))
    check_start(configured("checkpoint.accept_changes=[optimizer, lr.schedule, model.hidden_dropout, data]"))


def test_a_new_run_does_not_save_beside_the_checkpoints_of_another(tmp_path: Path) -> None:
    """The newest of the other run would count as the newest of this one."""
    committed_at(tmp_path / "checkpoints", {"format": folder.FORMAT})
    with pytest.raises(ConfigError, match=r"holds checkpoints of an earlier run \(step-00000005\)"):
        check_start(resume("none", str(tmp_path)))


def test_two_runs_never_write_into_one_folder(tmp_path: Path) -> None:
    holds = "from gpt3d.checkpoint.lock import *; k = RunLock(Path('.')); k.take(); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", holds], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as other:  # fmt: skip
        assert other.stdout is not None and other.stdout.readline() == b"ready\n"
        with pytest.raises(ConfigError, match=rf"another run is writing into this folder \(process {other.pid} on "):
            RunLock(tmp_path).take(wait=0.0)
        other.kill()
    check_start(resume("auto", str(tmp_path)))
    lock = RunLock(tmp_path / "not there")
    lock.take()  # no folder, no lock, no error
    lock.release()


def test_auto_needs_a_lasting_folder() -> None:
    problems = check(configured("checkpoint.resume=auto"), World(gpus=0, device="cpu"))
    assert [p.key for p in problems] == ["checkpoint.resume"] and "run_dir=PATH" in problems[0].fix
    assert check(configured("checkpoint.resume=auto", "run_dir=here"), World(gpus=0, device="cpu")) == []
