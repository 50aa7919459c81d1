"""The trainer in small, on forked ranks: results, files, equality of layouts, and how it stops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpt3d.config.load import compose
from gpt3d.launch import RankFailed

SMALL = [
    "data.seq_len=32",
    "model.num_layers=2",
    "trainer.steps=6",
    "trainer.global_batch_size=8",
    "trainer.micro_batch_size=2",
    "trainer.eval_interval=3",
    "trainer.eval_batches=2",
    "tracking.log_interval=2",
    "lr.warmup_steps=2",
]


def run_trainer(overrides: list[str], run_dir: str) -> tuple[dict[str, Any], str | None]:
    """On each rank: results of a run, and a sample."""
    from gpt3d.parallel import device
    from gpt3d.trainer import Trainer

    config = compose([*SMALL, *overrides, f"run_dir={run_dir}"])
    trainer = Trainer(config, device.select(0, "cpu"))
    results = trainer.run()
    return results, trainer.sample()


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


World = Callable[..., list[Any]]


def test_layouts_log_the_same_numbers(world: World, tmp_path: Path) -> None:
    """TP 2 x DP 2 with ZeRO-2 and PP 2 against one rank: losses, validation, sampled text, and complete lines."""
    layouts = {
        "single": (["parallel=single", "zero=0"], 1),
        "tp2_dp2": (["parallel=tp2_dp2", "zero=2"], 4),
        "pp2": (["parallel=pp2", "zero=3", "trainer.timeline=true", "trainer.timeline_steps=2"], 2),
    }
    logs, samples, results = {}, {}, {}
    for name, (overrides, n) in layouts.items():
        run_dir = tmp_path / name
        run_dir.mkdir()
        ranks = world(run_trainer, [*overrides, "trainer.sample_tokens=8"], str(run_dir), n=n, timeout=120)
        assert all(rank[1] == ranks[0][1] for rank in ranks), "ranks sampled different text"
        results[name], samples[name] = ranks[0]
        logs[name] = metrics(run_dir)
    drawn = {path.suffix for path in (tmp_path / "pp2").glob("timeline*")}
    assert drawn == {".png", ".svg", ".json"}, "the pipeline's picture"
    events = [json.loads(line) for line in (tmp_path / "pp2" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "timeline", "sample", "end"]
    assert 0 < events[1]["ideal"] < 1 and 0 < events[1]["bubble"] < 1 and events[2]["text"] == samples["pp2"]
    for m in (m for m in logs["pp2"] if "loss" in m):
        assert 0 < m["pipeline_bubble"] < 1
        assert 0.5 < m["data_wait"] + m["forward_backward"] + m["optimizer"] + m["logging"] <= 1.05, "parts of a step"
    assert all(m["pipeline_bubble"] is None for m in logs["single"] if "loss" in m)
    want = logs["single"]
    assert [m["step"] for m in want if "loss" in m] == [1, 2, 4, 6]
    assert [m["step"] for m in want if "validation_loss" in m] == [3, 6]
    for name, got in logs.items():
        assert samples[name] == samples["single"]
        for a, b in zip(got, want, strict=True):
            for key in (
                "loss",
                "loss_ema",
                "validation_loss",
                "grad_norm",
                "parameter_norm",
                "lr",
                "tokens",
                "samples",
            ):
                if key in b:
                    assert a[key] == pytest.approx(b[key], rel=5e-5 if key == "grad_norm" else 2e-6), (name, key)
    assert results["single"]["validation_loss"] < results["single"]["first_loss"]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_diverged_run_stops_with_advice(world: World, tmp_path: Path, zero: int) -> None:
    """Gradients that are not finite leave the weights alone; too many such steps in a row end the run on all ranks."""
    extreme = [f"zero={zero}", "parallel=dp2", "optimizer.lr=1e30", "optimizer.grad_clip=0", "lr=constant"]
    with pytest.raises(RankFailed, match=r"3 steps in a row.*precision\.max_skipped_steps=3.*optimizer\.lr=1e\+30"):
        world(run_trainer, [*extreme, "precision.max_skipped_steps=3"], str(tmp_path), n=2)


def log_broken_loss(run_dir: str) -> None:
    from gpt3d.parallel import device
    from gpt3d.trainer import Trainer

    trainer = Trainer(compose([*SMALL, "parallel=single", f"run_dir={run_dir}"]), device.select(0, "cpu"))
    trainer.loss_sum += float("nan")
    trainer.step = 1  # the next step is a logged one
    trainer.train_step()


def test_a_loss_that_is_no_number_stops_the_run(world: World, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"the loss is nan at step 2.*optimizer\.lr"):
        world(log_broken_loss, str(tmp_path), n=1)


def test_a_tokenizer_larger_than_the_model_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"model\.vocab_size=512.*2,047"):
        world(run_trainer, ["parallel=single", "model.vocab_size=512"], str(tmp_path), n=1)


def test_steps_zero_only_validates(world: World, tmp_path: Path) -> None:
    results, _ = world(run_trainer, ["parallel=single", "trainer.steps=0"], str(tmp_path), n=1)[0]
    assert results["steps"] == 0 and results["validation_loss"] > 7
