"""From what the ranks reported to the one that is to blame, and the message that says so."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from gpt3d.launch.worker import Worker

SHOWN_LOG_LINES = 15


class RankFailed(RuntimeError):
    """A rank ended the run. The message is complete: print it as it is.

    `rank` is the cause (None when several are merely stuck), `error_type` the class name of its exception, if any.
    """

    show_traceback = False

    def __init__(self, message: str, rank: int | None = None, error_type: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.error_type = error_type


def describe(workers: Sequence[Worker], log_dir: Path | str | None) -> RankFailed:
    """The failure of a world in which at least one rank failed.

    A rank that died without a word (killed, crashed, os._exit) is the cause: its peers then only report lost
    connections. Else it is the rank with the earliest error.
    """
    silent = [w for w in workers if w.outcome is None and w.exit_code is not None]
    told = sorted((w for w in workers if w.outcome is not None and not w.outcome.ok), key=lambda w: w.outcome.time)  # type: ignore[union-attr]
    # abort() is how communication libraries end a process that waits for a dead peer: seldom the first cause
    silent.sort(key=lambda w: w.exit_code == -signal.SIGABRT)
    if silent and not (told and silent[0].exit_code == -signal.SIGABRT):
        cause = silent[0]
        head, detail, error_type = _death(cause), cause.stack() or _last_lines(cause.rank, log_dir), ""
    else:
        cause = told[0]
        assert cause.outcome is not None
        head, detail, error_type = cause.outcome.summary, cause.outcome.traceback, cause.outcome.error_type
    return RankFailed(_message(cause, head, detail, workers, log_dir), cause.rank, error_type)


def describe_hang(workers: Sequence[Worker], timeout: float, log_dir: Path | str | None) -> RankFailed:
    """The failure of a world that did not finish in `timeout` seconds; the stuck ranks have dumped their stacks."""
    stuck = [w for w in workers if w.running]
    lines = [f"no end after {timeout:g} s; still running: {_ranks(stuck)}"]
    for worker in stuck:
        lines += [f"--- Python stack of rank {worker.rank}", worker.stack() or "(it did not answer)"]
    return RankFailed("\n".join(lines + _where(log_dir)), stuck[0].rank if len(stuck) == 1 else None, "Timeout")


def _message(cause: Worker, head: str, detail: str, workers: Sequence[Worker], log_dir: Path | str | None) -> str:
    lines = [f"rank {cause.rank} {head}"]
    if detail and detail not in head:
        lines.append(detail)
    others = [w for w in workers if w.failed and w is not cause]
    if others:
        lines.append(f"({_ranks(others)} failed after it)")
    return "\n".join(lines + _where(log_dir))


def _death(worker: Worker) -> str:
    code = worker.exit_code or 0
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (by a person, a scheduler, or for want of memory)" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{hint}"
    return f"ended without a result or a traceback, exit code {code}"


def _last_lines(rank: int, log_dir: Path | str | None) -> str:
    log = Path(log_dir) / f"rank{rank}.log" if log_dir else None
    if log is None or not log.is_file():
        return ""
    lines = log.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:]
    return "\n".join(["its last lines:", *lines]) if lines else ""


def _ranks(workers: Sequence[Worker]) -> str:
    return ("rank " if len(workers) == 1 else "ranks ") + ", ".join(str(w.rank) for w in workers)


def _where(log_dir: Path | str | None) -> list[str]:
    return [f"logs of the ranks: {log_dir}"] if log_dir else []
