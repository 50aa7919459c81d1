"""What the charts of a report show: curves of each run, by tokens, time or layer. Drawn as SVG and as PNG alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpt3d.reporting.read import Line, Run, is_number

MOST_POINTS = 400
UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


class Curve(NamedTuple):
    """Points (x, y) in order; `run` numbers the run, which has one colour in all charts."""

    run: int
    name: str
    points: list[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """One picture; `from_zero`: the y axis begins at 0."""

    title: str
    x: str
    y: str
    curves: list[Curve]
    from_zero: bool = False


def charts(runs: list[Run]) -> list[Chart]:
    """Those that have something to show."""
    tokens: Callable[[Run, Line], Any] = lambda run, line: line["step"] * _tokens_a_step(run)  # noqa: E731
    longest = max((_seconds(run, line) or 0.0 for run in runs for line in run.lines[-1:]), default=0.0)
    unit, seconds = next((u, s) for u, s in UNITS if longest >= 2 * s or s == 1)
    time: Callable[[Run, Line], Any] = lambda run, line: (  # noqa: E731
        None if (passed := _seconds(run, line)) is None else passed / seconds
    )
    found = [
        Chart("Loss by tokens", "tokens", "nats per token", _losses(runs, tokens)),
        Chart("Loss by time", unit, "nats per token", _losses(runs, time)),
        Chart("Throughput", "tokens", "tokens/s", _metric(runs, "tokens_per_s"), True),
        Chart("MFU", "tokens", "share of peak", _metric(runs, "mfu"), True),
        Chart("Gradient norm", "tokens", "L2 norm before clipping", _metric(runs, "grad_norm"), True),
        Chart("Learning rate", "tokens", "", _metric(runs, "lr"), True),
        Chart("Pipeline bubble", "tokens", "idle share", _metric(runs, "pipeline_bubble"), True),
        Chart("Memory, highest on any rank", "tokens", "GB", _metric(runs, "memory_gb"), True),
        Chart("Gradient norm by layer, last reading", "layer", "L2 norm", _by_layer(runs, "gradient_norm"), True),
        Chart("Activations by layer, last reading", "layer", "RMS", _by_layer(runs, "activation_rms"), True),
    ]
    return [chart for chart in found if any(len(curve.points) > 1 for curve in chart.curves)]


def _tokens_a_step(run: Run) -> float:
    """Global batch times sequence length; without a readable configuration what the lines tell."""
    batch, length = run.setting("trainer.global_batch_size"), run.setting("data.seq_len")
    if is_number(batch) and is_number(length):
        return float(batch * length)
    line = next((line for line in reversed(run.with_key("tokens")) if line["step"]), None)
    return line["tokens"] / line["step"] if line else 1.0


def _seconds(run: Run, line: Line) -> float | None:
    """Since the first start, breaks between restarts included."""
    begun = next((entry["time"] for entry in (*run.events, *run.lines) if is_number(entry.get("time"))), None)
    return line["time"] - begun if is_number(line.get("time")) and begun is not None else None


def _losses(runs: list[Run], x: Callable[[Run, Line], Any]) -> list[Curve]:
    curves = []
    for number, run in enumerate(runs):
        for name, key, dashed in (("training", "loss", False), ("validation", "validation_loss", True)):
            points = [(x(run, line), line[key]) for line in run.with_key(key)]
            curves.append(Curve(number, f"{run.label}, {name}" if len(runs) > 1 else name, thin(points), dashed))
    return curves


def _metric(runs: list[Run], key: str) -> list[Curve]:
    return [
        Curve(i, run.label, thin([(line["step"] * _tokens_a_step(run), line[key]) for line in run.with_key(key)]))
        for i, run in enumerate(runs)
    ]


def _by_layer(runs: list[Run], stem: str) -> list[Curve]:
    curves = []
    for number, run in enumerate(runs):
        lines = run.with_key(f"{stem}_layer_0")
        layers = [lines[-1].get(f"{stem}_layer_{i}") for i in range(len(lines[-1]))] if lines else []
        curves.append(Curve(number, run.label, thin(list(enumerate(layers)))))
    return curves


def thin(points: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS, each the mean of neighbours, the last one kept; points without both numbers are left out."""
    good = [(float(x), float(y)) for x, y in points if is_number(x) and is_number(y)]
    if len(good) <= MOST_POINTS:
        return good
    edges = [i * len(good) // MOST_POINTS for i in range(MOST_POINTS + 1)]
    groups = [good[a:b] for a, b in itertools.pairwise(edges)]
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return [*means[:-1], good[-1]]
