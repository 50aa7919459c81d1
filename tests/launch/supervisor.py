"""A process that supervises one hanging world after another: `python -m tests.launch.supervisor FOLDER`.

It says on stdout how each ended, so that one start of the fork server serves several signals.
"""

from __future__ import annotations

import signal
import sys
from multiprocessing import forkserver
from pathlib import Path

from gpt3d.launch import run_ranks
from tests.launch.bodies import record_and_sleep


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with it ignored
    folder = Path(sys.argv[1])
    for attempt in ("a", "b", "c"):
        pids = folder / attempt
        pids.mkdir()
        try:
            run_ranks(record_and_sleep, pids, nprocs=2)
        except KeyboardInterrupt:
            print("KeyboardInterrupt", forkserver._forkserver._forkserver_pid, flush=True)  # type: ignore[attr-defined]
        except SystemExit as stop:
            print("SystemExit", stop.code, flush=True)


if __name__ == "__main__":
    main()
