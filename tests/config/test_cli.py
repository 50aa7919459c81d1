"""A command as a user calls it: exit codes, messages, and everything Hydra offers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpt3d.config.arithmetic import World
from gpt3d.config.cli import run_cli
from gpt3d.config.load import conf_dir
from gpt3d.config.overrides import group_options
from gpt3d.config.rules import require_valid
from gpt3d.config.schema import RunConfig


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Demo = Callable[..., Done]


def task(config: RunConfig) -> None:
    print("RAN", config.zero.stage, config.optimizer.lr, config.run_name)
    if config.seed == 13:
        raise ValueError("a bug of ours")


def check(config: RunConfig) -> None:
    require_valid(config, World(gpus=0, device="cpu"))


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Demo]:
    """A command called in this process, in an empty folder."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(*arguments: str, **env: str) -> Done:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
        for key, value in env.items():
            monkeypatch.setenv(key, value)
        code = 0
        try:
            run_cli(task, "demo: trains nothing.", check=check)
        except SystemExit as end:
            code = int(end.code or 0)
        return Done(code, *capsys.readouterr())

    yield run
    root.handlers[:], root.level = handlers, level  # Hydra's handlers write to the captured streams


def test_a_plain_run(demo: Demo, tmp_path: Path) -> None:
    done = demo("zero=2", "run_name=007")
    assert done.returncode == 0 and "RAN 2 0.001 007" in done.stdout
    assert len(list((tmp_path / "outputs").glob("*/*_007"))) == 1


def test_a_mistake_is_one_message_and_leaves_no_folder(demo: Demo, tmp_path: Path) -> None:
    for arguments, expected in (
        (("zero=9", "model.x=3"), "has 2 problems"),
        (("parallel.cp=2",), "context parallelism"),
        (("model.bias=2",), "give true or false"),
        (("--cfg", "job", "model.bias=2"), "give true or false"),
        (("--cfg", "job", "zero=[1,2]"), "zero is one of"),
    ):
        done = demo(*arguments)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("The configuration has") and expected in done.stderr
        assert "Traceback" not in done.stderr and "HYDRA_FULL_ERROR" not in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_a_folder_that_can_t_be_made(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = demo("hydra.run.dir=file/run")
    assert done.returncode == 2 and "hydra.run.dir=file/run: the run folder can't be made" in done.stderr


def test_a_bug_in_a_check_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: RunConfig) -> None:
        raise ValueError("a bug of ours")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    with pytest.raises(ValueError, match="a bug of ours"):
        run_cli(task, "demo", check=broken)


def test_a_sweep_over_a_numbered_group_with_overrides_on_both_sides(demo: Demo) -> None:
    done = demo("optimizer.lr=1e-4", "-m", "zero=0,1")
    assert done.returncode == 0, done.stderr
    assert "RAN 0 0.0001" in done.stdout and "RAN 1 0.0001" in done.stdout


def test_a_refused_job_does_not_end_the_sweep(demo: Demo) -> None:
    done = demo("-m", "parallel.cp=2,1")
    assert done.returncode == 2 and done.stdout.count("RAN") == 1
    assert done.stderr.count("context parallelism is not available") == 1 and "Traceback" not in done.stderr


def test_a_bug_keeps_its_traceback_without_hydra_s_frames(demo: Demo) -> None:
    with pytest.raises(ValueError, match="a bug of ours") as error:
        demo("seed=13")
    assert not [entry for entry in error.traceback if "hydra" in str(entry.path)]


def test_show_and_help(demo: Demo, tmp_path: Path) -> None:
    text = demo("--help").stdout
    assert text.startswith("demo: trains nothing.") and "model " in text and "[tiny]" in text and "[1]" in text
    assert "stage: 3" in demo("zero=3", "--cfg", "job", "-p", "zero").stdout
    assert "zero/3_offload" in demo("--info", "defaults", "zero=3_offload").stdout
    assert demo("--cfg", "job", "zero=7").returncode == 2
    assert not (tmp_path / "outputs").exists()


def test_shell_completion(demo: Demo) -> None:
    query = ("-sc", "query=bash")
    stages = [f"zero={name}" for name in group_options([conf_dir()])["zero"]]
    assert demo(*query, COMP_LINE="demo.py zero=").stdout.split() == stages
    assert demo(*query, COMP_LINE="demo.py zero=3_").stdout.split() == ["zero=3_offload"]
    assert "parallel.tp=" in demo(*query, COMP_LINE="demo.py parallel.t").stdout


def test_a_users_own_folder_of_groups(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "mine.yaml").write_text("defaults: [tiny, _self_]\nname: mine\n")
    (tmp_path / "mine" / "model" / "bad.yaml").write_text("defaults: [tiny, _self_]\nvocab_sizee: 3\n")
    assert "RAN 1 0.001 mine-" in demo("--config-dir", "mine", "model=mine").stdout
    done = demo("--config-dir", "mine", "model=bad")
    assert done.returncode == 2 and "vocab_sizee" in done.stderr and "model/bad" in done.stderr


def test_what_is_left_open_is_filled_in_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Overrides of `resolve` count as typed: in the folder's name, in the run, and in each job of a sweep."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.chdir(tmp_path)

    def resolve(config: RunConfig) -> list[str]:
        return ["zero.stage=2"] if config.zero.stage == -1 else []

    for flags in ([], ["-m"]):
        monkeypatch.setattr(sys, "argv", ["demo.py", *flags, "zero=auto", "optimizer.lr=0.5"])
        run_cli(task, "demo", check=check, resolve=resolve)
        assert "RAN 2 0.5 tiny-tp2-pp2-zero2" in capsys.readouterr().out
    assert len(list((tmp_path / "outputs").glob("*/*_tiny-tp2-pp2-zero2"))) == 1
    root.handlers[:], root.level = handlers, level
