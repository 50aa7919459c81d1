"""Sweeps through the command's own path into Hydra, with a formula in place of training."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from gpt3d.config.cli import run_cli
from gpt3d.config.problems import ConfigError, Problem
from gpt3d.config.schema import RunConfig
from gpt3d.launch import RankFailed
from gpt3d.sweep.end import table_at_end
from gpt3d.sweep.jobs import SweepFailed
from gpt3d.sweep.record import SweepRecord
from gpt3d.train import make_run_dir

Sweep = Callable[..., list[dict[str, str]]]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """sweep(task, *overrides): the rows of the table that the sweep leaves, whatever its end."""

    def run(task: Callable[[RunConfig], Any], *overrides: str, **options: Any) -> list[dict[str, str]]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(SweepRecord, "folder", None)
        monkeypatch.setattr(sys, "argv", ["train", "-m", "hydra.sweep.dir=sweep", *overrides])
        try:
            with table_at_end():
                run_cli(task, "", **options)
        finally:
            rows = (
                list(csv.DictReader((tmp_path / "sweep/sweep.csv").open()))
                if (tmp_path / "sweep/sweep.csv").is_file()
                else []
            )
        return rows

    return run


def bowl(config: RunConfig) -> float:
    """Lowest at a learning rate of 0.01; higher ones than 0.05 cannot run."""
    if config.optimizer.lr > 0.05:
        raise ConfigError([Problem("optimizer.lr", config.optimizer.lr, "is too large", "0.05")])
    return 1 + abs(math.log10(config.optimizer.lr) + 2)


def test_optuna_searches_and_failing_trials_do_not_end_it(sweep: Sweep, tmp_path: Path) -> None:
    rows = sweep(bowl, "sweep=learning_rate", "hydra.sweeper.n_trials=12", "lr.warmup_steps=5")
    done = [row for row in rows if row["status"] == "done"]
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(rows) == 12 and len(done) + len(failed) == 12
    assert failed and all("is too large" in row["reason"] for row in failed)
    assert min(float(row["objective"]) for row in done) < 1.3
    best = OmegaConf.load(tmp_path / "sweep" / "optuna.yaml")
    assert best.value == pytest.approx(min(float(row["objective"]) for row in done))
    assert float(best.params["optimizer.lr"]) == pytest.approx(0.01, rel=1.0)


def test_optuna_looks_for_the_most_tokens_a_second(sweep: Sweep) -> None:
    """Of three values each is run once, however often it is asked for; group options are names, not numbers."""

    def speed(config: RunConfig) -> float:
        return 10.0 * config.zero.stage

    rows = sweep(
        speed, "hydra/sweeper=gpt3d_optuna", "objective=tokens_per_s", "zero=0,1,3", "hydra.sweeper.n_trials=9"
    )
    assert sorted(row["objective"] for row in rows) == ["0.0", "10.0", "30.0"]


def test_a_study_in_a_database_goes_on(sweep: Sweep, tmp_path: Path) -> None:
    study = ["hydra/sweeper=gpt3d_optuna", "hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.study_name=s"]
    search = ["optimizer.lr=tag(log,interval(1e-3,2e-2))"]
    assert len(sweep(bowl, *study, *search, "hydra.sweeper.n_trials=1")) == 1
    assert len(sweep(bowl, *study, *search, "hydra.sweeper.n_trials=3")) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.lr=0.1,0.2", "hydra.sweeper.n_trials=2"], "none of 2 trials succeeded"),
        (["optimizer.lr=0.01"], "nothing to search"),
    ],
)
def test_a_search_without_result_says_so(sweep: Sweep, overrides: list[str], message: str) -> None:
    with pytest.raises(SweepFailed, match=message):
        sweep(bowl, "hydra/sweeper=gpt3d_optuna", *overrides)


def test_without_optuna_it_says_what_to_install(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SweepFailed, match=r"pip install 'gpt3d\[sweep\]'"):
        sweep(bowl, "sweep=learning_rate")


def test_an_option_that_does_not_exist_is_refused(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sweep(bowl, "hydra/sweeper=gpt3d_optuna", "zero=choice(0,7)", "hydra.sweeper.n_trials=1")
    shown = capsys.readouterr()
    assert "zero=7: there is no such option" in shown.err and "no job has begun" in shown.out


def test_a_grid_goes_on_after_a_failure_and_has_its_table(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):  # Hydra's own sweeper reports the first failure at its end
        sweep(bowl, "optimizer.lr=0.1,0.01")
    rows = list(csv.DictReader((tmp_path / "sweep" / "sweep.csv").open()))
    assert [row["status"] for row in rows] == ["failed", "done"]
    assert "best    job 1: optimizer.lr=0.01" in capsys.readouterr().out


def test_the_table_is_the_last_to_be_seen_not_a_job_s_traceback(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(config: RunConfig) -> float:
        raise RankFailed(f"rank {config.seed} failed\nTraceback ...", config.seed, "ValueError")

    with pytest.raises(SweepFailed, match=r"2 of 2 jobs failed; their whole messages: .*/sweep/jobs$"):
        sweep(broken, "seed=0,1")
    shown = capsys.readouterr()
    assert (
        shown.err.count("sweep   job 1 failed: rank 1 failed\nTraceback ...") == 1
        and "failed: rank 0 failed" in shown.out
    )


def test_an_interrupted_sweep_has_its_table(sweep: Sweep, tmp_path: Path) -> None:
    def interrupted(config: RunConfig) -> float:
        if config.seed == 2:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        sweep(interrupted, "seed=1,2,3")
    rows = list(csv.DictReader((tmp_path / "sweep" / "sweep.csv").open()))
    assert [row["status"] for row in rows] == ["done", "interrupted"]


def test_the_folder_of_a_job_names_the_layout_that_the_planner_took(sweep: Sweep, tmp_path: Path) -> None:
    def folder(config: RunConfig) -> float:
        path = Path(make_run_dir(config)["run_dir"])
        assert path.name == Path(HydraConfig.get().runtime.output_dir).name == f"{config.seed}_tiny-tp2-pp1-zero1"
        return 1.0

    rows = sweep(folder, "parallel=auto", "seed=0,1", resolve=lambda config: ["parallel.tp=2", "parallel.pp=1"])
    assert [row["folder"] for row in rows] == [str(tmp_path / f"sweep/{i}_tiny-tp2-pp1-zero1") for i in (0, 1)]
    assert all((Path(row["folder"]) / "config.yaml").is_file() for row in rows)


@pytest.mark.parametrize(
    "name",
    [pytest.param("lr_sweep", marks=pytest.mark.slow), pytest.param("layout_sweep", marks=pytest.mark.slow), "scaling"],
)
def test_ready_sweeps_name_what_they_vary(sweep: Sweep, name: str) -> None:
    rows = sweep(lambda config: 1.0, f"experiment={name}")
    assert len(rows) == {"lr_sweep": 5, "layout_sweep": 10, "scaling": 4}[name]
