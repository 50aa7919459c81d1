"""Loss against compute over models of several sizes: a power law through the finished jobs of a sweep, and its plot."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpt3d.config.load import load_config
from gpt3d.model.flops import model_flops_per_token, parameter_count
from gpt3d.planner.table import columns
from gpt3d.sweep.jobs import Figures, Job


@dataclass(frozen=True)
class Point:
    """One trained size: `compute` in FLOPs (forward and backward), `loss` on validation in nats a token."""

    parameters: int
    tokens: int
    compute: float
    loss: float


@dataclass(frozen=True)
class PowerLaw:
    """loss = scale x compute^-exponent. `error`: largest relative distance of a point from the curve."""

    scale: float
    exponent: float
    error: float

    def __call__(self, compute: float) -> float:
        return self.scale * compute**-self.exponent


def fit(points: Sequence[Point]) -> PowerLaw:
    """Least squares of log(loss) over log(compute). Needs two different computes.

    Without the irreducible term of Hoffmann et al. 2022: a handful of small models cannot tell it from the exponent.
    """
    x, y = [math.log(p.compute) for p in points], [math.log(p.loss) for p in points]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    law = PowerLaw(math.exp(mean_y - slope * mean_x), -slope, 0.0)
    return PowerLaw(law.scale, law.exponent, max(abs(p.loss / law(p.compute) - 1) for p in points))


def measured(jobs: Sequence[Job], reached: dict[int, Figures]) -> list[Point]:
    """The finished jobs that were validated, smallest compute first."""
    points = []
    for job in jobs:
        figures = reached[job.number]
        if job.status == "done" and figures.validation_loss is not None and figures.tokens:
            config = load_config(Path(job.run_dir) / "config.yaml")
            compute = float(model_flops_per_token(config.model, config.data.seq_len) * figures.tokens)
            points.append(Point(parameter_count(config.model), figures.tokens, compute, figures.validation_loss))
    return sorted(points, key=lambda point: point.compute)


def report(jobs: Sequence[Job], reached: dict[int, Figures], sweep_dir: Path) -> str:
    """The points and the curve as text; `scaling.json` and, with matplotlib, `scaling.png` in the sweep's folder."""
    points = measured(jobs, reached)
    head = ("parameters", "tokens", "tokens/parameter", "FLOPs", "validation loss")
    body = [
        (f"{p.parameters:,}", f"{p.tokens:,}", f"{p.tokens / p.parameters:.1f}", f"{p.compute:.3g}", f"{p.loss:.4f}")
        for p in points
    ]
    if len({point.compute for point in points}) < 2:
        return "scaling no curve: two finished jobs of different compute are needed"
    law = fit(points)
    result = {"points": [asdict(point) for point in points], "fit": asdict(law)}
    (sweep_dir / "scaling.json").write_text(json.dumps(result, indent=2) + "\n")
    lines = [
        "loss against compute",
        *columns([head, *body]),
        f"fit: loss = {law.scale:.4g} x FLOPs^-{law.exponent:.4f}; points within {law.error:.1%} of it",
    ]
    if len(points) < 4:
        lines.append(f"only {len(points)} points: take the exponent as a rough one")
    return "\n".join([*lines, _draw(points, law, sweep_dir / "scaling.png")])


def _draw(points: Sequence[Point], law: PowerLaw, path: Path) -> str:
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: it needs matplotlib, pip install 'gpt3d[plot]'"
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    low, high = points[0].compute, points[-1].compute
    span = [low * (high / low) ** (i / 50) for i in range(51)]
    axes.plot(span, [law(c) for c in span], color="0.6", label=f"{law.scale:.3g} C$^{{-{law.exponent:.3f}}}$")
    axes.scatter([p.compute for p in points], [p.loss for p in points], color="C0", zorder=3)
    for p in points:
        axes.annotate(f"{p.parameters:,}", (p.compute, p.loss), textcoords="offset points", xytext=(6, 6), fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="training compute C [FLOPs]", ylabel="validation loss [nats a token]")
    axes.set_title("Loss against compute; labels: parameters of the model")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(ScalarFormatter())
    axes.margins(x=0.12)  # room for the labels
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path)
    return f"plot    {path}"
