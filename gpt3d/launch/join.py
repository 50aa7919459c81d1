"""A rank that torchrun, srun or mpirun started: meet the others, take rank 0's config, train, end.

Rank 0 alone composes the config; the others wait for it at the store and never see Hydra. Whatever rank 0 does instead
of training (--help, --cfg, an error) they end with it, quietly and with its exit code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from gpt3d.launch import environment
from gpt3d.launch.environment import LaunchError, World
from gpt3d.launch.rank import Outcome, leave, run_body
from gpt3d.launch.rank_map import check_rank_map

START_LIMIT_SECONDS = 300.0
NAME_LIMIT_SECONDS = 20.0  # a name service may need a moment at the start of a large job
END_LIMIT_SECONDS = 30.0
WATCH_SECONDS = 1.0
GRACE_SECONDS = 3.0
QUIETLY = "quietly"  # a rank that a signal ended: the user knows why all end
STARTED, ENTRY, SEEN, DONE, FAILED = (f"gpt3d/{name}" for name in ("started", "entry", "seen", "done", "failed"))


def joining() -> World | None:
    """The world this process was started in by a launcher, or None: then start local ranks (`gpt3d.launch.start`).

    A launcher's environment that makes no sense ends the command with one message.
    """
    try:
        return environment.read(os.environ)
    except LaunchError as error:
        sys.exit(f"gpt3d: {error}")


def join_world(
    world: World,
    compose: Callable[[], dict[str, Any] | None],
    rank_main: Callable[[dict[str, Any]], Any],
    start_limit: float = START_LIMIT_SECONDS,
) -> NoReturn:
    """Be one rank of `world` until the end of the process: `rank_main(config)` with rank 0's config.

    `compose` is called on rank 0 only; None means that there is nothing to train (the help was shown). All ranks must
    meet within `start_limit` seconds.
    """
    os.environ.update(world.variables())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    try:
        store, config = _lead(world, compose, start_limit) if world.rank == 0 else _follow(world, start_limit)
    except LaunchError as error:
        print(f"gpt3d: {error}", file=sys.stderr)
        leave(1)
    except KeyboardInterrupt:
        leave(128 + signal.SIGINT)
    threading.Thread(target=_leave_with_failed_peer, args=(world,), name="peer-watch", daemon=True).start()
    outcome = run_body(_train, (config, rank_main, world))
    _finish(store, world, outcome)
    leave(outcome.exit_code)


def _lead(world: World, compose: Callable[[], dict[str, Any] | None], start_limit: float) -> tuple[Any, dict[str, Any]]:
    """Rank 0: compose, count the ranks, let them start; or end them with this process."""
    code: int = 0
    config: dict[str, Any] | None = None
    try:
        _refuse_sweep(sys.argv[1:])
        config = compose()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        with contextlib.suppress(RuntimeError):
            _dismiss(_open_store(world, start_limit), world, code)
        raise
    store = _open_store(world, start_limit)
    if config is None:
        _dismiss(store, world, code)
        leave(code)
    try:
        print(_meet(store, world, config, start_limit), flush=True)
    except LaunchError:
        _dismiss(store, world, 1)
        raise
    store.set(STARTED, json.dumps({"config": config}))
    return store, config


def _follow(world: World, start_limit: float) -> tuple[Any, dict[str, Any]]:
    """Ranks above 0: report for duty, wait for the config; leave with rank 0's exit code if there is none."""
    store = _open_store(world, start_limit)
    store.set(f"{ENTRY}/{world.rank}", json.dumps([socket.gethostname(), world.local_rank]))
    try:
        started = json.loads(store.get(STARTED))
    except RuntimeError:
        raise LaunchError(
            f"rank {world.rank} on {socket.gethostname()} heard nothing from rank 0 through {world.host}:{world.port} "
            f"within {start_limit:g} s: see the output of rank 0"
        ) from None
    if "exit" in started:
        store.add(SEEN, 1)
        leave(started["exit"])
    return store, started["config"]


def _open_store(world: World, limit: float) -> Any:
    """The world's key-value store: torchrun's own, else one that rank 0 hosts. torch's env:// shares it later."""
    import torch.distributed as dist

    _find_host(world, min(limit, NAME_LIMIT_SECONDS))
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=limit))))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in str(error):
            advice = "the port is taken; set another MASTER_PORT on all ranks"
        elif world.rank == 0:
            advice = f"not all {world.size} ranks came; does MASTER_ADDR name this node on theirs?"
        else:
            advice = "is that the node of rank 0, and can this node reach it?"
        raise LaunchError(
            f"rank {world.rank} on {socket.gethostname()} could not meet the others at {world.host}:{world.port} "
            f"(MASTER_ADDR:MASTER_PORT, limit {limit:g} s): {advice} ({reason})"
        ) from None
    return store


def _find_host(world: World, limit: float) -> None:
    """Wait until this node knows the address of rank 0's; LaunchError if not soon (torch tries for minutes)."""
    end = time.monotonic() + limit
    while True:
        try:
            socket.getaddrinfo(world.host, world.port)
            return
        except OSError as error:
            if time.monotonic() > end:
                raise LaunchError(
                    f"rank {world.rank} on {socket.gethostname()} finds no host named {world.host}, where rank 0 is to "
                    f"be ({error.strerror}): set MASTER_ADDR to a name or address of rank 0's node on all ranks"
                    + ("; NodeAddr in `scontrol show node` is one" if world.launcher == "Slurm" else "")
                ) from None
        time.sleep(1)


def _meet(store: Any, world: World, config: dict[str, Any], limit: float) -> str:
    """Wait for every rank's host and local rank; the rank map in words. Raises LaunchError when they do not fit."""
    from gpt3d.parallel.device import DeviceError, kind

    store.set(f"{ENTRY}/0", json.dumps([socket.gethostname(), world.local_rank]))
    keys = [f"{ENTRY}/{rank}" for rank in range(world.size)]
    try:
        store.wait(keys, timedelta(seconds=limit))
    except RuntimeError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise LaunchError(
            f"of {world.size} ranks, {len(missing)} did not reach {world.host}:{world.port} within {limit:g} s: "
            f"ranks {', '.join(missing)}. Are their nodes running, and does MASTER_ADDR name the node of rank 0 there?"
        ) from None
    entries = [tuple(json.loads(value)) for value in store.multi_get(keys)]
    cluster = config.get("cluster", {})
    try:
        own_gpu = kind(cluster.get("device", "auto")) == "cuda"
    except DeviceError as error:
        raise LaunchError(str(error)) from None
    return check_rank_map(entries, world, asked_nodes=cluster.get("nodes"), own_gpu=own_gpu)


def _dismiss(store: Any, world: World, code: int) -> None:
    """Tell the waiting ranks to end with `code`; stay until they have heard it, for this process may host the store."""
    store.set(STARTED, json.dumps({"exit": code}))
    _await_count(store, SEEN, world.size - 1)


def _train(config: dict[str, Any], rank_main: Callable[[dict[str, Any]], Any], world: World) -> Any:
    from gpt3d.launch.preload import prepare_deepspeed
    from gpt3d.parallel.device import kind

    cluster = config.get("cluster", {})
    os.environ.update(cluster.get("env", {}))
    os.environ.update(world.variables())
    prepare_deepspeed(kind(cluster.get("device", "auto")))
    return rank_main(config)


def _finish(store: Any, world: World, outcome: Outcome) -> None:
    """Say what went wrong, once in the world: the first rank to fail shows its error, the others name that rank."""
    ended = outcome.exit_code in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    try:
        store.set_timeout(timedelta(seconds=5))  # its host may be gone
        if outcome.ok:
            store.add(DONE, 1)
            if world.rank == 0:
                _await_count(store, DONE, world.size)
            return
        first = _failed_rank(store.compare_set(FAILED, "", f"{world.rank} {QUIETLY if ended else ''}"))[0]
    except (RuntimeError, ValueError):
        first = world.rank
    if outcome.ok or ended:
        return
    if first == world.rank:
        print(f"rank {world.rank} {outcome.summary}\n{outcome.traceback}".rstrip(), file=sys.stderr)
    else:
        print(f"rank {world.rank} stopped because rank {first} failed", file=sys.stderr)


def _leave_with_failed_peer(world: World) -> None:
    """Thread: end this rank soon after another has failed; srun without --kill-on-bad-exit, say, would not."""
    from torch.distributed import TCPStore

    try:
        # a connection of its own: the main thread's may be waiting in a call
        store = TCPStore(world.host, world.port, is_master=False, timeout=timedelta(seconds=END_LIMIT_SECONDS))
        while not store.check([FAILED]):
            time.sleep(WATCH_SECONDS)
        first, quiet = _failed_rank(store.get(FAILED))
    except RuntimeError:
        return  # the store's host is gone; broken connections will tell
    if first == world.rank:
        return
    if not quiet:
        print(f"rank {world.rank} stopped because rank {first} failed", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)  # lets the main thread close its files, unless it is stuck in a collective
    time.sleep(GRACE_SECONDS)
    leave(1)


def _failed_rank(entry: bytes) -> tuple[int, bool]:
    rank, _, how = entry.decode().partition(" ")
    return int(rank), how == QUIETLY


def _await_count(store: Any, key: str, count: int) -> None:
    end = time.monotonic() + END_LIMIT_SECONDS
    while store.add(key, 0) < count and not store.check([FAILED]) and time.monotonic() < end:
        time.sleep(0.05)


def _refuse_sweep(arguments: list[str]) -> None:
    if {"-m", "--multirun"} & set(arguments):
        raise LaunchError(
            "--multirun inside a world that a launcher started: all jobs would share it. Run the sweep from a plain "
            "shell, where each job gets its own ranks"
        )
