"""Whether processes are gone (a zombie is: it only waits to be counted)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: Iterable[int], within: float = 5.0) -> bool:
    """Wait until none of `pids` lives; False when one still does after `within` seconds."""
    pids = list(pids)
    end = time.monotonic() + within
    while any(alive(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
