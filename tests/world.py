"""A test body on N ranks: the same launcher as training, with a process group and a time limit.

def body(x):                              # at the top level of a test module
    t = torch.full((1,), float(x)); dist.all_reduce(t); return t.item()

def test_sum(world):
    assert world(body, 3, n=2) == [6.0, 6.0]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from gpt3d.launch import RankFailed, run_ranks


def world(
    fn: Callable[..., Any], *args: Any, n: int = 2, timeout: float = 60, init: bool = True, **kwargs: Any
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `n` fresh gloo ranks; their results in rank order.

    A failing rank fails the test with that rank's own traceback; pytest.skip in a rank skips the test. `timeout` in
    seconds ends a hang and shows where each rank is stuck. `init=False`: no process group yet.
    """
    __tracebackhide__ = True
    body = functools.partial(fn, *args, **kwargs)
    try:
        return run_ranks(_in_group, body, timeout, init, nprocs=n, timeout=timeout)
    except RankFailed as failure:
        if failure.error_type == "Skipped":
            pytest.skip(str(failure))
        raise failure.with_traceback(None) from None  # the launcher's frames say nothing about the test


def _in_group(body: Callable[[], Any], timeout: float, init: bool) -> Any:
    if not init:
        return body()
    import torch.distributed as dist

    from gpt3d.parallel import device

    device.init_process_group(device.select(0, "cpu"), timeout_minutes=timeout / 60)
    result = body()
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves while another still connects to it would be its failure
    device.destroy_process_group()
    return result
