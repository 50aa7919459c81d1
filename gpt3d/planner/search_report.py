"""The result of a search as text and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpt3d.config.problems import show
from gpt3d.config.schema import RunConfig
from gpt3d.planner.remedies import Remedy
from gpt3d.planner.search import Found, Plan
from gpt3d.planner.table import columns
from gpt3d.planner.time import StepTime, mfu
from gpt3d.planner.time_report import PARTS, seconds_by_cause

HEAD = ("tp", "pp", "schedule", "dp", "micro", "recompute", "ZeRO", "offload", "GB")


def search_text(found: Found, remedies: Sequence[Remedy] = ()) -> str:
    """The search for the terminal; `remedies` are told if nothing fits."""
    trainer = found.config.trainer
    head = (
        f"{found.config.model.name} on {found.room.ranks:,} GPUs, {trainer.global_batch_size} sequences of "
        f"{found.config.data.seq_len} tokens a step: {found.legal:,} legal layouts, {found.fitting:,} fit"
    )
    left_out = [f"Not searched: {'; '.join(found.left_out)}."]
    if not found.plans:
        return "\n".join([head, *_nothing(found, remedies), *left_out])
    rows = [["", *HEAD, *PARTS.values(), "step s", "MFU"]]
    rows += [_row(str(i), plan, found) for i, plan in enumerate(found.plans, 1)]
    if isinstance(found.own, Plan):
        rows.append(_row("own", found.own, found))
    return "\n".join(
        [
            head,
            "Of each tp, pp, micro batch and recompute the best schedule, ZeRO and offload, by an estimate of a step:",
            "seconds by cause, without what is hidden under compute. MFU counts the full attention square.",
            *columns(rows),
            "",
            f"The best: {' '.join(overrides(found.plans[0].config))}",
            *_about_own(found),
            *left_out,
        ]
    )


def _nothing(found: Found, remedies: Sequence[Remedy]) -> Iterator[str]:
    """Why there is no plan, and what would make one."""
    if not found.legal:
        yield (
            f"No layout is legal: no tp x pp of this model leaves a dp that divides {found.room.ranks} GPUs and "
            f"trainer.global_batch_size={found.config.trainer.global_batch_size}."
        )
    else:
        yield "No layout fits."
    if remedies:
        yield "One of these changes is enough, with the best layout that it allows:"
        for remedy in remedies:
            yield f"  {remedy}"
            yield f"    {' '.join(overrides(remedy.plan.config))}"
    else:
        yield "No single change of precision, batch, GPU, nodes or sequence is enough."


def _about_own(found: Found) -> Iterator[str]:
    """Why the user's own layout loses, or that it is the best."""
    best, own = found.plans[0], found.own
    if isinstance(own, str):
        yield f"Your layout: {own}"
    elif own.seconds <= best.seconds * 1.001:
        yield "Your layout is as good as the best."
    elif own.time and best.time:
        gaps = {part: getattr(own.time, part) - getattr(best.time, part) for part in PARTS}
        most = sorted(gaps, key=gaps.__getitem__, reverse=True)
        told = ", ".join(f"{PARTS[part]} +{gaps[part]:.3g} s" for part in most[:2] if gaps[part] > 0)
        yield f"Your layout takes {own.seconds / best.seconds:.2f} times as long, most of it: {told} a step."
        ours, theirs = overrides(own.config), overrides(best.config)
        changes = [text for text in theirs if text not in ours]
        yield f"  the best differs in {' '.join(changes)}"


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


def search_data(found: Found, remedies: Sequence[Remedy] = ()) -> dict[str, Any]:
    """The search as plain data; times in seconds."""
    return {
        "model": found.config.model.name,
        "gpus": found.room.ranks,
        "legal": found.legal,
        "fitting": found.fitting,
        "plans": [_data(plan, found) for plan in found.plans],
        "own": _data(found.own, found) if isinstance(found.own, Plan) else found.own,
        "changes": [remedy_data(remedy) for remedy in remedies],
        "not_searched": found.left_out,
    }


def remedy_data(remedy: Remedy) -> dict[str, Any]:
    """A change and the layout that then fits."""
    return {
        "change": remedy.overrides,
        "gpus": remedy.gpus,
        "gpu_gb": remedy.plan.gb,
        "seconds": remedy.plan.time.total if remedy.plan.time else None,
        "gpu_time_per_token": remedy.cost,
        "overrides": overrides(remedy.plan.config),
    }


def _data(plan: Plan, found: Found) -> dict[str, Any]:
    time = _time(plan)
    return {
        "overrides": overrides(plan.config),
        "dp": plan.dp,
        "microbatches": plan.microbatches,
        "gpu_gb": plan.gb,
        "seconds": {part: getattr(time, part) for part in PARTS} | {"total": time.total},
        "mfu": _mfu(plan, found),
    }


def _row(name: str, plan: Plan, found: Found) -> list[str]:
    c, z, time = plan.config, plan.config.zero, _time(plan)
    offload = "all" if z.offload_param == "cpu" else "optimizer" if z.offload_optimizer == "cpu" else "-"
    schedule = f"{c.pipeline.schedule} {c.pipeline.chunks}" if c.pipeline.chunks > 1 else c.pipeline.schedule
    sizes = (c.parallel.tp, c.parallel.pp, schedule if c.parallel.pp > 1 else "-", plan.dp, c.trainer.micro_batch_size)
    return [
        name, *map(str, sizes), c.recompute, str(z.stage), offload, f"{plan.gb:.1f}", *seconds_by_cause(time),
        f"{time.total:.3g}", f"{_mfu(plan, found):.1%}",
    ]  # fmt: skip


def _time(plan: Plan) -> StepTime:
    """A search is over known machines, so each plan has a time."""
    assert plan.time is not None
    return plan.time


def _mfu(plan: Plan, found: Found) -> float:
    assert found.room.machine is not None
    return mfu(plan.config, found.room.ranks, plan.seconds, found.room.machine)
