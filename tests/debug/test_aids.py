"""The other aids: one batch learned by heart, profiles of chosen ranks, deterministic kernels, and their rules."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpt3d.config.arithmetic import World
from gpt3d.config.load import compose
from gpt3d.config.notes import notes
from gpt3d.config.rules import check
from gpt3d.debug.aids import overfit_verdict

SMALL = ["data.seq_len=16", "trainer.global_batch_size=8", "trainer.micro_batch_size=4", "tracking.log_interval=1"]


def train(overrides: list[str], run_dir: str) -> dict[str, Any]:
    from gpt3d.parallel import device
    from gpt3d.trainer import Trainer

    return Trainer(compose([*overrides, *SMALL, f"run_dir={run_dir}"]), device.select(0, "cpu")).run()


def test_one_batch_is_learned_by_heart(world: Callable[..., list[Any]], tmp_path: Path) -> None:
    world(train, ["debug=overfit", "parallel=single", "trainer.steps=30"], str(tmp_path), n=1, timeout=120)
    losses = [m["loss"] for m in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()) if "loss" in m]
    assert losses[0] > 7 and losses[-1] < 0.3
    assert "learned by heart" in overfit_verdict(losses[0], losses[-1])
    assert "or a fault" in overfit_verdict(7.6, 1.2)


def test_the_chosen_rank_is_profiled(world: Callable[..., list[Any]], tmp_path: Path) -> None:
    chosen = ["debug=profile", "parallel=pp2", "debug.profile_ranks=[1]", "debug.profile_first_step=2"]
    world(train, [*chosen, "debug.profile_steps=1", "trainer.steps=2"], str(tmp_path), n=2, timeout=120)
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {"rank1.trace.json.gz", "rank1.tables.txt"}
    with gzip.open(tmp_path / "profile" / "rank1.trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    spans = [e["name"] for e in events if e.get("cat") == "user_annotation" and "microbatch" in e["name"]]
    assert sorted(spans) == sorted(
        f"{kind} microbatch {i} chunk 0" for kind in ("forward", "backward") for i in range(2)
    )
    assert "by memory allocated" in (tmp_path / "profile" / "rank1.tables.txt").read_text()


def state_of_torch() -> tuple[bool, str]:
    import os

    import torch

    from gpt3d.debug import make_deterministic

    make_deterministic(1)
    first, again = torch.rand(3), torch.manual_seed(1) and torch.rand(3)
    assert torch.equal(first, again)
    return torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"]


def test_deterministic_algorithms_are_on(world: Callable[..., list[Any]]) -> None:
    assert world(state_of_torch, n=1, init=False) == [(True, ":4096:8")]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["debug=profile", "trainer.steps=3"], "debug.profile_first_step"),
        (["debug=profile", "debug.profile_ranks=[4]"], "debug.profile_ranks"),
        (["debug=profile", "debug.profile_ranks=[-1]"], "debug.profile_ranks"),
        (["debug=kill_rank", "debug.fault_rank=4"], "debug.fault_rank"),
        (["debug=kill_rank", "trainer.steps=3"], "debug.fault_step"),
    ],
)
def test_what_cannot_come_to_pass_is_refused(overrides: list[str], key: str) -> None:
    assert [p.key for p in check(compose(overrides), World(gpus=0, device="cpu"))] == [key]


@pytest.mark.parametrize("preset", ["fast", "overfit", "nan", "profile", "deterministic", "kill_rank", "none"])
def test_presets_run_in_the_default_layout(preset: str) -> None:
    assert check(compose([f"debug={preset}"]), World(gpus=0, device="cpu")) == []


def test_aids_go_together_and_the_start_says_what_they_cost() -> None:
    config = compose(["debug=nan", "debug.deterministic=true", "debug.repeat_batch=true", "debug.profile=true"])
    assert check(config, World(gpus=0, device="cpu")) == []
    text = "\n".join(notes(config, World(ranks=4, device="cpu")))
    for key in ("find_nan", "deterministic", "repeat_batch", "profile"):
        assert f"debug.{key}" in text
    assert "fp16" in "\n".join(notes(compose(["debug=nan", "precision=fp16"]), World(ranks=4, device="cuda")))
