"""Ctrl-C, SIGTERM and SIGKILL to the process that supervises the ranks: none survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.launch.processes import gone


def rank_pids(folder: Path, within: float = 120.0) -> list[int]:
    """The ranks of one world, once both have started."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        names = list(folder.iterdir()) if folder.is_dir() else []
        if len(names) == 2:
            return [int(path.name) for path in names]
        time.sleep(0.02)
    raise AssertionError(f"no two ranks in {folder} within {within} s")


def test_no_rank_survives_its_supervisor(tmp_path):
    command = [sys.executable, "-m", "tests.launch.supervisor", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as supervisor:
        limit = threading.Timer(150, supervisor.kill)  # ends a readline that would wait for ever
        limit.start()
        try:
            assert supervisor.stdout is not None
            ranks = rank_pids(tmp_path / "a")
            os.killpg(supervisor.pid, signal.SIGINT)  # what a terminal does: to the whole foreground group
            name, server = supervisor.stdout.readline().split()
            assert name == "KeyboardInterrupt" and gone(ranks)

            ranks = rank_pids(tmp_path / "b")  # the fork server has survived the Ctrl-C
            supervisor.send_signal(signal.SIGTERM)
            assert supervisor.stdout.readline() == "SystemExit 143\n" and gone(ranks, within=0.5)
            assert {path.read_text() for path in (tmp_path / "b").iterdir()} == {"ended"}, "killed, not asked to end"

            ranks = rank_pids(tmp_path / "c")
            supervisor.kill()
            assert gone([*ranks, int(server)]), "a rank or the fork server outlives its killed supervisor"
        finally:
            limit.cancel()
            supervisor.kill()
