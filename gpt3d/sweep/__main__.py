"""`python -m gpt3d.sweep FOLDER`: write a sweep's table again, for instance after its process was killed."""

from __future__ import annotations

import sys
from pathlib import Path

from gpt3d.config.ending import end_with_reader
from gpt3d.sweep.end import finish
from gpt3d.sweep.jobs import JOBS


def main() -> None:
    """The command."""
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit("usage: python -m gpt3d.sweep FOLDER   (the folder of a sweep: outputs/multirun/...)")
    folder = Path(sys.argv[1]).absolute()
    if not (folder / JOBS / "sweep.about").is_file():
        sys.exit(f"gpt3d: {folder} is not the folder of a sweep: it has no {JOBS}/sweep.about")
    print(finish(folder))


if __name__ == "__main__":
    end_with_reader()
    main()
