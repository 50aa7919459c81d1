"""Start N ranks on this machine, watch over them, and end them all when one fails or the user says so.

On CPU each rank is a fork of a server that has imported torch and DeepSpeed once, so a world of ranks starts in
milliseconds: training and tests use the same call. On CUDA each rank is a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

from gpt3d.launch import child
from gpt3d.launch.failure import RankFailed, describe, describe_hang
from gpt3d.launch.interrupts import Interrupts, interrupts_raise, passed_on
from gpt3d.launch.worker import Worker

SETTLE_SECONDS = 1.0  # after the first failure: time for the others to report, so that the cause can be told
GRACE_SECONDS = 5.0  # between the request to end and SIGKILL, for ranks that have nothing to save
FAILURE_GRACE_SECONDS = 2.0  # the peers of a failed rank have nothing left to save
STACK_DUMP_SECONDS = 0.5
POLL_SECONDS = 0.2  # a rank whose own workers hold its pipe open is noticed dead this late

_preloaded = ["gpt3d.launch.forkserver", "gpt3d.launch.child"]


def run_ranks(
    fn: Callable[..., Any],
    *args: Any,
    nprocs: int,
    device: str = "cpu",
    timeout: float | None = None,
    grace: float = GRACE_SECONDS,
    log_dir: Path | str | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `fn(*args)` on `nprocs` fresh ranks of this machine; returns their results in rank order.

    `fn` is importable (a top-level function); the ranks see torchrun's variables, this process's environment and `env`.
    Rank 0 writes to this terminal, the others to `log_dir/rankN.log` (to the terminal without a `log_dir`).
    Raises RankFailed, with the traceback of the rank that caused it, when one fails or `timeout` seconds pass. Ctrl-C
    raises KeyboardInterrupt, SIGTERM and SIGHUP raise SystemExit(128 + n), after SIGTERM, `grace` seconds and SIGKILL.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: ranks run on 'cpu' or 'cuda'")
    body = _pickle_body(fn, args)
    if log_dir is not None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
    workers: list[Worker] = []
    with interrupts_raise() as interrupts:
        try:
            context = _context(device)
            store = _host_store()  # held here: no rank's death takes it along, and its port cannot be lost
            with contextlib.nullcontext() if _lives_in_main(fn) else _hidden_main():
                for rank in range(nprocs):
                    log = str(Path(log_dir) / f"rank{rank}.log") if log_dir is not None and rank else None
                    variables = _variables(rank, nprocs, store.port, device, env)
                    workers.append(Worker.start(context, rank, child.Task(body, variables, device, log)))
            with passed_on(signal.SIGUSR1, workers):
                failure = _supervise(workers, timeout, log_dir)
            if failure is not None:
                grace = min(grace, FAILURE_GRACE_SECONDS)
                raise failure
        except (KeyboardInterrupt, SystemExit):
            if grace > GRACE_SECONDS:
                with contextlib.suppress(OSError):  # perhaps the terminal's end is the reason
                    print(
                        f"gpt3d: the ranks may save, for up to {grace:g} s; a further signal ends them at once",
                        flush=True,
                    )
            raise
        finally:
            interrupts.ending = True
            _end(workers, grace, interrupts)
    return [worker.outcome.value for worker in workers if worker.outcome is not None]


def start(
    rank_main: Callable[[dict[str, Any]], Any],
    config: dict[str, Any],
    *,
    nprocs: int,
    device: str,
    run_dir: Path | str,
    grace: float = GRACE_SECONDS,
) -> Any:
    """Train: `rank_main(config)` on `nprocs` local ranks, logs in `run_dir/logs`; returns the result of rank 0."""
    extra, logs = config.get("cluster", {}).get("env", {}), Path(run_dir) / "logs"
    return run_ranks(rank_main, config, nprocs=nprocs, device=device, grace=grace, log_dir=logs, env=extra)[0]


def preload(*modules: str) -> None:
    """Start the CPU ranks' server now, in the background; it imports `modules` besides torch and DeepSpeed."""
    _preloaded.extend(modules)
    _context("cpu")


def _pickle_body(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(
            (fn, args)
        )  # not multiprocessing's pickler: it would share tensors by a file of this process
    except Exception as error:
        raise TypeError(
            f"a rank cannot receive {fn!r} with these arguments ({error}): "
            "the function must stand at the top level of an importable module, and the arguments must pickle"
        ) from None


def _context(device: str) -> Any:
    """The multiprocessing context; for CPU with its fork server running (perhaps still importing)."""
    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("spawn", force=True)  # a worker of joblib names one that no rank knows
    if device == "cuda":
        return multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    from multiprocessing.forkserver import ensure_running

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    # The server does not take over sys.path (CPython issue 117378), and must own no OpenMP thread when it forks.
    with _environment(PYTHONPATH=os.pathsep.join(p for p in sys.path if p), OMP_NUM_THREADS="1"), _hidden_main():
        ensure_running()
    return context


def _host_store() -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


def _variables(rank: int, nprocs: int, port: int, device: str, extra: Mapping[str, str] | None) -> dict[str, str]:
    """The whole environment of a rank: this process's, `extra` on top, and what torchrun would set."""
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nprocs)))
    if device == "cpu" and any(name == "lo" for _, name in socket.if_nameindex()):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would look this machine's name up, which can fail
    env.update(extra or {})
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(nprocs),
        LOCAL_WORLD_SIZE=str(nprocs),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # env:// connects to our store, rank 0 hosts none
    )
    return env


def _supervise(workers: Sequence[Worker], timeout: float | None, log_dir: Path | str | None) -> RankFailed | None:
    """Wait until all ranks have reported success (None), one has failed, or the time is over."""
    end = time.monotonic() + timeout if timeout is not None else float("inf")
    settled = float("inf")
    while running := [worker for worker in workers if worker.running]:
        now = time.monotonic()
        if now >= min(end, settled):
            break
        connection.wait([worker.report for worker in running], min(POLL_SECONDS, min(end, settled) - now))
        for worker in running:
            worker.poll()
        if settled == float("inf") and any(worker.failed for worker in workers):
            settled = time.monotonic() + SETTLE_SECONDS
    if any(worker.failed for worker in workers):
        return describe(workers, log_dir)
    if not running:
        return None
    for worker in running:
        worker.ask_stack()
    time.sleep(STACK_DUMP_SECONDS)
    return describe_hang(workers, timeout or 0.0, log_dir)


def _end(workers: Sequence[Worker], grace: float, interrupts: Interrupts) -> None:
    """Let the ranks that reported go; SIGTERM to the others, SIGKILL to what is left after `grace` seconds."""
    for worker in workers:
        worker.report.close()
        if worker.running:
            worker.terminate()
    end = time.monotonic() + grace
    while time.monotonic() < end and not interrupts.hurry:
        if all(worker.wait(time.monotonic() + 0.05) for worker in workers):
            break
    for worker in workers:
        worker.kill()
        worker.wait(time.monotonic() + 5.0)
        worker.stacks.close()


def _lives_in_main(fn: Callable[..., Any]) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__module__", None) == "__main__"


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep multiprocessing from importing this process's main module in every child: it is a command, not a library."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    saved = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
