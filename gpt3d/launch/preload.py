"""Everything that must happen before a rank touches DeepSpeed, and the slow imports that ranks share."""

from __future__ import annotations

import importlib
import logging
import os
import warnings

# What a rank would otherwise import late: the first optimizer imports torch._dynamo, DeepSpeed's check of the optimizer
# imports its Muon module, whose @torch.compile imports inductor, its engine the presets of mixture-of-experts models.
# Together several CPU seconds a rank.
SLOW_IMPORTS = (
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch._dynamo",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.module_inject.auto_ep_layer",
    "gpt3d.rank",
    "gpt3d.trainer",
    "gpt3d.zero.deepspeed_engine",
    "gpt3d.zero.replicated",
)


def prepare_deepspeed(device: str) -> None:
    """Import DeepSpeed for "cpu" or "cuda". Call it before anything else imports DeepSpeed."""
    os.environ["DS_ACCELERATOR"] = device  # DeepSpeed's own detection looks for every vendor's tools and logs about it
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)  # it tries a compiler on small files, and says so
    try:
        import deepspeed.ops

        ops = deepspeed.ops.__compatible_ops__
    finally:
        logging.disable(disabled)
    if device == "cpu":
        # Else the first process group compiles a C++ extension for minutes, and a killed build leaves a lock on which
        # every later run waits for ever.
        ops["deepspeed_shm_comm"] = False
    # DeepSpeed calls collectives by names that torch is renaming: nothing a user of gpt3d can act on
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")


def import_all() -> None:
    """Import what ranks need, so that a process forked from this one starts in milliseconds."""
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
