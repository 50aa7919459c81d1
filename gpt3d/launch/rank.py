"""What happens inside a rank, however it was started: signals, the one call of the user's function, the end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Outcome:
    """How the body of a rank ended. `time` is the machine-wide monotonic clock, so ranks can be put in order."""

    ok: bool
    value: Any = None
    summary: str = ""
    traceback: str = ""
    error_type: str = ""
    exit_code: int = 0
    time: float = field(default_factory=time.monotonic)


def die_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it dies; elsewhere a watcher thread does it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _terminate(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)  # an exception, so that `finally` blocks close files


def run_body(fn: Callable[..., Any], args: Sequence[Any] = ()) -> Outcome:
    """Call `fn(*args)`; SIGTERM and SIGINT end it as SystemExit(128 + n). Every error becomes an outcome."""
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, _terminate)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # "save now": nothing to save until training has begun
    try:
        return Outcome(ok=True, value=fn(*args))
    except SystemExit as stop:
        return _from_exit(stop)
    except BaseException as error:
        return from_error(error)


def _from_exit(stop: SystemExit) -> Outcome:
    if stop.code in (None, 0):
        return Outcome(ok=True)
    code = stop.code if isinstance(stop.code, int) else 1
    interrupted = {128 + signum: f"was ended by {signum.name}" for signum in (signal.SIGTERM, signal.SIGINT)}
    summary = interrupted.get(code, f"called sys.exit({stop.code!r})")
    return Outcome(ok=False, summary=summary, error_type="SystemExit", exit_code=code)


def from_error(error: BaseException) -> Outcome:
    """The outcome of an exception. `show_traceback = False` on its class (a user's mistake): its text alone."""
    name = type(error).__name__
    first_line, _, text = str(error).partition("\n")
    if getattr(error, "show_traceback", True):
        start = error.__traceback__
        while start is not None and start.tb_next and Path(start.tb_frame.f_code.co_filename).parent == HERE:
            start = start.tb_next  # the launcher's own frames tell nobody anything
        text = "".join(traceback.format_exception(type(error), error, start)).rstrip()
    return Outcome(
        ok=False,
        summary=f"failed with {name}: {first_line}" if first_line else f"failed with {name}",
        traceback=text,
        error_type=name,
        exit_code=1,
    )


def leave(code: int) -> NoReturn:
    """End the process at once, output flushed: the teardown of communicators and threads cannot hang it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
