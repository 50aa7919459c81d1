"""Charts as SVG for the page (its style sheet colours them) and as one PNG."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from gpt3d.reporting.curves import Chart, Curve

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999999")  # Okabe and Ito
GENERATOR = "gpt3d report"  # stands in page and picture, by which they are known again
WIDTH, HEIGHT = 480, 290
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 10, 42


def svg(chart: Chart) -> str:
    """One chart; the colour of run i is the style sheet's `--run-i`."""
    x_ticks, y_ticks = _axes(chart)
    (x0, x1), (y0, y1) = _range(chart), (y_ticks[0], y_ticks[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">']
    for y in y_ticks:
        _, v = at(x0, y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{v:.1f}" y2="{v:.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{v + 5:.1f}" text-anchor="end">{number(y)}</text>')
    for x in (x for x in x_ticks if x <= x1):
        u, _ = at(x, y0)
        anchor = "end" if u > WIDTH - 30 else "middle"
        parts.append(f'<text x="{u:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="{anchor}">{number(x)}</text>')
    parts.append(f'<text class="axis" x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 5}" text-anchor="middle">'
                 f"{escape(chart.x)}</text>")  # fmt: skip
    for curve in chart.curves:
        path = " ".join(f"{u:.1f},{v:.1f}" for u, v in (at(*point) for point in curve.points))
        dash = ' stroke-dasharray="6 4"' if curve.dashed else ""
        color = f"var(--run-{curve.run % len(COLORS)})"
        parts.append(f'<polyline class="curve" style="stroke:{color}"{dash} points="{path}">'
                     f"<title>{escape(curve.name)}</title></polyline>")  # fmt: skip
        if len(curve.points) == 1:  # a line of one point is not seen
            u, v = at(*curve.points[0])
            parts.append(f'<circle style="fill:{color}" cx="{u:.1f}" cy="{v:.1f}" r="4">'
                         f"<title>{escape(curve.name)}</title></circle>")  # fmt: skip
    return "".join([*parts, "</svg>"])


def png(charts: list[Chart], title: str, path: Path) -> None:
    """All charts in one picture. Raises ModuleNotFoundError without matplotlib (`pip install gpt3d[plot]`)."""
    from matplotlib.figure import Figure

    columns = min(2, max(1, len(charts)))
    rows = max(1, -(-len(charts) // columns))
    figure = Figure(figsize=(6.4 * columns, 3.8 * rows))
    figure.suptitle(title.replace("$", r"\$"))
    figure.subplots_adjust(0.09, 0.5 / (3.8 * rows), 0.98, 1 - 0.8 / (3.8 * rows), 0.22, 0.4)  # "constrained" is slow
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for chart, axes in zip(charts, places, strict=False):
        for curve in (curve for curve in chart.curves if curve.points):
            _plot(axes, curve)
        axes.set(title=chart.title, xlabel=chart.x, ylabel=chart.y)
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_formatter(lambda value, _: number(value))
        axes.yaxis.set_major_formatter(lambda value, _: number(value))
        if chart.from_zero:
            axes.set_ylim(0, 1.05 * max(y for curve in chart.curves for _, y in curve.points) or 1)
        if len(chart.curves) > 1:
            axes.legend(fontsize=8)
    for axes in places[len(charts) :]:
        axes.remove()
    figure.savefig(path, dpi=100, metadata={"Software": GENERATOR})


def _plot(axes, curve: Curve) -> None:  # type: ignore[no-untyped-def]
    xs, ys = [x for x, _ in curve.points], [y for _, y in curve.points]
    label = curve.name.replace("$", r"\$").lstrip("_")
    line = "o" if len(xs) == 1 else "--" if curve.dashed else "-"
    axes.plot(xs, ys, line, color=COLORS[curve.run % len(COLORS)], label=label, lw=1.4)


def _range(chart: Chart) -> tuple[float, float]:
    """The x axis: from 0 to where the curves end."""
    most = max(x for curve in chart.curves for x, _ in curve.points)
    return 0.0, most if most > 0 else 1.0


def _axes(chart: Chart) -> tuple[list[float], list[float]]:
    points = [point for curve in chart.curves for point in curve.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return ticks(0.0, max(xs), 5), ticks(0.0 if chart.from_zero else min(ys), max(ys), 5)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers in equal steps that span [low, high], at least two."""
    if not high > low:
        low, high = low - (abs(low) / 10 or 1.0), high + (abs(high) / 10 or 1.0)
    rough = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """For an axis: 1.5M, 20k, 0.25, 3e-4."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    if value and abs(value) < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.4g}"
