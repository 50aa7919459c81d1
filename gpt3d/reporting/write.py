"""Write the report: one HTML file, and its curves as a PNG beside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from gpt3d.reporting.curves import charts
from gpt3d.reporting.draw import GENERATOR, png
from gpt3d.reporting.page import page
from gpt3d.reporting.read import ReportError, read_runs


def write_report(folders: Sequence[Path], to: Path, pictures: bool = True) -> list[Path]:
    """The files written; without matplotlib only the page.

    Raises ReportError for a folder without a run, or when `to` or its picture is another file; OSError where nothing
    can be written.
    """
    picture = to.with_suffix(".png") if to.name else to
    if picture == to:
        raise ReportError(f"--to {to}: a file for a page of HTML is wanted, such as comparison.html")
    for path in (to, picture) if pictures else (to,):
        _keep_others(path)
    runs = read_runs(list(folders))
    part = to.with_name(f".{to.name}.part")  # a reader never sees half a page
    part.write_text(page(runs), encoding="utf-8")
    os.replace(part, to)
    written, found = [to], charts(runs)
    if pictures and found:
        with contextlib.suppress(ModuleNotFoundError):
            png(found, runs[0].label if len(runs) == 1 else f"{len(runs)} runs", picture)
            written.append(picture)
    return written


def _keep_others(path: Path) -> None:
    """Raise ReportError for a file that no report has written."""
    if path.is_dir() or (path.exists() and GENERATOR.encode() not in path.read_bytes()[:500]):
        raise ReportError(f"{path} is there already and is no report of gpt3d; name another file (--to FILE)")
