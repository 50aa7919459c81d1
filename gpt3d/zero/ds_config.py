"""The one DeepSpeed config, derived from ours; nobody writes batch sizes, precision or clipping twice."""

from __future__ import annotations

import math
from typing import Any

from gpt3d.config.deepspeed import UNSPLIT, extra_keys
from gpt3d.config.problems import Problem, nearest
from gpt3d.config.schema import RunConfig


def derive_ds_config(config: RunConfig) -> dict[str, Any]:
    """DeepSpeed's JSON for ZeRO stages 1 to 3, with `zero.deepspeed` merged in.

    `gradient_accumulation_steps` is 1 because our pipeline scales the loss and says which backward is the last;
    DeepSpeed would divide once per stage. Pass-through keys that the configuration decides are equal to ours (the rules
    refused others) and left out.
    """
    precision = config.precision
    derived: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.trainer.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.grad_clip,
        "steps_per_print": UNSPLIT,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": precision.grad_dtype,
        "data_types": {"grad_accum_dtype": precision.grad_dtype},
        "zero_optimization": _zero_section(config),
    }
    if precision.dtype == "bf16":
        derived["bf16"] = {"enabled": True, "immediate_grad_update": True}
    elif precision.dtype == "fp16":
        derived["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": round(math.log2(precision.initial_loss_scale)),
            "loss_scale_window": precision.loss_scale_window,
            "min_loss_scale": precision.min_loss_scale,
            "hysteresis": 1,
        }
    return _merge(derived, extra_keys(config))


class _Reading(dict[str, Any]):
    """A DeepSpeed config that notes which of its keys are looked at."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.asked: set[str] = set()

    def __copy__(self) -> _Reading:
        return self

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def refused_keys(config: RunConfig, device: str) -> list[Problem]:
    """What DeepSpeed itself doesn't know or take of `zero.deepspeed`. Imports it, for "cpu" or "cuda"."""
    from gpt3d.launch.preload import prepare_deepspeed

    prepare_deepspeed(device)
    from deepspeed.runtime.config import DeepSpeedConfig

    extra, read = extra_keys(config), _Reading(derive_ds_config(config))
    try:
        DeepSpeedConfig(read)
    except Exception as error:
        # pydantic's, in most cases: then it says which key and why
        details = error.errors() if hasattr(error, "errors") else []
        if not details:
            why = f"DeepSpeed refuses them: {str(error).splitlines()[0]}"
            return [Problem("zero.deepspeed", extra, why, "see DeepSpeed's documentation of its JSON")]
        problems = []
        for one in details:
            name = ".".join(map(str, one["loc"]))
            why = "DeepSpeed has no such key" if one["type"] == "extra_forbidden" else f"DeepSpeed says: {one['msg']}"
            problems.append(Problem(f"zero.deepspeed.{_path_to(extra, name)}", one["input"], why))
        return problems
    unknown = [key for key in extra if key not in read.asked]
    return [
        Problem(f"zero.deepspeed.{key}", None, "DeepSpeed has no such key", _close(key, read.asked)) for key in unknown
    ]


def _close(key: str, known: set[str]) -> str:
    names = nearest(key, known)
    return f"nearest: {', '.join(names)}" if names else ""


def _path_to(tree: dict[str, Any], name: str) -> str:
    """`name` with the sections it stands in, as far as `tree` tells."""
    first = name.partition(".")[0]
    for section, content in tree.items():
        if isinstance(content, dict) and first in content:
            return f"{section}.{name}"
    return name


def _zero_section(config: RunConfig) -> dict[str, Any]:
    zero = config.zero
    section: dict[str, Any] = {
        "stage": zero.stage,
        "overlap_comm": zero.overlap_comm,
        "contiguous_gradients": zero.contiguous_gradients,
        "reduce_bucket_size": zero.reduce_bucket_size,
        "allgather_bucket_size": zero.allgather_bucket_size,
        "sub_group_size": UNSPLIT,
    }
    if zero.stage == 3:
        section |= {
            "stage3_prefetch_bucket_size": zero.prefetch_bucket_size,
            "stage3_param_persistence_threshold": zero.param_persistence_threshold,
            "stage3_max_live_parameters": zero.max_live_parameters,
            "stage3_max_reuse_distance": zero.max_reuse_distance,
        }
    if zero.offload_optimizer == "cpu":
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": zero.pin_memory}
    if zero.offload_param == "cpu":
        section["offload_param"] = {"device": "cpu", "pin_memory": zero.pin_memory}
    return section


def _merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """`extra` laid over `base`, level by level."""
    merged = dict(base)
    for key, value in extra.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if nested else value
    return merged
