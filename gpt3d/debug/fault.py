"""Faults on request, to see how a run ends: `debug.fault=error|kill|hang` on one rank at one step."""

from __future__ import annotations

import os
import signal
import time

from gpt3d.config.schema import DebugConfig


def inject_fault(debug: DebugConfig, rank: int, step: int) -> None:
    """Fail now if the config asks for it on this rank at this step."""
    if debug.fault == "none" or rank != debug.fault_rank or step != debug.fault_step:
        return
    if debug.fault == "error":
        raise RuntimeError(f"debug.fault=error on rank {rank} at step {step}")
    if debug.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(1.0)
