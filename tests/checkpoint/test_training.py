"""The trainer with checkpoints: killed, stopped by a signal, resumed; its metrics equal those of an unbroken run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpt3d.checkpoint import folder
from gpt3d.config.load import compose
from gpt3d.launch import RankFailed

World = Callable[..., list[Any]]
SMALL = [
    "data.seq_len=32", "model.num_layers=2", "model.hidden_dropout=0.1", "trainer.steps=8", "tracking.log_interval=3",
    "trainer.global_batch_size=8", "trainer.micro_batch_size=2", "trainer.eval_interval=4", "trainer.eval_batches=1",
    "checkpoint.interval=2", "lr.warmup_steps=2",
]  # fmt: skip
KEYS = ("step", "loss", "loss_ema", "lr", "grad_norm", "parameter_norm", "tokens", "samples", "validation_loss")


def train(overrides: list[str], run_dir: str, signal_at: int | None = None) -> dict[str, Any]:
    """On each rank; rank 1 gets SIGTERM, rank 0 SIGUSR1, during step `signal_at`."""
    from gpt3d.parallel import device
    from gpt3d.trainer import Trainer

    trainer = Trainer(compose([*SMALL, *overrides, f"run_dir={run_dir}"]), device.select(0, "cpu"))
    if signal_at is not None:
        step, rank = trainer.train_step, int(os.environ["RANK"])

        def signalled() -> Any:
            if trainer.step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM if rank == 1 else signal.SIGUSR1)
            return step()

        trainer.train_step = signalled  # type: ignore[method-assign]
    return trainer.run()


def lines(run_dir: Path) -> dict[tuple[int, bool], dict[str, Any]]:
    """The last line of each step and kind, by what must be equal."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        (m["step"], "loss" in m): {k: m[k] for k in KEYS if k in m}
        for m in found
        if {"loss", "validation_loss"} & m.keys()
    }


@pytest.fixture(scope="module")
def unbroken(_fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], dict[str, Any]]:
    from tests.world import world

    path = tmp_path_factory.mktemp("unbroken")
    world(train, ["parallel=dp2", "checkpoint.interval=0", "checkpoint.final=false"], str(path), n=2)
    assert not (path / "checkpoints").exists()
    return lines(path)


def test_killed_and_resumed_is_as_if_nothing_had_happened(world: World, unbroken: Any, tmp_path: Path) -> None:
    layout = ["parallel=dp2", "checkpoint.resume=auto"]
    with pytest.raises(RankFailed, match="SIGKILL"):
        world(train, [*layout, "debug.fault=kill", "debug.fault_rank=0", "debug.fault_step=5"], str(tmp_path), n=2)
    left = folder.committed(tmp_path / "checkpoints")
    assert left and folder.step_of(left[0]) in (2, 4)
    world(train, layout, str(tmp_path), n=2)
    assert lines(tmp_path) == unbroken
    assert [folder.step_of(p) for p in folder.committed(tmp_path / "checkpoints")] == [8, 6]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_signal_on_one_rank_saves_on_all_and_another_layout_goes_on(
    world: World, unbroken: Any, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with pytest.raises(RankFailed, match="was ended by SIGTERM"):
        world(train, ["parallel=dp2", "checkpoint.interval=0"], str(tmp_path / "a"), 4, n=2)
    (saved,) = folder.committed(tmp_path / "a" / "checkpoints")
    assert folder.step_of(saved) == 5
    other = ["parallel=tp2", "parallel.sequence_parallel=false", "zero=3"]  # SP has dropout masks of its own
    world(train, [*other, f"checkpoint.resume={tmp_path / 'a'}"], str(tmp_path / "b"), n=2)
    got = lines(tmp_path / "b")
    assert set(got) == {(6, True), (8, True), (8, False)}
    for key, line in got.items():
        for name, value in line.items():
            assert value == pytest.approx(unbroken[key][name], rel=5e-5 if name == "grad_norm" else 2e-6), (key, name)


def test_a_diverged_run_keeps_its_state_out_of_the_way(world: World, tmp_path: Path) -> None:
    extreme = ["parallel=single", "optimizer.lr=1e30", "optimizer.grad_clip=0", "lr=constant"]
    with pytest.raises(RankFailed, match="in a row were skipped"):
        world(train, [*extreme, "precision.max_skipped_steps=2", "trainer.eval_interval=0"], str(tmp_path), n=1)
    (stopped,) = (tmp_path / "checkpoints").glob("stopped-step-*")
    assert folder.is_committed(stopped)
    assert stopped not in folder.committed(tmp_path / "checkpoints")
