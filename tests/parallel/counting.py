"""Helpers that count what a piece of code does: collectives, and memory that it allocates or keeps for backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = (
    "all_reduce", "all_gather_single", "reduce_scatter_single", "all_gather", "all_gather_into_tensor",
    "reduce_scatter", "reduce_scatter_tensor", "broadcast", "reduce", "gather", "scatter", "all_to_all",
    "all_to_all_single", "isend", "irecv", "send", "recv", "barrier",
)  # fmt: skip


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Counts calls of torch.distributed's functions by name, within the block."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in NAMES}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    try:
        for name, function in originals.items():
            setattr(dist, name, counting(name, function))
        yield counts
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


class Allocations(TorchDispatchMode):
    """Bytes of storages that operators create within the block: alive now, and at the highest; largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in torch.utils._pytree.tree_leaves((args, kwargs or {})):
            if isinstance(x, Tensor):
                self.known.add(x.untyped_storage()._cdata)
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.known:
                self._created(x.untyped_storage())
        return out

    def _created(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


@contextmanager
def saved_for_backward() -> Iterator[dict[int, int]]:
    """Storage -> bytes of everything that autograd keeps for backward, within the block."""
    kept: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        held.append(x)  # so that no address is used twice
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield kept
