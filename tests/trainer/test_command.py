"""`python -m gpt3d.train` as a user runs it: from a checkout or a wheel, with mistakes, and with a rank that dies."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt3d.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "parallel=tp2",
    "trainer.steps=4",
    "trainer.global_batch_size=4",
    "trainer.micro_batch_size=2",
    "model.num_layers=2",
    "data.seq_len=32",
    "trainer.eval_batches=1",
]


def train(*arguments: str, cwd: Path, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": str(path), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "gpt3d.train", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


def test_a_run_from_another_folder(tmp_path: Path) -> None:
    done = train(*TINY, "trainer.sample_tokens=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("starting 2 ranks", "layout", "step 4/4", "validation loss", "unigram entropy", "next"):
        assert word in done.stdout
    (run_dir,) = tmp_path.glob("outputs/*/*")
    names = {"config.yaml", "overrides.yaml", "command.txt", "environment.json", "metrics.jsonl"}
    assert names <= {p.name for p in run_dir.iterdir()}
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in lines if "loss" in m] == [1, 4]


def test_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    done = train(*TINY, "debug.fault=kill", "debug.fault_rank=1", "debug.fault_step=2", cwd=tmp_path)
    assert done.returncode == 1
    assert "rank 1" in done.stderr and "SIGKILL" in done.stderr
    assert not orphans(tmp_path), "ranks survived"


def test_a_sweep_runs_each_job_in_its_own_world(tmp_path: Path) -> None:
    done = train("-m", *TINY, "zero=0,1", "tracking.log_interval=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = []
    for path in sorted(tmp_path.glob("outputs/multirun/*/*/metrics.jsonl")):
        losses.append([m["loss"] for m in map(json.loads, path.read_text().splitlines()) if "loss" in m])
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], abs=2e-6)
    (sweep,) = tmp_path.glob("outputs/multirun/*")
    for folder in (config.parent for config in sweep.glob("*/config.yaml")):
        wandb = load_config(folder / "config.yaml").tracking.wandb
        assert (wandb.group, wandb.name, wandb.job_type) == (sweep.name, folder.name, "sweep")
    jobs = list(csv.DictReader((sweep / "sweep.csv").open()))
    assert [float(job["objective"]) for job in jobs] == pytest.approx([losses[0][-1]] * 2, abs=1.0)
    assert all(Path(job["folder"], "metrics.jsonl").is_file() and float(job["tokens_per_s"]) > 0 for job in jobs)


def test_a_failing_rank_shows_its_traceback_once_and_does_not_end_the_sweep(tmp_path: Path) -> None:
    fault = ["debug.fault=error,none", "debug.fault_rank=1", "debug.fault_step=1"]
    done = train("-m", *TINY, *fault, "trainer.steps=2", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1 and "inject_fault" in done.stderr
    assert "rank 1 failed with RuntimeError: debug.fault=error on rank 1 at step 1" in done.stderr
    assert "step 2/2" in done.stdout and "2 jobs, 1 done, 1 failed" in done.stdout
    assert done.stdout.count("failed: rank 1 failed with RuntimeError") == 1, "the table has the reason"


def test_a_large_model_on_a_small_machine_is_told_what_it_wants(tmp_path: Path) -> None:
    done = train("model=70b", "parallel=tp8_pp2", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for word in ("16 GPUs", "tp 8", "pp 2", "GB"):
        assert word in done.stderr
    assert not list(tmp_path.iterdir()), "a refused run leaves nothing behind"


def test_named_gpus_that_are_not_here(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    done = train("model=8b", "parallel=tp8", "cluster=h100", "precision=bf16", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "8 GPUs" in done.stderr and "has 0" in done.stderr


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a user gets it with pip, unpacked into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(build, check=True, timeout=300)
    (built,) = folder.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(folder / "site"), str(built)], check=True, timeout=120
    )
    return folder / "site"


def test_the_wheel_brings_its_configuration(wheel: Path, tmp_path: Path) -> None:
    done = train("model=8b", "--cfg", "job", cwd=tmp_path, path=wheel)
    assert done.returncode == 0, done.stderr
    assert "num_layers: 32" in done.stdout
    assert (wheel / "gpt3d" / "conf" / "config.yaml").is_file()


def test_the_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    done = train(*TINY, "parallel=single", cwd=tmp_path, path=wheel)
    assert done.returncode == 0, done.stderr
    assert "step 4/4" in done.stdout


def orphans(marker: Path) -> list[str]:
    """Processes that still run in the folder `marker`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == marker:
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found
