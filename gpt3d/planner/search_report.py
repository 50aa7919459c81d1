"""The result of a search as text and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from gpt3d.config.problems import show
from gpt3d.config.schema import RunConfig
from gpt3d.planner.search import Found, Plan, microbatches
from gpt3d.planner.table import columns
from gpt3d.planner.time import mfu
from gpt3d.planner.time_report import PARTS, seconds_by_cause


def search_text(found: Found) -> str:
    """The search for the terminal."""
    trainer = found.config.trainer
    head = (
        f"{found.config.model.name} on {found.ranks:,} GPUs, {trainer.global_batch_size} sequences of "
        f"{found.config.data.seq_len} tokens a step: {found.legal:,} legal layouts, {found.fitting:,} fit"
    )
    if not found.plans:
        return "\n".join([head, *_nothing(found)])
    rows = [
        [
            "",
            "tp",
            "pp",
            "chunks",
            "dp",
            "micro",
            "recompute",
            "ZeRO",
            "offload",
            "GB",
            *PARTS.values(),
            "step s",
            "MFU",
        ]
    ]
    rows += [_row(str(i), plan, found) for i, plan in enumerate(found.plans, 1)]
    if isinstance(found.own, Plan):
        rows.append(_row("own", found.own, found))
    best = " ".join(overrides(found.plans[0].config))
    return "\n".join(
        [
            head,
            "Of each tp, pp, micro batch and recompute the best chunks, ZeRO and offload, ordered by an estimate of",
            "the step: seconds by cause, without what is hidden under compute. MFU counts the full attention square.",
            *columns(rows),
            "",
            f"The best: {best}",
            _about_own(found),
        ]
    )


def _nothing(found: Found) -> Iterator[str]:
    """Why there is no plan, and what would make one."""
    if not found.legal:
        yield (
            f"No layout is legal: no tp x pp of this model leaves a dp that divides {found.ranks} GPUs and "
            f"trainer.global_batch_size={found.config.trainer.global_batch_size}."
        )
    else:
        yield "No layout fits."
    if found.changes:
        yield "One of these changes is enough: " + "; ".join(found.changes)
    else:
        yield "No single change of precision, batch, GPU memory, nodes or sequence is enough."


def _about_own(found: Found) -> str:
    """Why the user's own layout loses, or that it is the best."""
    best, own = found.plans[0], found.own
    if isinstance(own, str):
        return f"Your layout: {own}"
    if own.time.total <= best.time.total * 1.001:
        return "Your layout is as good as the best."
    gaps = {part: getattr(own.time, part) - getattr(best.time, part) for part in PARTS}
    worst = max(gaps, key=gaps.__getitem__)
    times = own.time.total / best.time.total
    return f"Your layout takes {times:.2f} times as long, most of it {PARTS[worst]} (+{gaps[worst]:.3g} s a step)."


def overrides(config: RunConfig) -> list[str]:
    """What to type for this layout."""
    p, pieces = config.parallel, config.parallel.layers_per_stage
    uneven = pieces is not None and len(set(pieces)) > 1
    keys: dict[str, Any] = {
        "parallel.tp": p.tp, "parallel.pp": p.pp, "parallel.sequence_parallel": p.sequence_parallel,
        **({"parallel.layers_per_stage": pieces} if uneven else {}),
        "pipeline.schedule": config.pipeline.schedule, "pipeline.chunks": config.pipeline.chunks,
        "trainer.micro_batch_size": config.trainer.micro_batch_size, "recompute": config.recompute,
        "zero.stage": config.zero.stage, "zero.offload_optimizer": config.zero.offload_optimizer,
        "zero.offload_param": config.zero.offload_param,
    }  # fmt: skip
    return [f"{key}={show(value)}" for key, value in keys.items()]


def search_data(found: Found) -> dict[str, Any]:
    """The search as plain data; times in seconds."""
    return {
        "model": found.config.model.name,
        "gpus": found.ranks,
        "legal": found.legal,
        "fitting": found.fitting,
        "plans": [_data(plan, found) for plan in found.plans],
        "own": _data(found.own, found) if isinstance(found.own, Plan) else found.own,
        "changes": found.changes,
    }


def _data(plan: Plan, found: Found) -> dict[str, Any]:
    return {
        "overrides": overrides(plan.config),
        "dp": plan.dp,
        "microbatches": microbatches(plan),
        "gpu_gb": plan.gb,
        "seconds": dataclasses.asdict(plan.time) | {"total": plan.time.total},
        "mfu": mfu(plan.config, found.ranks, plan.time.total, found.machine),
    }


def _row(name: str, plan: Plan, found: Found) -> list[str]:
    c, z = plan.config, plan.config.zero
    offload = "all" if z.offload_param == "cpu" else "optimizer" if z.offload_optimizer == "cpu" else "-"
    sizes = [c.parallel.tp, c.parallel.pp, c.pipeline.chunks, plan.dp, c.trainer.micro_batch_size]
    return [
        name, *map(str, sizes), c.recompute, str(z.stage), offload, f"{plan.gb:.1f}", *seconds_by_cause(plan.time),
        f"{plan.time.total:.3g}", f"{mfu(c, found.ranks, plan.time.total, found.machine):.1%}",
    ]  # fmt: skip
