"""Counts what DeepSpeed sends to the replicas, where it issues its collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gpt3d.parallel.layout import Group

# Methods of DeepSpeed's backend and how often a ring passes their buffer on (see Group.count).
PASSES = {
    "all_reduce": 2, "all_reduce_coalesced": 2, "reduce_scatter_tensor": 1, "reduce_scatter": 1, "reduce": 1,
    "all_gather_into_tensor": 1, "all_gather_coalesced": 1, "all_gather": 1, "broadcast": 1,
}  # fmt: skip


def count_sent(group: Group) -> None:
    """From now on what DeepSpeed does in `group` is counted there, and nowhere else; microseconds a collective."""
    import deepspeed.comm.comm

    backend = deepspeed.comm.comm.cdb  # private: all its collectives go through this object
    if group.size > 1:
        for name, passes in PASSES.items():
            own = getattr(type(backend), name).__get__(backend)  # not what an earlier engine put in its place
            setattr(backend, name, _counted(own, group, passes))


def _counted(collective: Callable[..., Any], group: Group, passes: int) -> Callable[..., Any]:
    def issue(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if any(value is group.handle for value in given):
            group.count_bytes(max(map(_bytes, given)), passes)  # of input and output, the larger one is the whole
        return collective(*args, **kwargs)

    return issue


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0
