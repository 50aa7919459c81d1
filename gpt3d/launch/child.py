"""Entry of a rank that `gpt3d.launch.local` starts: from a bare process to the user's function and out again."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from gpt3d.launch.preload import prepare_deepspeed
from gpt3d.launch.rank import Outcome, die_with_parent, from_error, leave, run_body


@dataclass(frozen=True)
class Task:
    """What the supervisor hands to a rank. `body` is the pickled (function, arguments)."""

    body: bytes
    env: dict[str, str]
    device: str
    log: str | None


def main(task: Task, report: Connection, stacks: Connection) -> None:
    """Run the task, send its outcome, and wait for the supervisor's leave: no rank goes while a peer still talks."""
    with contextlib.suppress(OSError):
        os.setsid()
    die_with_parent()
    gc.freeze()  # the imported modules stay for ever: no collection needs to look at them
    threading.Thread(target=_die_with_supervisor, name="supervisor-watch", daemon=True).start()
    os.environ.clear()
    os.environ.update(task.env)
    if task.log is not None:
        _redirect_output(task.log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(stacks.fileno())
    faulthandler.register(signal.SIGUSR2, stacks.fileno(), all_threads=True)

    outcome = _run(task)
    try:
        message = pickle.dumps(outcome)
    except Exception as error:
        outcome = from_error(error)
        message = pickle.dumps(outcome)
    if task.log is not None and not outcome.ok:
        print(f"{outcome.summary}\n{outcome.traceback}".rstrip(), file=sys.stderr)
    with contextlib.suppress(OSError):
        report.send_bytes(message)
        if outcome.ok:
            report.poll(None)  # the supervisor closes its end when all ranks have reported
    leave(outcome.exit_code)


def _run(task: Task) -> Outcome:
    def body() -> Any:
        prepare_deepspeed(task.device)
        import torch

        threads = task.env["OMP_NUM_THREADS"].partition(",")[0].strip()  # "4,2": of nested regions, too
        if threads.isdigit() and int(threads) > 0:  # OpenMP passes over what it can't read
            torch.set_num_threads(int(threads))  # a fork does not read the variable again
        fn: Callable[..., Any]
        fn, args = pickle.loads(task.body)
        return fn(*args)

    return run_body(body)


def _die_with_supervisor() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.killpg(os.getpgrp(), signal.SIGKILL)  # with this rank's own workers


def _redirect_output(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
