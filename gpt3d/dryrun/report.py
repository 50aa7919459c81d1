"""A dry run for the terminal, and as plain data for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from gpt3d.config.notes import batch_in_words
from gpt3d.config.schema import RunConfig
from gpt3d.dryrun.run import DryRun
from gpt3d.dryrun.tracker import by_module
from gpt3d.planner.memory import size
from gpt3d.planner.need import layout_in_words
from gpt3d.planner.table import columns
from gpt3d.planner.traffic import sent

DERIVED = ("weights", "gradients", "optimizer", "optimizer step")  # under ZeRO 1 to 3, and of these what there is:
ALSO_DERIVED = ("buckets", "gathered", "offload buffer")
PASSES = ("forward", "recompute", "backward")


def dry_run_text(config: RunConfig, run: DryRun) -> str:
    """Tables of FLOPs, traffic and memory, and what was not counted but derived."""
    p = config.parallel
    lines = [
        f"dry run of rank {run.rank}, stage {run.stage} of {p.pp}: {layout_in_words(config, run.dp)}",
        batch_in_words(config, run.dp),
        f"{run.parameters:,} parameters on this rank; kernels as on {run.device}; {run.counted} of {run.microbatches} "
        f"microbatches were run, the others repeat them; {run.seconds:.1f} s",
        "",
        "FLOPs of a step, in 10^12, by module (matrix products; the full attention square):",
        *columns(_flop_rows(run)),
        "",
        "Collectives of a step; `buffers` are the whole tensors, `sent` what this rank sends of them over a ring:",
        *columns(_traffic_rows(config, run)),
        "",
        f"Live tensors at the peak, in {_where(run.peak_phase)}; without CUDA context, NCCL and fragmentation:",
        *columns([[kind, size(count)] for kind, count in run.memory.items()] + [["total", size(run.peak)]]),
        "",
        "counted on the real layers and executor: " + _counted(run),
    ]
    if run.zero:
        lines.append(
            f"derived from zero.stage={run.zero}, since DeepSpeed is not run: dp, model and ends collectives, "
            f"{', '.join(_derived(run))}"
        )
    return "\n".join(lines)


def _derived(run: DryRun) -> list[str]:
    """Kinds of memory that are not counted."""
    return [*DERIVED, *(kind for kind in ALSO_DERIVED if kind in run.memory)] if run.zero else []


def _counted(run: DryRun) -> str:
    inside = "FLOPs, tp, kv and pp collectives, activations, logits, messages, work, gradients on their way"
    return inside if run.zero else "everything"


def _where(phase: str) -> str:
    return "the optimizer step" if phase == "optimizer" else f"a {phase}" if phase != "between actions" else phase


def _flop_rows(run: DryRun) -> list[list[str]]:
    table = by_module(run.flops)
    steps = [step for step in PASSES if any(passes.get(step) for passes in table.values())]
    rows = [["module", *steps, "total"]]
    for module, passes in sorted(table.items()):
        rows.append([module, *(_tera(passes.get(step, 0)) for step in steps), _tera(sum(passes.values()))])
    sums = [sum(passes.get(step, 0) for passes in table.values()) for step in steps]
    return [*rows, ["total", *map(_tera, sums), _tera(sum(sums))]]


def _tera(flops: int) -> str:
    return f"{flops / 1e12:,.1f}" if flops >= 1e12 else f"{flops / 1e12:.6f}"


def _traffic_rows(config: RunConfig, run: DryRun) -> list[list[str]]:
    rows = [["group", "collective", "calls", "buffers", "sent"]]
    for call, count in sorted(run.bytes.items()):
        ranks = ranks_of(config, run.dp, call.group)
        rows.append([*call, f"{run.calls[call]:,}", size(count), size(sent(call.kind, count, ranks))])
    return rows if len(rows) > 1 else [["none"]]


def ranks_of(config: RunConfig, dp: int, group: str) -> int:
    """Ranks in a group of this name."""
    p = config.parallel
    copies = max(1, p.tp // config.model.num_kv_heads)
    return {"tp": p.tp, "dp": dp, "model": p.tp * p.pp, "kv": copies}.get(group, 2)


def dry_run_data(config: RunConfig, run: DryRun) -> dict[str, Any]:
    """The same; bytes and FLOPs."""
    plain = {f.name: getattr(run, f.name) for f in dataclasses.fields(run)}
    traffic = [
        {
            "group": call.group, "collective": call.kind, "calls": run.calls[call], "buffer_bytes": count,
            "sent_bytes": sent(call.kind, count, ranks_of(config, run.dp, call.group)),
        }
        for call, count in sorted(run.bytes.items())
    ]  # fmt: skip
    del plain["calls"], plain["bytes"]
    derived = ["dp", "model", "ends", *_derived(run)] if run.zero else []
    return plain | {"flops": by_module(run.flops), "traffic": traffic, "peak_bytes": run.peak, "derived": derived}
