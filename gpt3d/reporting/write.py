"""Write the report: one HTML file, and its curves as a PNG beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gpt3d.reporting.curves import charts
from gpt3d.reporting.draw import png
from gpt3d.reporting.page import GENERATOR, page
from gpt3d.reporting.read import ReportError, read_runs


def write_report(folders: Sequence[Path], to: Path, pictures: bool = True) -> list[Path]:
    """The files written; without matplotlib only the page.

    Raises ReportError for a folder without a run, or when `to` is another file; OSError where nothing can be written.
    """
    if to.exists() and (to.is_dir() or GENERATOR not in to.read_text(errors="replace")[:500]):
        raise ReportError(f"{to} is there already and is no report of gpt3d; name another file (--to FILE)")
    runs = read_runs(list(folders))
    part = to.with_name(f".{to.name}.part")  # a reader never sees half a page
    part.write_text(page(runs), encoding="utf-8")
    os.replace(part, to)
    written, found = [to], charts(runs)
    if pictures and found:
        try:
            png(found, runs[0].label if len(runs) == 1 else f"{len(runs)} runs", to.with_suffix(".png"))
            written.append(to.with_suffix(".png"))
        except ModuleNotFoundError:
            pass
    return written
