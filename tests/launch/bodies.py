"""What the ranks of these tests do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpt3d.launch import join


class UserMistake(ValueError):
    """Shown without a traceback."""

    show_traceback = False


def all_reduce(value: float) -> float:
    tensor = torch.tensor([value * dist.get_rank()])
    dist.all_reduce(tensor)
    return tensor.item()


def act_on(rank: int, action: str, pid_file: Path | None = None) -> None:
    """All ranks meet in a barrier, but `rank` does something else."""
    if dist.get_rank() == rank:
        if pid_file is not None:
            child = subprocess.Popen(["sleep", "1000"])
            pid_file.write_text(str(child.pid))
        if action == "raise":
            raise ValueError("boom")
        if action == "mistake":
            raise UserMistake("two mistakes:\ndata.seq_len=0: use a positive length")
        if action == "exit":
            os._exit(9)
        os.kill(os.getpid(), int(action))
    dist.barrier()


def hang() -> None:
    time.sleep(1000)


def record_and_sleep(folder: Path) -> None:
    """Leave a file named after this process, then hang; it gets the word "ended" if a signal lets Python end it."""
    file = folder / str(os.getpid())
    file.touch()
    try:
        time.sleep(1000)
    finally:
        file.write_text("ended")


def environment() -> dict[str, str]:
    return dict(os.environ)


def deepspeed_step() -> float:
    """One ZeRO-1 step of a linear layer; its loss."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    model = torch.nn.Linear(8, 8)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    loss = engine(torch.ones(1, 8, dtype=torch.bfloat16)).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def train(config: dict[str, Any]) -> dict[str, Any]:
    """A rank_main: checks that the world works, and fails where the config says so."""
    rank = int(os.environ["RANK"])
    print(f"rank {rank} trains with lr {config['lr']}")
    if config.get("fail_on") == rank:
        raise ValueError("boom")
    if config.get("stuck_on") == rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as if in a collective, where no Python runs
    if rank in (config.get("stuck_on"), config.get("wait_on")):
        time.sleep(1000)
    if config.get("stop_on") == rank:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)
    dist.init_process_group("gloo")
    total = all_reduce(1.0)
    dist.destroy_process_group()
    return {"rank": rank, "total": total}


class _Left(BaseException):
    """Instead of the end of the process."""


def joined(folder: Path, config: dict[str, Any] | int | None, variables: dict[str, str], limit: float = 30.0) -> int:
    """Be a rank that a launcher started with `variables` ({rank} is replaced); its exit code.

    Its output goes to folder/RANK.out and .err.
    `config` is what rank 0 composes: a dict, an exit code, or None for "nothing to train".
    """
    rank = os.environ["RANK"]
    if variables:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ.update({name: text.format(rank=rank) for name, text in variables.items()})

    def compose() -> dict[str, Any] | None:
        assert rank == "0", "only rank 0 composes"
        if isinstance(config, int):
            sys.exit(config)
        return config

    def leave(code: int) -> None:
        if threading.current_thread() is threading.main_thread():
            raise _Left(code)
        os._exit(code)

    join.leave = leave  # type: ignore[assignment]
    sys.argv = ["train"]
    for fd, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    world = join.joining()
    assert world is not None
    try:
        join.join_world(world, compose, train, limit)
    except _Left as left:
        sys.stdout.flush()
        sys.stderr.flush()
        return left.args[0]
    raise AssertionError("join_world returned")


def main() -> None:
    """A tiny training command, for a real launcher."""
    world = join.joining()
    assert world is not None
    join.join_world(world, lambda: {"lr": 0.5, "cluster": {"device": "cpu", "nodes": 1}}, train)


if __name__ == "__main__":
    main()
