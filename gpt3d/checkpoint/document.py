"""What a checkpoint says about itself beside the tensors: `state.json` for programs, `summary.txt` for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from gpt3d.checkpoint.folder import FORMAT


def describe(
    config: Mapping[str, Any],
    progress: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    data: Mapping[str, str],
    layout: Mapping[str, int],
    environment: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    """The contents of state.json. `progress` is the trainer's own; `sizes`: tensors, numbers and bytes."""  # fmt: skip
    return {
        "format": FORMAT,
        "saved": datetime.now(UTC).isoformat(timespec="seconds"),
        "progress": dict(progress),
        "optimizer": dict(optimizer),
        "data": dict(data),
        "layout": dict(layout),
        "sizes": dict(sizes),
        "environment": dict(environment),
        "config": dict(config),
    }


def to_json(state: Mapping[str, Any]) -> str:
    return json.dumps(state, indent=1) + "\n"


def summary(state: Mapping[str, Any]) -> str:
    """A screen of text."""
    progress, layout, config, sizes = state["progress"], state["layout"], state["config"], state["sizes"]
    model, packages = config["model"], state["environment"].get("packages", {})
    loss, validation = progress.get("loss"), progress.get("validation_loss")
    lines = {
        "model": f"{model['name']}, {sizes['parameters']:,} parameters (vocabulary {model['vocab_size']:,})",
        "step": f"{progress['step']:,} of {config['trainer']['steps']:,}, {state['optimizer']['steps']:,} updates",
        "consumed": f"{progress['consumed_samples']:,} samples, {progress['consumed_tokens']:,} tokens",
        "loss": f"{loss:.4f}" if loss is not None else "not logged yet",
        "validation": f"{validation:.4f}" if validation is not None else "none yet",
        "contents": f"fp32 weights and both Adam moments, {sizes['bytes'] / 1e9:.3f} GB",
        "saved by": ", ".join(f"{axis} {size}" for axis, size in layout.items()) + " (loads into any layout)",
        "saved at": f"{state['saved']}, after {progress['seconds'] / 3600:.2f} h of training",
        "versions": ", ".join(
            f"{name} {packages[name]}" for name in ("gpt3d", "torch", "deepspeed") if name in packages
        ),
    }
    return "".join(f"{name:<11} {text}\n" for name, text in lines.items())
