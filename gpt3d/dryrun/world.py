"""A world of any size in one process: collectives that return at once, tensors that have shapes and no numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """While open, torch.distributed takes this process for `rank` of `size`; nothing is ever sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process of its own: torch.distributed is in use here")
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
