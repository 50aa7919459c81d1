"""The page: one HTML file with everything in it, no script, nothing fetched. All text of a run is escaped."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path
from typing import Any

from gpt3d.reporting.compare import as_yaml, differing_settings, result_rows
from gpt3d.reporting.curves import Chart, charts
from gpt3d.reporting.draw import COLORS, GENERATOR, svg
from gpt3d.reporting.facts import Fact, facts, history, memory_rows, samples, step_split
from gpt3d.reporting.read import Run


def page(runs: list[Run]) -> str:
    """The whole report; with several runs what differs between them comes first."""
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    body = _one(runs[0]) if len(runs) == 1 else _several(runs)
    style = (Path(__file__).parent / "style.css").read_text()
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="{GENERATOR}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _one(run: Run) -> str:
    about = facts(run)
    return "\n".join(
        [
            f"<h1>{escape(run.label)}</h1>",
            _status(run),
            _problems([run]),
            _tiles(about.results),
            _section("What was run", _pairs(about.settings)),
            _section("Curves", _charts(charts([run]))),
            _details(run),
            _section("Settings", _all_settings(run)),
        ]
    )


def _several(runs: list[Run]) -> str:
    heads = ["", *(f"{_key(i)}{escape(run.label)}" for i, run in enumerate(runs))]
    different = differing_settings(runs)
    settings = _table(heads, different) if different else "<p>The settings are the same.</p>"
    parts = [
        f"<h1>{len(runs)} runs</h1>",
        _problems(runs),
        _section("Settings that differ", settings),
        _section("Results", _table(heads, result_rows(runs))),
        _section("Curves", _charts(charts(runs))),
    ]
    for i, run in enumerate(runs):
        inside = _status(run) + _pairs(facts(run).settings) + _details(run) + _all_settings(run)
        parts.append(f"<details><summary><b>{_key(i)}{escape(run.label)}</b></summary>{inside}</details>")
    return "\n".join(parts)


def _details(run: Run) -> str:
    """The parts of the page about one run that are no curves."""
    split = step_split(run)
    colors = [f"var(--run-{i})" for i in (7, 0, 4, 2, 3)] + ["var(--line)"]
    pieces = "".join(f'<span style="width:{share:.2%};background:{color}"></span>'
                     for (_, share), color in zip(split, colors, strict=False))  # fmt: skip
    legend = "".join(f'<span><i class="key" style="background:{color}"></i>{escape(name)} {share:.1%}</span>'
                     for (name, share), color in zip(split, colors, strict=False))  # fmt: skip
    rows, note = memory_rows(run)
    text = "".join(f"<p class=soft>after step {s.step}</p><pre>{escape(s.text)}</pre>" for s in samples(run))
    picture = base64.b64encode(run.timeline).decode()
    image = f'<img alt="measured and ideal timeline of the pipeline" src="data:image/svg+xml;base64,{picture}">'
    no_picture = "<p class=soft>None was recorded; trainer.timeline=true draws one.</p>"
    return "\n".join(
        [
            _section("Where a step's time goes", f'<div class="split">{pieces}</div><div class="legend">{legend}</div>')
            if split
            else "",
            _section("Memory by stage, against the plan", _memory(rows) + f"<p class=soft>{escape(note)}</p>"),
            _section("Pipeline timeline", image if run.timeline else no_picture)
            if (run.setting("parallel.pp") or 1) > 1 or run.timeline
            else "",
            _section("Restarts and skipped steps", _table(["time (UTC)", "step", ""], history(run))),
            _section("Samples", text or "<p class=soft>None; trainer.sample_tokens asks for one at the end.</p>"),
        ]
    )


def _section(title: str, inside: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{inside}"


def _status(run: Run) -> str:
    words, good = run.status
    color = {True: "good", False: "bad", None: "soft"}[good]
    return f'<p><span class="{color}">{escape(words)}</span> <span class="soft">{escape(str(run.folder))}</span></p>'


def _problems(runs: list[Run]) -> str:
    found = [f"{run.label}: {problem}" if len(runs) > 1 else problem for run in runs for problem in run.problems]
    items = "".join(f"<li>{escape(problem)}</li>" for problem in found)
    return f'<div class="problems"><b>This report is not complete</b><ul>{items}</ul></div>' if found else ""


def _tiles(results: list[Fact]) -> str:
    tiles = (f'<div class="tile"><span class="soft">{escape(f.name)}</span><b>{escape(f.value)}</b></div>'
             for f in results)  # fmt: skip
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _pairs(rows: list[Fact]) -> str:
    return _table([], [[fact.name, fact.value] for fact in rows])


def _table(heads: list[str], rows: list[list[str]]) -> str:
    """`heads` are HTML, `rows` are text; the first cell of a row names it."""
    if not rows:
        return "<p class=soft>Nothing to show.</p>"
    head = "<thead><tr>" + "".join(f"<th>{h}</th>" for h in heads) + "</tr></thead>" if heads else ""
    body = "".join(f"<tr><th>{escape(first)}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in rest) + "</tr>"
                   for first, *rest in rows)  # fmt: skip
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _memory(rows: list[tuple[str, float, float | None]]) -> str:
    """Stage, measured and planned GB."""
    if not rows:
        return "<p class=soft>No memory was logged.</p>"
    most = max(max(measured, planned or 0.0) for _, measured, planned in rows) or 1.0
    cells = []
    for name, measured, planned in rows:
        plan = "n/a" if planned is None else f"{planned:.2f}"
        bar = f'<div class="bar"><i style="width:{measured / most:.1%}"></i></div>'
        cells.append(f'<tr><th>{escape(name)}</th><td class="n">{measured:.2f}</td><td class="n">{plan}</td>'
                     f'<td class="wide">{bar}</td></tr>')  # fmt: skip
    head = "<thead><tr><th></th><th class=n>peak, GB</th><th class=n>plan, GB</th><th></th></tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{"".join(cells)}</tbody></table></div>'


def _charts(found: list[Chart]) -> str:
    if not found:
        return "<p class=soft>There are no curves yet: fewer than two lines were logged.</p>"
    return '<div class="charts">' + "".join(map(_chart, found)) + "</div>"


def _chart(chart: Chart) -> str:
    unit = f' <span class="soft">{escape(chart.y)}</span>' if chart.y else ""
    legend = "".join(f"<span>{_key(c.run, c.dashed)}{escape(c.name)}</span>" for c in chart.curves if c.points)
    shown = f'<div class="legend">{legend}</div>' if len(chart.curves) > 1 else ""
    return f'<div class="chart"><h3>{escape(chart.title)}{unit}</h3>{svg(chart)}{shown}</div>'


def _key(run: int, dashed: bool = False) -> str:
    color = f"var(--run-{run % len(COLORS)})"
    return f'<i class="key dashed" style="color:{color}"></i>' if dashed else (
        f'<i class="key" style="background:{color}"></i>')  # fmt: skip


def _all_settings(run: Run) -> str:
    def lines(value: Any, indent: str = "") -> list[str]:
        if not isinstance(value, dict) or not value:
            return [as_yaml(value)]
        found = []
        for key, inner in value.items():
            if isinstance(inner, dict) and inner:
                found += [f"{indent}{key}:", *lines(inner, indent + "  ")]
            else:
                found.append(f"{indent}{key}: {as_yaml(inner)}")
        return found

    blocks = [("config.yaml", run.config), ("environment.json", run.environment)]
    shown = "".join(f"<details><summary>{name}</summary><pre>{escape(chr(10).join(lines(value)))}</pre></details>"
                    for name, value in blocks if value)  # fmt: skip
    return (f"<pre>{escape(run.command)}</pre>" if run.command else "") + shown
