"""The supervisor's view of one rank: its process, what it reported, and how it died."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from gpt3d.launch import child
from gpt3d.launch.rank import Outcome


@dataclass
class Worker:
    """One started rank. Until it has reported (`outcome`) or died (`exit_code`) it is running."""

    rank: int
    process: BaseProcess
    report: Connection
    stacks: Connection
    outcome: Outcome | None = None
    exit_code: int | None = None

    @classmethod
    def start(cls, context: Any, rank: int, task: child.Task) -> Worker:
        """Start the process of a rank; `context` is a multiprocessing context."""
        report, report_end = context.Pipe(duplex=True)
        stacks, stacks_end = context.Pipe(duplex=False)
        process = context.Process(target=child.main, args=(task, report_end, stacks_end), name=f"rank{rank}")
        try:
            process.start()
        finally:
            report_end.close()
            stacks_end.close()
        return cls(rank, process, report, stacks)

    @property
    def running(self) -> bool:
        return self.outcome is None and self.exit_code is None

    @property
    def failed(self) -> bool:
        return self.exit_code is not None or (self.outcome is not None and not self.outcome.ok)

    def poll(self) -> None:
        """Take the rank's report, or its exit code when it died without one."""
        died = self.process.exitcode is not None  # asked first: a report sent before the death is then seen below
        if self.report.poll():
            try:
                self.outcome = pickle.loads(self.report.recv_bytes())
                return
            except (EOFError, OSError):
                self.process.join(5)
                died = True
        if died:
            self.exit_code = self.process.exitcode if self.process.exitcode is not None else 1

    def stack(self) -> str:
        """What faulthandler wrote: the Python stacks at a fatal signal or after `ask_stack`."""
        text = b""
        with contextlib.suppress(OSError):
            while self.stacks.poll():
                part = os.read(self.stacks.fileno(), 65536)
                if not part:
                    break
                text += part
        return text.decode(errors="replace").strip()

    def ask_stack(self) -> None:
        """Have the rank dump its stacks; give it a moment, then read `stack()`."""
        self.send(signal.SIGUSR2)

    def terminate(self) -> None:
        """Ask the rank to end (SIGTERM)."""
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """End the rank and the processes it started (its session), dead or alive."""
        self.send(signal.SIGKILL)
        with contextlib.suppress(OSError):
            if self.process.pid is not None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def wait(self, end: float) -> bool:
        """Wait until the monotonic time `end` for the process to be gone."""
        self.process.join(max(0.0, end - time.monotonic()))
        return self.process.exitcode is not None

    def send(self, signum: int) -> None:
        """Send a signal, if the process is still there."""
        if self.process.exitcode is None and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signum)
