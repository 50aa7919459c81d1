"""A measured timeline beside the ideal one: a picture (PNG and SVG), a Chrome trace, and the bubble in words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt3d.pipeline.schedule import Kind
from gpt3d.pipeline.simulate import Timeline, ideal_of

COLORS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#f58518",
    Kind.BACKWARD_INPUT: "#e45756",
    Kind.BACKWARD_WEIGHT: "#54a24b",
}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
}
MAX_LABELS = 64  # actions a rank up to which microbatch numbers are readable


def bubble_in_words(steps: Sequence[Timeline], chunks: int) -> str:
    """The measured bubble of the last step, and what the schedule alone would leave."""
    measured, ideal = steps[-1], ideal_of(steps[-1], chunks)
    return (
        f"pipeline bubble {measured.bubble:.1%} measured, {ideal.bubble:.1%} ideal for these stage times; "
        f"{measured.makespan * 1e3:.1f} ms, {ideal.makespan * 1e3:.1f} ms ideal"
    )


def write_timelines(steps: Sequence[Timeline], chunks: int, title: str, folder: Path) -> list[Path]:
    """Write timeline.png, timeline.svg (the last step, measured and ideal) and timeline.json (all steps) to `folder`.

    Raises ModuleNotFoundError without matplotlib (`pip install gpt3d[plot]`).
    """
    trace = folder / "timeline.json"
    trace.write_text(json.dumps(chrome_trace(steps)))
    figure = _figure(steps[-1], ideal_of(steps[-1], chunks), title)
    pictures = [folder / "timeline.png", folder / "timeline.svg"]
    for path in pictures:
        figure.savefig(path, dpi=150)
    return [*pictures, trace]


def chrome_trace(steps: Sequence[Timeline]) -> dict[str, Any]:
    """For chrome://tracing or ui.perfetto.dev: one row a pipeline rank, one step after the other, times in us."""
    events: list[dict[str, Any]] = []
    offset = 0.0
    for number, step in enumerate(steps):
        for rank, spans in enumerate(step.ranks):
            for span in spans:
                action = span.action
                events.append(
                    {
                        "name": f"{NAMES[action.kind]} {action.microbatch}",
                        "cat": NAMES[action.kind],
                        "ph": "X",
                        "ts": (offset + span.start - step.start) * 1e6,
                        "dur": (span.end - span.start) * 1e6,
                        "pid": 0,
                        "tid": rank,
                        "args": {"step": number, "microbatch": action.microbatch, "chunk": action.chunk},
                    }
                )
        offset += step.makespan
    ranks = len(steps[0].ranks) if steps else 0
    rows = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"pipeline rank {rank}"}}
        for rank in range(ranks)
    ]
    return {"displayTimeUnit": "ms", "traceEvents": rows + events}


def _figure(measured: Timeline, ideal: Timeline, title: str) -> Any:
    """Two panels on one time axis [ms]; a lighter shade is a higher chunk."""
    from matplotlib.figure import Figure

    ranks = len(measured.ranks)
    figure = Figure(figsize=(14, 2.2 + 0.9 * ranks), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, timeline, name in zip(panels, (measured, ideal), ("measured", "ideal"), strict=True):
        draw_timeline(axes, timeline)
        axes.set_title(
            f"{name}: bubble {timeline.bubble:.1%}, {timeline.makespan * 1e3:.1f} ms", loc="left", fontsize=10
        )
    panels[1].set_xlabel("ms")
    panels[1].set_xlim(0, max(measured.makespan, ideal.makespan) * 1e3)
    legend_of(figure, measured)
    figure.suptitle(title, fontsize=11)
    return figure


def legend_of(figure: Any, timeline: Timeline) -> None:
    """What the colors of this timeline mean, at the right of the figure."""
    from matplotlib.patches import Patch

    used = {span.action.kind for spans in timeline.ranks for span in spans}
    handles = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in Kind if kind in used]
    figure.legend(handles=handles, loc="outside right upper", frameon=False)


def draw_timeline(axes: Any, timeline: Timeline) -> None:
    """Bars of one timeline [ms], a row a stage; a lighter shade is a higher chunk."""
    for rank, spans in enumerate(timeline.ranks):
        bars: dict[tuple[Kind, int], list[tuple[float, float]]] = {}
        few = len(spans) <= MAX_LABELS
        for span in spans:
            start, width = (span.start - timeline.start) * 1e3, (span.end - span.start) * 1e3
            bars.setdefault((span.action.kind, span.action.chunk), []).append((start, width))
            if few and width > 0.009e3 * timeline.makespan:  # room for two digits
                label = str(span.action.microbatch)
                axes.text(start + width / 2, rank, label, ha="center", va="center", fontsize=7, color="white")
        for (kind, chunk), boxes in bars.items():
            shade = max(0.4, 1.0 - 0.25 * chunk)
            axes.broken_barh(
                boxes,
                (rank - 0.4, 0.8),
                color=COLORS[kind],
                alpha=shade,
                edgecolor="white",
                linewidth=0.8 if few else 0.2,
            )
    axes.set_yticks(range(len(timeline.ranks)), [f"stage {rank}" for rank in range(len(timeline.ranks))])
    axes.set_ylim(len(timeline.ranks) - 0.5, -0.5)
