"""The one DeepSpeed config, derived from ours; nobody writes batch sizes, precision or clipping twice."""

from __future__ import annotations

import math
from typing import Any

from gpt3d.config.deepspeed import extra_keys
from gpt3d.config.schema import RunConfig

UNSPLIT = (
    10**12
)  # more elements than any rank holds: one sub-group, so that the norm is reduced equally often everywhere


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
