"""Where efficiency goes as GPUs are added, on paper: `python -m benchmarks.scale PICTURE.png`.

For each model and number of GPUs (H100 nodes of 8) the planner searches all layouts; of the best the step's parts are
shown. Once with a global batch that stays, once with one that grows with the GPUs. Estimates, not measurements.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

from gpt3d.config.load import compose
from gpt3d.planner.search import Found, search
from gpt3d.planner.table import columns
from gpt3d.planner.time import mfu
from gpt3d.planner.time_report import PARTS

MODELS = ("70b", "405b")
GPUS = tuple(512 * 2**i for i in range(9))  # to 131,072
FIXED = 2048  # sequences of 8,192 tokens: 16.8M tokens a step
GROWING = 0.25  # sequences a GPU
SHOWN = ("compute", "recompute", "bubble", "tensor_parallel", "messages", "data_parallel", "zero", "optimizer")
COLORS = ("#4c78a8", "#9ecae9", "#d8d8d8", "#f58518", "#b279a2", "#e45756", "#eeca3b", "#54a24b")


def found(model: str, gpus: int, batch: int) -> Found:
    """The planner's search for this model on this many H100s."""
    words = [f"model={model}", "precision=bf16", "cluster=h100", f"cluster.nodes={gpus // 8}"]
    config = compose([*words, f"trainer.global_batch_size={batch}", "search=true"])
    return search(copy.deepcopy(config))


def row(result: Found, batch: int) -> dict[str, Any]:
    """The best plan as numbers: what is drawn and printed."""
    best, room = result.plans[0], result.room
    assert best.time is not None and room.machine is not None
    p, schedule = best.config.parallel, best.config.pipeline
    seconds = best.seconds
    tokens = batch * best.config.data.seq_len
    layout = f"tp {p.tp} pp {p.pp} {schedule.schedule}{f' {schedule.chunks}' if schedule.chunks > 1 else ''}"
    return {
        "gpus": room.ranks,
        "batch": batch,
        "layout": f"{layout} dp {best.dp} micro {best.config.trainer.micro_batch_size} "
        f"{best.config.recompute} ZeRO {best.config.zero.stage}",
        "mfu": mfu(best.config, room.ranks, seconds, room.machine),
        "tokens_per_s_per_gpu": tokens / seconds / room.ranks,
        "shares": {part: getattr(best.time, part) / seconds for part in SHOWN},
    }


def text(model: str, kind: str, rows: list[dict[str, Any]]) -> str:
    """One panel as a table."""
    head = ["GPUs", "sequences", "MFU", "tokens/s/GPU", *(PARTS[part] for part in SHOWN), "best layout"]
    cells = [
        [
            f"{r['gpus']:,}", f"{r['batch']:,}", f"{r['mfu']:.1%}", f"{r['tokens_per_s_per_gpu']:,.0f}",
            *(f"{r['shares'][part]:.1%}" if r["shares"][part] >= 0.0005 else "-" for part in SHOWN), r["layout"],
        ]
        for r in rows
    ]  # fmt: skip
    return "\n".join([f"{model}, {kind}", *columns([head, *cells])])


def draw(panels: dict[tuple[str, str], list[dict[str, Any]]], path: Path) -> None:
    """Stacked shares of a step for each panel, the MFU written above."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(kind for _, kind in panels))
    figure = Figure(figsize=(13, 3.9 * len(MODELS)), layout="constrained")
    grid = figure.subplots(len(MODELS), len(kinds), squeeze=False)
    for (model, kind), rows in panels.items():
        axes = grid[MODELS.index(model)][kinds.index(kind)]
        bottom = [0.0] * len(rows)
        for part, color in zip(SHOWN, COLORS, strict=True):
            shares = [100 * r["shares"][part] for r in rows]
            axes.bar(range(len(rows)), shares, 0.82, bottom=bottom, color=color, label=PARTS[part])
            bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
        for i, r in enumerate(rows):
            axes.annotate(f"{r['mfu']:.0%}", (i, 101), ha="center", fontsize=9)
        axes.set_xticks(range(len(rows)), [f"{r['gpus']:,}" for r in rows], rotation=30, ha="right")
        axes.set_ylim(0, 108)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"{model}, {kind}", loc="left", fontsize=10)
        axes.set_ylabel("% of a step; above: MFU")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    figure.suptitle("Planned: the best layout on H100s, and where its step goes", fontsize=11)
    figure.savefig(path, dpi=80)


def main() -> None:
    """Search, print, draw."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for model in MODELS:
        for kind, batches in (
            (f"{FIXED:,} sequences a step", [FIXED] * len(GPUS)),
            (f"{GROWING:g} sequences a GPU a step", [int(GROWING * gpus) for gpus in GPUS]),
        ):
            results = [(found(model, gpus, batch), batch) for gpus, batch in zip(GPUS, batches, strict=True)]
            panels[model, kind] = [row(result, batch) for result, batch in results if result.plans]
            print(text(model, kind, panels[model, kind]), end="\n\n", flush=True)
    draw(panels, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
