"""What stands at the end of a sweep: the table, the best job, the layouts against the plan, the scaling curve."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from gpt3d.config.load import compose
from gpt3d.model.flops import model_flops_per_token, parameter_count
from gpt3d.sweep.end import finish
from gpt3d.sweep.jobs import figures, set_aside, steady_speed
from gpt3d.sweep.scaling import Point, fit
from tests.sweep.folders import add_job, begin


def test_the_table_has_every_job(tmp_path: Path) -> None:
    begin(tmp_path)
    add_job(tmp_path, ["optimizer.lr=0.1"], 3.0, objective=3.0)
    add_job(tmp_path, ["optimizer.lr=0.01"], 2.0, objective=2.0, speed=50.0)
    add_job(tmp_path, ["optimizer.lr=1.0"], 9.0, status="failed", reason="the loss is nan at step 7 | diverged")
    add_job(tmp_path, ["optimizer.lr=2.0"], 9.0, status="running")
    (tmp_path / "0_job" / "wandb_id").write_text("ab12\n")
    shown = finish(tmp_path)
    assert "best    job 1: optimizer.lr=0.01 (validation_loss 2)" in shown
    assert "4 jobs, 2 done, 2 failed or interrupted" in shown
    assert "seed=1" not in shown, "what all jobs share"
    written = (tmp_path / "sweep.md").read_text()
    assert "| 0 | optimizer.lr=0.1 | 3.0000 | 100 | 1.00 | id ab12 | 0_job | done |" in written
    assert "failed: the loss is nan at step 7 \\| diverged |" in written and "| interrupted |" in written
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert [row["status"] for row in rows] == ["done", "done", "failed", "interrupted"]
    assert rows[1]["overrides"] == "seed=1 optimizer.lr=0.01" and float(rows[1]["tokens_per_s"]) == 50
    assert Path(rows[1]["folder"]).is_dir() and rows[2]["reason"].startswith("the loss is nan")


def test_the_fastest_is_best_when_speed_is_asked_for(tmp_path: Path) -> None:
    begin(tmp_path, objective="tokens_per_s")
    add_job(tmp_path, ["seed=2"], 2.0, objective=50.0)
    add_job(tmp_path, ["seed=3"], 3.0, objective=100.0)
    assert "best    job 1" in finish(tmp_path)


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path: Path) -> None:
    begin(tmp_path)
    add_job(tmp_path, ["seed=2"], math.nan, objective=math.nan)
    assert "best" not in finish(tmp_path)
    add_job(tmp_path, ["seed=3"], 3.0, objective=3.0)
    assert "best    job 1" in finish(tmp_path)


def test_an_earlier_sweep_in_the_folder_is_kept(tmp_path: Path) -> None:
    for seed in (1, 2):
        begin(tmp_path)
        add_job(tmp_path / "", [f"seed={seed}"], 2.0).write(tmp_path)
        finish(tmp_path)
        set_aside(tmp_path)
        (tmp_path / "0_job").rename(tmp_path / f"{seed}_old")
    assert {"jobs-1", "jobs-2", "sweep-1.md", "sweep-2.md", "sweep-1.csv", "sweep-2.csv"} <= {
        path.name for path in tmp_path.iterdir()
    }


def test_speed_leaves_the_warm_up_out_and_repeated_steps_too() -> None:
    def line(step: int, seconds: float) -> dict[str, float]:
        return {"step": step, "tokens": 10 * step, "step_s": seconds, "tokens_per_s": 10 / seconds}

    assert steady_speed([line(1, 9.0), line(3, 2.0), line(5, 3.0)]) == pytest.approx(40 / 10)
    assert steady_speed([line(1, 2.0)]) == 5.0
    assert steady_speed([line(1, 9.0), line(5, 1.0), line(3, 7.0), line(5, 1.0)]) == 10.0


def test_a_run_that_never_logged_has_no_figures(tmp_path: Path) -> None:
    assert figures(tmp_path).tokens_per_s is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "to')  # killed while writing
    assert figures(tmp_path).validation_loss is None


def test_the_fit_finds_a_power_law() -> None:
    points = [Point(1, 1, c, 40 * c**-0.1) for c in (1e10, 1e11, 1e13)]
    law = fit(points)
    assert (law.scale, law.exponent, law.error) == pytest.approx((40, 0.1, 0), abs=1e-9)
    assert law(1e12) == pytest.approx(40 * 1e12**-0.1)


def test_scaling_is_drawn_over_the_compute_of_the_models(tmp_path: Path) -> None:
    begin(tmp_path, report="scaling")
    for heads, loss in ((2, 3.0), (4, 2.0)):
        add_job(tmp_path, ["experiment=scaling", f"model.num_heads={heads}"], loss, tokens=10_000 * heads)
    shown = finish(tmp_path)
    config = compose(["experiment=scaling", "model.num_heads=4"])
    point = json.loads((tmp_path / "scaling.json").read_text())["points"][1]
    assert point["parameters"] == parameter_count(config.model)
    assert point["compute"] == model_flops_per_token(config.model, config.data.seq_len) * 40_000
    assert "only 2 points" in shown and (tmp_path / "scaling.png").stat().st_size > 10_000


def test_scaling_of_one_size_is_no_curve(tmp_path: Path) -> None:
    begin(tmp_path, report="scaling")
    add_job(tmp_path, ["experiment=scaling"], 3.0)
    assert "no curve" in finish(tmp_path) and not (tmp_path / "scaling.png").exists()


def test_layouts_are_compared_with_the_plan(tmp_path: Path) -> None:
    """Three sizes of model stand for layouts: two pairs in the planned order of memory, one not."""
    begin(tmp_path, report="layouts")
    for layers, memory in ((2, 1.0), (4, 3.0), (8, 2.0)):
        add_job(tmp_path, [f"model.num_layers={layers}", "cluster.device=cpu"], 3.0, memory=memory)
    shown = finish(tmp_path)
    assert "2 of 3 pairs" in shown and "speed: n/a planned" in shown


@pytest.mark.parametrize(("heads", "tokens"), [(1, 217_088), (4, 2_465_792)])
def test_scaling_trains_on_20_tokens_a_parameter(heads: int, tokens: int) -> None:
    config = compose(["experiment=scaling", f"model.num_heads={heads}"])
    assert config.model.hidden_size == 16 * heads and config.model.name == f"scaling-{heads}"
    planned = config.trainer.steps * config.trainer.global_batch_size * config.data.seq_len
    assert planned == tokens and 20 <= planned / parameter_count(config.model) < 20.5
