"""`parallel=auto` and its like: the keys left open are chosen for the ranks there are, all others stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt3d.config.arithmetic import World, total_ranks
from gpt3d.config.auto import AUTO, auto_keys
from gpt3d.config.load import compose, load_config
from gpt3d.config.problems import ConfigError
from gpt3d.config.rules import check
from gpt3d.config.schema import RunConfig
from gpt3d.planner.auto import choose
from gpt3d.planner.search import search
from tests.planner.conftest import Make

ROOT = Path(__file__).resolve().parents[2]
ALL = ["parallel=auto", "pipeline=auto", "zero=auto", "recompute=auto", "trainer.micro_batch_size=-1"]
CLUSTER = ["model=8b", "precision=bf16", "cluster=h100", "cluster.nodes=2", "trainer.global_batch_size=64"]
CPU = World(device="cpu", gpus=0, host_memory_gb=16.0)


def chosen(words: list[str], world: World) -> tuple[RunConfig, str]:
    """The configuration after the planner's choice, and what it said."""
    choice = choose(compose(words), world)
    assert choice is not None
    return compose([*words, *choice.overrides]), choice.text


def test_every_auto_key_has_a_word() -> None:
    assert set(auto_keys(compose(ALL))) == set(AUTO)
    assert auto_keys(compose()) == [] and choose(compose(), CPU) is None


def test_all_left_open_is_the_best_of_the_search() -> None:
    config, text = chosen([*CLUSTER, *ALL], World())
    best = search(compose([*CLUSTER, "search=true"])).plans[0]
    assert auto_keys(config) == [] and check(config, World()) == [] and total_ranks(config, World()) == 16
    assert (config.parallel.tp, config.parallel.pp, config.zero.stage) == (
        best.config.parallel.tp, best.config.parallel.pp, best.config.zero.stage,
    )  # fmt: skip
    assert (config.recompute, config.trainer.micro_batch_size) == (
        best.config.recompute, best.config.trainer.micro_batch_size,
    )  # fmt: skip
    assert f"{best.seconds:.3g} s a step" in text
    assert config.parallel.dp is None, "what remains, as one would type it"


def test_what_is_set_stays() -> None:
    words = [
        *CLUSTER,
        "parallel=auto",
        "parallel.tp=4",
        "parallel.sequence_parallel=false",
        "zero=2",
        "trainer.micro_batch_size=1",
    ]
    before, (config, _) = compose(words), chosen(words, World())
    assert auto_keys(before) == ["parallel.pp"]
    assert (config.parallel.tp, config.parallel.sequence_parallel, config.zero.stage) == (4, False, 2)
    config.parallel.pp, config.run_name = before.parallel.pp, before.run_name
    config.parallel.layers_per_stage = None
    assert config == before, "nothing else has changed"
    words = [*CLUSTER, "parallel=auto", "parallel.dp=4", "trainer.micro_batch_size=1"]
    assert total_ranks(chosen(words, World())[0], World()) == 16


def test_the_world_of_a_launcher_and_of_a_cpu() -> None:
    """Unknown hardware: the planner says that it follows a preference."""
    config, text = chosen(["parallel=auto", "zero=auto"], World(4, 4, 0, "cpu", 16.0))
    assert total_ranks(config, World(4, 4)) == 4 and config.zero.stage == 1 and config.parallel.pp == 1
    assert "no figures, so by preference" in text
    config, _ = chosen(["parallel=auto", "parallel.tp=2", "parallel.dp=2"], CPU)
    assert (config.parallel.tp, config.parallel.pp, config.parallel.dp) == (2, 1, 2)
    config, _ = chosen(["parallel=auto"], CPU)
    cores = len(os.sched_getaffinity(0))
    assert total_ranks(config, CPU) == cores, "without a launcher a rank a core, recorded as parallel.dp"


def test_a_gpu_that_only_its_driver_knows() -> None:
    words = [
        "model=1b",
        "precision=bf16",
        "parallel=auto",
        "zero=auto",
        "recompute=auto",
        "trainer.global_batch_size=64",
    ]
    world = World(gpus=8, device="cuda", gpu_name="NVIDIA H100 80GB HBM3", gpu_memory_gb=79.6)
    config, text = chosen(words, world)
    assert "the fastest by estimate" in text and check(config, world) == []
    unknown, text = chosen(words, World(gpus=8, device="cuda", gpu_name="NVIDIA B9000", gpu_memory_gb=79.6))
    assert "by preference" in text and unknown.zero.stage == 1


def test_nothing_fits_and_all_other_problems_are_told_too() -> None:
    words = ["model=405b", "precision=bf16", "cluster=h100", "cluster.host_memory_gb=512", *ALL]
    with pytest.raises(ConfigError) as refused:
        choose(compose([*words, "lr.decay_steps=5", "lr.warmup_steps=9"]), World())
    keys = [problem.key for problem in refused.value.problems]
    assert keys == ["auto", "lr.decay_steps"]
    assert "cluster.nodes=" in str(refused.value) and "fits into 80 GB" in str(refused.value)
    config, _ = chosen([*words, "allow_oom=true"], World())
    assert check(config, World()) == []
    with pytest.raises(ConfigError, match=r"cluster\.gpus_per_node=8"):
        choose(compose(["parallel=auto"]), World())


def test_a_layout_that_does_not_fit_is_refused_unless_allowed(make: Make) -> None:
    config = make("70b", {"cluster.nodes": 4, "trainer.global_batch_size": 16, "trainer.micro_batch_size": 4})
    (problem,) = check(config, World(32, 8))
    assert problem.key == "model" and "of a rank don't fit into 80 GB" in problem.why
    assert "parallel=auto" in problem.fix and "allow_oom=true" in problem.fix
    config.allow_oom = True
    assert check(config, World(32, 8)) == []
    config.allow_oom, config.cluster.gpu_memory_gb, config.cluster.gpu = False, None, None
    assert check(config, World(32, 8)) == [], "not known to be too large"
    assert [p.key for p in check(config, World(32, 8, gpu_memory_gb=79.6))] == ["model"]


def test_other_commands_do_not_choose() -> None:
    problems = check(compose(["recompute=auto", "zero=auto"]), World())
    assert [problem.key for problem in problems] == ["recompute", "zero.stage"]


def test_the_choice_is_recorded_as_if_typed(tmp_path: Path) -> None:
    """A real run, from the command line; the folder's name, config.yaml and overrides.yaml have the values."""
    words = ["parallel=auto", "parallel.dp=1", "zero=auto", "recompute=auto", "data=synthetic", "trainer.steps=1"]
    words += ["trainer.eval_batches=1", "trainer.sample_tokens=0", "checkpoint=none", "tracking.progress_bar=false"]
    done = subprocess.run(
        [sys.executable, "-m", "gpt3d.train", *words, "cluster.gpus_per_node=1", "cluster.device=cpu"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("auto    parallel.tp=1")
    (path,) = (tmp_path / "outputs").glob("*/*_tiny-tp1-pp1-zero1/config.yaml")
    config = load_config(path)
    assert auto_keys(config) == [] and config.zero.stage == 1 and config.run_name == "tiny-tp1-pp1-zero1"
    assert "parallel.tp=1" in (path.parent / "overrides.yaml").read_text()
