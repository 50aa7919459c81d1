"""`python -m gpt3d.plan` and the message for a run that does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt3d.config.arithmetic import World
from gpt3d.config.rules import check
from gpt3d.plan import plan_layout
from gpt3d.planner.need import describe_need
from gpt3d.planner.report import memory_plan, memory_text, plan_data
from tests.planner.conftest import Make

ROOT = Path(__file__).resolve().parents[2]


def test_the_command(tmp_path: Path) -> None:
    words = ["model=70b", "zero=0", "parallel=single", "precision=bf16", "precision.grad_dtype=bf16"]
    done = subprocess.run(
        [sys.executable, "-m", "gpt3d.plan", *words, "plan_json=plan.json"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert "70,553,706,496 parameters x 16 bytes" in done.stdout and "1,128,859,303,936 bytes" in done.stdout
    assert "1,128.9 GB of 10^9" in done.stdout and "counted as 70e9 parameters 1,120 GB" in done.stdout
    for formula in ("4 + 12/dp", "2 + 14/dp", "16/dp"):
        assert formula in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"], "no run folder"
    (stage,) = json.loads((tmp_path / "plan.json").read_text())["stages"]
    assert stage["weights"] + stage["gradients"] + stage["optimizer"] == 16 * 70_553_706_496


@pytest.mark.parametrize("recompute, code", [("full", 0), ("none", 1)])
def test_exit_code_is_the_verdict(make: Make, capsys: pytest.CaptureFixture[str], recompute: str, code: int) -> None:
    config = make("70b", {"cluster.nodes": 8, "trainer.global_batch_size": 64, "recompute": recompute})
    config.trainer.micro_batch_size = 4
    with pytest.raises(SystemExit) as left:
        plan_layout(config)
    out = capsys.readouterr().out
    assert left.value.code == code
    assert ("fits: stage 0 needs" in out) == (code == 0) and ("recompute=full" in out) == (code == 1)


def test_a_row_for_each_stage(make: Make) -> None:
    plan = memory_plan(make("70b", {"cluster.nodes": 8, "trainer.global_batch_size": 64}))
    table = memory_text(plan).partition("One rank of each pipeline stage")[2]
    rows = [line.split() for line in table.splitlines() if line[:3].strip().isdigit()]
    assert [row[:3] for row in rows] == [["0", "20", "4"], ["1", "20", "3"], ["2", "20", "2"], ["3", "20", "1"]]
    assert [row[3] for row in rows] == [f"{memory.parameters:,}" for memory in plan.stages]
    data = plan_data(plan)
    assert data["fits"] is True and data["layout"]["dp"] == 2 and len(data["stages"]) == 4
    assert json.loads(json.dumps(data)) == data


def test_without_a_named_gpu(make: Make) -> None:
    changes = {"cluster.gpu": None, "cluster.gpu_memory_gb": None, "trainer.global_batch_size": 8}
    plan = memory_plan(make("70b", {**changes, "cluster.nodes": 2, "parallel.pp": 2}))
    assert plan.fits is None and "H200 SXM (141 GB)" in memory_text(plan) and "H100 SXM (80" not in memory_text(plan)
    huge = memory_plan(make("405b", {**changes, "cluster.nodes": 4, "parallel.pp": 1}))
    assert huge.fits is False and "more than any GPU" in memory_text(huge)


def test_host_memory_decides_too(make: Make) -> None:
    changes = {"zero.stage": 3, "zero.offload_optimizer": "cpu", "zero.offload_param": "cpu", "cluster.nodes": 4}
    plan = memory_plan(make("70b", {**changes, "trainer.global_batch_size": 8, "cluster.host_memory_gb": 64.0}))
    assert plan.fits is False and "of host memory on a machine of 64 GB" in memory_text(plan)


def test_refusal_is_one_readable_message(make: Make) -> None:
    config = make("70b", {"precision.dtype": "fp32", "cluster.nodes": 4})
    text = describe_need(config, 1)
    assert text.startswith("llama3-70b with tp 8, pp 4 (1f1b), dp 1, fp32, ZeRO 1, recompute none wants 32 GPUs of at ")
    lines = [line.split()[0] for line in text.splitlines()[1:]]
    assert lines[:4] == ["weights", "gradients", "optimizer", "activations"] and "total" in lines
    assert "what would help: precision=bf16" in text
    config.parallel.pp = 1
    config.cluster.nodes = 1
    (problem,) = check(config, World())
    assert problem.key == "model" and "don't fit into 80 GB" in problem.why and "optimizer" in problem.why


def test_pictures(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make("70b", {"cluster.nodes": 8, "trainer.global_batch_size": 64, "plan_pictures": str(tmp_path / "new")})
    with pytest.raises(SystemExit):
        plan_layout(config)
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["memory.png", "memory.svg", "timeline.png", "timeline.svg"]
    assert all(f"{tmp_path / 'new' / name}" in capsys.readouterr().out for name in names[:1])
    assert (tmp_path / "new" / "memory.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").touch()
    config.plan_pictures = str(tmp_path / "file")
    with pytest.raises(SystemExit, match=r"plan_pictures=.* can't be written"):
        plan_layout(config)


def test_json_has_everything(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    changes = {"cluster.nodes": 8, "trainer.global_batch_size": 64, "plan_tokens": 1e12, "plan_json": str(path)}
    with pytest.raises(SystemExit):
        plan_layout(make("70b", changes))
    data = json.loads(path.read_text())
    seconds = data["seconds"]
    assert seconds["total"] == pytest.approx(sum(value for part, value in seconds.items() if part != "total"))
    assert data["tokens_per_s"] == pytest.approx(64 * 8192 / seconds["total"])
    assert data["model_flops_per_s"] == pytest.approx(data["mfu"] * 64 * data["peak_flops_per_s_per_gpu"])
    assert data["hfu"] == data["mfu"] > data["mfu_causal"] > 0.2
    assert data["budget"]["gpu_hours"] == pytest.approx(1e12 / data["tokens_per_s_per_gpu"] / 3600)


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m gpt3d.plan model=8b plan_json={tmp_path / 'plan.json'} | head -n 1"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("llama3-8b") and done.stderr == "" and (tmp_path / "plan.json").is_file()
