"""The time of one layout as text and as plain data."""

from __future__ import annotations

from typing import Any

from gpt3d.config.schema import RunConfig
from gpt3d.model.flops import model_flops_per_token
from gpt3d.planner.machine import Machine
from gpt3d.planner.table import columns
from gpt3d.planner.time import StepTime, hfu, mfu, step_time

PARTS = {
    "compute": "compute", "recompute": "recompute", "bubble": "bubble", "tensor_parallel": "tp", "messages": "pp",
    "data_parallel": "dp", "zero": "zero", "optimizer": "update", "offload": "offload",
}  # fmt: skip
COMMUNICATION = ("tensor_parallel", "messages", "data_parallel", "zero", "offload")


def seconds_by_cause(time: StepTime) -> list[str]:
    """The parts of a step as cells of a table, in the order of PARTS; "-" for none."""
    return [f"{getattr(time, part):.3g}" if getattr(time, part) else "-" for part in PARTS]


def time_data(config: RunConfig, dp: int, machine: Machine) -> dict[str, Any]:
    """Estimated seconds of a step by cause, speed, MFU and HFU; the bubble is that of the schedule, simulated."""
    time = step_time(config, dp, machine, exact=True)
    ranks = config.parallel.tp * config.parallel.cp * config.parallel.pp * dp
    tokens = config.trainer.global_batch_size * config.data.seq_len
    speed = tokens / time.total
    data: dict[str, Any] = {
        "seconds": {part: getattr(time, part) for part in PARTS} | {"total": time.total},
        "seconds_hidden": {"tensor_parallel": time.tp_hidden, "data_parallel": time.dp_hidden},
        "tokens_per_s": speed,
        "tokens_per_s_per_gpu": speed / ranks,
        "model_flops_per_s": speed * model_flops_per_token(config.model, config.data.seq_len),
        "peak_flops_per_s_per_gpu": machine.flops,
        "bubble": time.bubble / time.total,
        "exposed_communication": time.exposed / time.total,
    }
    for name, causal in (("", False), ("_causal", True)):
        data[f"mfu{name}"] = mfu(config, ranks, time.total, machine, causal)
        data[f"hfu{name}"] = hfu(config, ranks, time.total, machine, causal)
    if config.plan_tokens is not None:
        hours = config.plan_tokens / speed / 3600
        data["budget"] = {"tokens": config.plan_tokens, "hours": hours, "gpu_hours": hours * ranks}
    return data


def time_in_short(data: dict[str, Any]) -> str:
    """Speed, and where most of a step goes, on one line; of a layout that does not fit, what it would be."""
    seconds = data["seconds"]
    parts = sorted(((seconds[part], name) for part, name in PARTS.items()), reverse=True)
    shares = ", ".join(
        f"{name} {size / seconds['total']:.0%}" for size, name in parts[:3] if size >= 0.01 * parts[0][0]
    )
    start = "it would take " if data["fits"] is False else ""
    return (
        f"{start}{seconds['total']:.3g} s a step, {data['tokens_per_s']:,.0f} tokens/s, "
        f"{data['tokens_per_s_per_gpu']:,.0f} a GPU, MFU {data['mfu']:.1%}; most of a step: {shares}"
    )


def time_text(data: dict[str, Any], ranks: int) -> str:
    """`time_data` for the terminal."""
    seconds, hidden = data["seconds"], sum(data["seconds_hidden"].values())
    time = StepTime(**{part: seconds[part] for part in PARTS})
    exposed = f"exposed communication {data['exposed_communication']:.1%}"
    by_kind = ", ".join(f"{PARTS[part]} {seconds[part]:.3g} s" for part in COMMUNICATION if seconds[part]) or "none"
    lines = [
        f"Estimated step: {seconds['total']:.3g} s. Seconds by cause; tp, pp, dp, zero and offload are communication:",
        *columns([[*PARTS.values(), "total"], [*seconds_by_cause(time), f"{seconds['total']:.3g}"]]),
        f"  speed: {data['tokens_per_s']:,.0f} tokens/s, {data['tokens_per_s_per_gpu']:,.0f} a GPU; "
        f"{data['model_flops_per_s'] / 1e15:,.3g} PFLOP/s of the model, "
        f"{data['model_flops_per_s'] / ranks / 1e12:,.0f} TFLOP/s a GPU of {data['peak_flops_per_s_per_gpu'] / 1e12:g}",
        f"  MFU {data['mfu']:.1%}, HFU {data['hfu']:.1%} counting the full attention square; "
        f"{data['mfu_causal']:.1%} and {data['hfu_causal']:.1%} its causal half",
        f"  bubble {data['bubble']:.1%} of the step; {exposed}: {by_kind}"
        + (f"; {hidden:.3g} s more are hidden under compute" if hidden else ""),
    ]
    if budget := data.get("budget"):
        hours = budget["hours"]
        lines.append(
            f"  {budget['tokens']:.4g} tokens take {hours:,.0f} hours ({hours / 24:,.1f} days), "
            f"{budget['gpu_hours']:,.0f} GPU-hours"
        )
    return "\n".join(lines)
