"""`zero.deepspeed`: further DeepSpeed keys, and which of them this configuration decides itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpt3d.config.arithmetic import num_microbatches
from gpt3d.config.problems import Problem
from gpt3d.config.schema import RunConfig

# More elements than any rank holds: DeepSpeed's optimizer then has one sub-group on every rank.
UNSPLIT = 10**12

# Built by gpt3d, whatever their content: DeepSpeed must not build a second one.
_OURS = {
    "optimizer": "optimizer=... and optimizer.*",
    "scheduler": "lr=... and lr.*",
    "pipeline": "pipeline=... and parallel.pp",
    "tensor_parallel": "parallel.tp",
    "sequence_parallel_size": "parallel.sequence_parallel",
    "dataloader_drop_last": "data.*",
}


def decided(config: RunConfig, dp: int) -> dict[str, tuple[Any, str]]:
    """DeepSpeed keys that follow from the configuration: dotted key -> (value, the key of ours that sets it)."""
    zero, precision, trainer = config.zero, config.precision, config.trainer
    values: dict[str, tuple[Any, str]] = {
        "train_batch_size": (trainer.global_batch_size, "trainer.global_batch_size"),
        "train_micro_batch_size_per_gpu": (trainer.micro_batch_size, "trainer.micro_batch_size"),
        "gradient_accumulation_steps": (num_microbatches(config, dp), "trainer.global_batch_size"),
        "gradient_clipping": (config.optimizer.grad_clip, "optimizer.grad_clip"),
        "fp16.enabled": (precision.dtype == "fp16", "precision.dtype"),
        "bf16.enabled": (precision.dtype == "bf16", "precision.dtype"),
        "data_types.grad_accum_dtype": (precision.grad_dtype, "precision.grad_dtype"),
        "fp16.initial_scale_power": (math.log2(precision.initial_loss_scale), "precision.initial_loss_scale"),
        "fp16.loss_scale_window": (precision.loss_scale_window, "precision.loss_scale_window"),
        "fp16.min_loss_scale": (precision.min_loss_scale, "precision.min_loss_scale"),
        # Fragments of the optimizer state would be saved under other parameters' names.
        "zero_optimization.round_robin_gradients": (False, "checkpoints"),
        "bf16.immediate_grad_update": (True, "precision.grad_dtype"),
        "zero_force_ds_cpu_optimizer": (False, "optimizer.name"),
    }
    if config.parallel.pp > 1:  # else stages would reduce the norm different numbers of times, and wait for ever
        values["zero_optimization.sub_group_size"] = (UNSPLIT, "parallel.pp")
    of_zero = {
        "stage": "stage",
        "offload_optimizer.device": "offload_optimizer",
        "offload_optimizer.pin_memory": "pin_memory",
        "offload_param.device": "offload_param",
        "offload_param.pin_memory": "pin_memory",
        "overlap_comm": "overlap_comm",
        "contiguous_gradients": "contiguous_gradients",
        "reduce_bucket_size": "reduce_bucket_size",
        "allgather_bucket_size": "allgather_bucket_size",
        "stage3_prefetch_bucket_size": "prefetch_bucket_size",
        "stage3_param_persistence_threshold": "param_persistence_threshold",
        "stage3_max_live_parameters": "max_live_parameters",
        "stage3_max_reuse_distance": "max_reuse_distance",
    }
    for theirs, ours in of_zero.items():
        values[f"zero_optimization.{theirs}"] = (getattr(zero, ours), f"zero.{ours}")
    return values


def extra_keys(config: RunConfig) -> dict[str, Any]:
    """What of `zero.deepspeed` is passed on: everything but the keys that the configuration decides."""
    taken = set(decided(config, 1))

    def keep(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, value in tree.items():
            key = prefix + str(name)
            if isinstance(value, Mapping):
                inner = keep(value, key + ".")
                if inner or not value:
                    kept[str(name)] = inner
            elif key not in taken:
                kept[str(name)] = value
        return kept

    return keep(config.zero.deepspeed)


def contradictions(config: RunConfig, dp: int | None) -> list[Problem]:
    """Keys of `zero.deepspeed` that say something else than the configuration; `dp` None: not known, not compared."""
    values = decided(config, dp or 1)
    if dp is None:
        del values["gradient_accumulation_steps"]
    problems = []
    for key, given in _flat(config.zero.deepspeed).items():
        where, top = f"zero.deepspeed.{key}", key.partition(".")[0]
        if top in _OURS:
            problems.append(
                Problem(where, given, "is built by gpt3d, not by DeepSpeed", f"use {_OURS[top]} and remove it")
            )
        elif not isinstance(given, Mapping) and any(known.startswith(key + ".") for known in values):
            problems.append(Problem(where, given, "is a section of DeepSpeed's, with keys below it", "a mapping"))
        elif key in values and not _equal(given, values[key][0]):
            value, ours = values[key]
            why = f"contradicts {value!r}, which follows from {ours}"
            problems.append(Problem(where, given, why, f"remove it and set {ours}"))
    return problems


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        flat |= _flat(value, key + ".") if isinstance(value, Mapping) and value else {key: value}
    return flat


def _equal(given: Any, ours: Any) -> bool:
    """Equal as numbers ("5e8" and 500000000), booleans or text; `auto` takes ours."""
    if given == "auto":
        return True
    if isinstance(ours, bool) or isinstance(given, bool):
        return given is ours
    try:
        return float(given) == float(ours)
    except (TypeError, ValueError):
        return given == ours
