"""A small run folder, as training leaves it, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

CONFIG: dict[str, Any] = {
    "model": {"name": "tiny"}, "parallel": {"tp": 1, "pp": 2, "dp": None}, "pipeline": {"schedule": "1f1b"},
    "zero": {"stage": 1}, "precision": {"dtype": "fp32", "grad_dtype": "fp32"}, "recompute": "none", "seed": 1,
    "trainer": {"steps": 6, "global_batch_size": 8, "micro_batch_size": 2}, "data": {"seq_len": 32},
    "optimizer": {"name": "adamw", "lr": 1e-3, "grad_clip": 1.0}, "lr": {"schedule": "cosine"},
}  # fmt: skip


def training(step: int, loss: float, time: float) -> dict[str, Any]:
    return {
        "time": time, "step": step, "loss": loss, "loss_ema": loss, "lr": 1e-3, "grad_norm": 1.5, "tokens": step * 256,
        "tokens_per_s": 1000.0 + step, "mfu": None, "data_wait": 0.1, "forward_backward": 0.6, "pipeline_bubble": 0.5,
        "optimizer": 0.2, "logging": 0.01, "memory_gb": 2.0, "memory_gb_stage_0": 2.0, "memory_gb_stage_1": 1.0,
    }  # fmt: skip


def write_run(folder: Path, lr: float = 1e-3, sample: str = "To be") -> Path:
    """Six steps; killed after the fourth and restarted from the second; step 5 skipped."""
    folder.mkdir(parents=True)
    config = {**CONFIG, "optimizer": {**CONFIG["optimizer"], "lr": lr}, "run_dir": str(folder)}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "environment.json").write_text(json.dumps({"host": "a<b>", "git": {"commit": "c0ffee", "dirty": True}}))
    (folder / "command.txt").write_text("python -m gpt3d.train 'x=<script>'\n")
    plan = {"parameters": 1234, "layout": {"dp": 1}, "device": "cpu",
            "stages": [{"total": 3 * 2**30, "margin": 2**30}, {"total": 2**30, "margin": 0}]}  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "timeline.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    lines = [training(1, 9.0, 100), training(2, 8.0, 110), training(3, 77.0, 120), training(4, 76.0, 130)]
    lines += [training(3, 7.0, 220), training(4, 6.0, 230), training(6, 5.0, 250)]
    lines += [{"time": 251, "step": 6, "validation_loss": 5.25, "validation_perplexity": 190.57}]
    events = [
        {"time": 99, "event": "start", "step": 0},
        {"time": 210, "event": "start", "step": 2},
        {"time": 240, "event": "skipped", "step": 5, "why": "its gradients are not finite"},
        {"time": 252, "event": "sample", "step": 6, "text": sample},
        {"time": 253, "event": "end", "exit_code": 0, "why": ""},
    ]
    for name, entries in (("metrics.jsonl", lines), ("events.jsonl", events)):
        (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder
