"""run_ranks: results, the rank to blame, hangs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from gpt3d.launch import RankFailed


def all_reduce(value: float) -> float:
    tensor = torch.tensor([value * dist.get_rank()])
    dist.all_reduce(tensor)
    return tensor.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("boom")
    dist.barrier()


def kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)
    dist.barrier()


def test_results_in_rank_order(world):
    assert world(all_reduce, 2.0, n=3) == [6.0, 6.0, 6.0]


def test_the_failing_rank_is_shown_once(world):
    with pytest.raises(RankFailed) as failure:
        world(fail_on, 2, n=3)
    assert failure.value.rank == 2
    assert str(failure.value).count("Traceback") == 1
    assert "ValueError: boom" in str(failure.value) and "in fail_on" in str(failure.value)


def test_a_killed_rank_is_the_cause(world):
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
        world(kill_on, 1, n=3)


def test_a_hang_shows_where(world):
    with pytest.raises(RankFailed, match="no end after 2 s") as failure:
        world(hang_on, 1, timeout=2)
    assert "in hang_on" in str(failure.value)
