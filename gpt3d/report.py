"""What a run did, as one page: `python -m gpt3d.report RUN [RUN ...] [--to FILE]`. Needs no GPU and no torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpt3d.config.ending import end_with_reader
from gpt3d.reporting.read import ReportError
from gpt3d.reporting.write import write_report

HELP = """
Write one HTML page (nothing is fetched, it can be mailed) and, with matplotlib, a PNG of its curves, from the folders
of the runs alone. Several runs are laid side by side: settings that differ first, then results, curves overlaid.
"""


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m gpt3d.report", description=HELP)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run")
    parser.add_argument(
        "--to", metavar="FILE", type=Path, help="default: report.html in the run; of several, comparison.html"
    )
    chosen = parser.parse_args(argv)
    to = chosen.to or (chosen.runs[0] / "report.html" if len(chosen.runs) == 1 else Path("comparison.html"))
    try:
        if to.parent.is_dir() or chosen.to is None:
            print("\n".join(map(str, write_report(chosen.runs, to))))
        else:
            raise ReportError(f"--to {to}: there is no folder {to.parent}")
    except ReportError as error:
        sys.exit(f"gpt3d: {error}")
    except OSError as error:
        sys.exit(f"gpt3d: {to} cannot be written: {error.strerror}")


if __name__ == "__main__":
    end_with_reader()
    main()
