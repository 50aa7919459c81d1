"""Bytes that a rank really holds: distinct storages of all tensors that Python can reach."""

from __future__ import annotations

import gc

from torch import Tensor


def live_storages() -> dict[int, tuple[int, Tensor]]:
    """Storage address -> (bytes, one of its tensors); `.grad` of each tensor included."""
    gc.collect()
    found: dict[int, tuple[int, Tensor]] = {}
    pending = [x for x in gc.get_objects() if isinstance(x, Tensor)]
    while pending:
        x = pending.pop()
        if x.is_meta:
            continue
        storage = x.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in found:
            found[storage.data_ptr()] = (storage.nbytes(), x)
        if x.is_leaf and x.grad is not None:
            pending.append(x.grad)
    return found


def live_bytes(known: set[int]) -> int:
    """Bytes of storages whose address is not in `known`."""
    return sum(size for address, (size, _) in live_storages().items() if address not in known)
