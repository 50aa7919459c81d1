"""The plan of one layout as pictures: memory of each pipeline stage, stacked by part, and the schedule in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpt3d.config.arithmetic import num_microbatches
from gpt3d.pipeline.picture import draw_timeline, legend_of
from gpt3d.planner.machine import Machine
from gpt3d.planner.memory import GB
from gpt3d.planner.need import PARTS, layout_in_words
from gpt3d.planner.report import MemoryPlan
from gpt3d.planner.time import pace_of, step_timeline

COLORS = {
    "weights": "#4c78a8", "gradients": "#72b7b2", "optimizer": "#9ecae9", "activations": "#f58518", "logits": "#e45756",
    "work": "#9d755d", "step": "#b279a2", "buffers": "#eeca3b", "margin": "#d8d8d8",
}  # fmt: skip
DRAWN = 240  # actions of a rank that can still be told apart; of a longer step a shorter one is drawn


def write_pictures(plan: MemoryPlan, machine: Machine | None, folder: Path) -> list[Path]:
    """Write memory and, with pipeline stages on a known machine, timeline to `folder`, each as PNG and SVG.

    Raises OSError if that can't be done, ModuleNotFoundError without matplotlib (`pip install gpt3d[plot]`).
    """
    figures = {"memory": _memory(plan)}
    if machine is not None and plan.config.parallel.pp > 1:
        figures["timeline"] = _timeline(plan, machine)
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{name}.{kind}" for name in figures for kind in ("png", "svg")]
    for path in written:
        figures[path.stem].savefig(path, dpi=150)
    return written


def _memory(plan: MemoryPlan) -> Any:
    """One bar a stage; a line where the GPU ends."""
    from matplotlib.figure import Figure

    stages = len(plan.stages)
    figure = Figure(figsize=(min(16, 5.5 + 0.55 * stages), 4.8), layout="constrained")
    axes = figure.subplots()
    bottom = [0.0] * stages
    for part in PARTS:
        sizes = [getattr(memory, part) / GB for memory in plan.stages]
        if any(sizes):
            axes.bar(range(stages), sizes, 0.8, bottom=bottom, label=part, color=COLORS[part])
            bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    if plan.gpu_gb is not None:
        axes.axhline(plan.gpu_gb, color="black", linewidth=1.2, linestyle="--", label=f"the GPU: {plan.gpu_gb:g} GB")
    if stages <= 16:
        for stage, top in enumerate(bottom):
            axes.annotate(f"{top:.1f}", (stage, top), (0, 2), textcoords="offset points", ha="center", fontsize=8)
        axes.set_xticks(range(stages))
    axes.set_ylim(0, 1.08 * max([*bottom, plan.gpu_gb or 0.0]))
    axes.set_xlabel("pipeline stage")
    axes.set_ylabel("GB (2^30 bytes) of one rank, at its peak")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    figure.suptitle(_wrapped(layout_in_words(plan.config, plan.dp), 60 if stages < 8 else 110), fontsize=10)
    return figure


def _timeline(plan: MemoryPlan, machine: Machine) -> Any:
    """The schedule that the executor runs with the planner's times; of a long step one with fewer microbatches."""
    from matplotlib.figure import Figure

    config, count = plan.config, num_microbatches(plan.config, plan.dp)
    pp, chunks = config.parallel.pp, config.pipeline.chunks
    drawn = min(count, max(2 * pp, DRAWN // (2 * chunks) // pp * pp))
    timeline = step_timeline(config, drawn, pace_of(config, machine), limit=None)
    assert timeline is not None
    figure = Figure(figsize=(14, 1.9 + min(7.0, 0.42 * pp)), layout="constrained")
    axes = figure.subplots()
    draw_timeline(axes, timeline)
    axes.set_xlim(0, timeline.makespan * 1e3)
    axes.set_xlabel("ms (planned; without the reduction of gradients and the update)")
    axes.spines[["top", "right"]].set_visible(False)
    legend_of(figure, timeline)
    cut = f"; drawn with {drawn} of its {count} microbatches" if drawn < count else f"; {count} microbatches"
    title = f"{layout_in_words(config, plan.dp)}{cut}; stages idle {timeline.bubble:.1%} of it"
    figure.suptitle(_wrapped(title, 130), fontsize=10)
    return figure


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))
