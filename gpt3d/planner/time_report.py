"""The time of one layout as text and as plain data."""

from __future__ import annotations

import dataclasses
from typing import Any

from gpt3d.config.schema import RunConfig
from gpt3d.planner.table import columns
from gpt3d.planner.time import Machine, StepTime, mfu, step_time

PARTS = {
    "compute": "compute", "recompute": "recompute", "tensor_parallel": "tp comm", "bubble": "bubble",
    "messages": "pp comm", "data_parallel": "dp comm", "optimizer": "update", "offload": "offload",
}  # fmt: skip


def seconds_by_cause(time: StepTime) -> list[str]:
    """The parts of a step as cells of a table, in the order of PARTS; "-" for none."""
    return [f"{getattr(time, part):.3g}" if getattr(time, part) else "-" for part in PARTS]


def time_data(config: RunConfig, dp: int, machine: Machine) -> dict[str, Any]:
    """Estimated seconds of a step by cause, tokens/s and MFU; the bubble is that of the schedule, simulated."""
    time = step_time(config, dp, machine, exact=True)
    ranks = config.parallel.tp * config.parallel.pp * dp
    tokens = config.trainer.global_batch_size * config.data.seq_len
    return {
        "seconds": dataclasses.asdict(time) | {"total": time.total},
        "tokens_per_s": tokens / time.total,
        "tokens_per_s_per_gpu": tokens / time.total / ranks,
        "mfu": mfu(config, ranks, time.total, machine),
        "mfu_causal": mfu(config, ranks, time.total, machine, causal_half=True),
    }


def time_text(config: RunConfig, dp: int, machine: Machine) -> str:
    """The same for the terminal."""
    data, time = time_data(config, dp, machine), step_time(config, dp, machine, exact=True)
    table = columns([[*PARTS.values(), "total"], [*seconds_by_cause(time), f"{time.total:.3g}"]])
    return "\n".join(
        [
            "Estimated seconds of a step by cause, without what is hidden under compute:",
            *table,
            f"  {data['tokens_per_s']:,.0f} tokens/s, {data['tokens_per_s_per_gpu']:,.0f} a GPU; MFU {data['mfu']:.1%} "
            f"counting the full attention square, {data['mfu_causal']:.1%} its causal half",
        ]
    )
