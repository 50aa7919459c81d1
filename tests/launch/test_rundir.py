"""The folder of a run: what it records, and that none is ever overwritten."""

from __future__ import annotations

import json
import shlex
import sys

import pytest
from omegaconf import OmegaConf

from gpt3d.launch import rundir


def test_what_is_recorded(tmp_path):
    config = rundir.create(tmp_path / "run", {"lr": 0.5, "run_dir": None}, ["lr=0.5"])
    folder = tmp_path / "run"
    assert config == {"lr": 0.5, "run_dir": str(folder)}
    assert OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")) == config
    assert OmegaConf.to_container(OmegaConf.load(folder / "overrides.yaml")) == ["lr=0.5"]
    assert shlex.split((folder / "command.txt").read_text()) == sys.orig_argv
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"] and environment["host"] and "git" in environment


def test_an_earlier_run_is_never_touched(tmp_path):
    first = rundir.create(tmp_path / "run", {"n": 1}, [])
    second = rundir.create(tmp_path / "run", {"n": 2}, [])
    third = rundir.create(tmp_path / "run", {"n": 3}, [])
    assert [c["run_dir"] for c in (first, second, third)] == [str(tmp_path / n) for n in ("run", "run-2", "run-3")]
    with pytest.raises(rundir.RunDirError, match="holds an earlier run"):
        rundir.create(tmp_path / "run", {"n": 4}, [], exact=True)
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").n == 1


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(rundir.RunDirError, match="cannot be made"):
        rundir.create(tmp_path / "file" / "run", {}, [])


def test_git_state(tmp_path):
    assert rundir._git_state(tmp_path) is None, "not a checkout"
    state = rundir._git_state(rundir.Path(rundir.__file__).resolve().parents[2])
    assert state is None or (len(state["commit"]) == 40 and state["dirty"] in (True, False))
