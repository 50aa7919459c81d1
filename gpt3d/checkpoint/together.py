"""Ranks that succeed or fail together, over a process group of their own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Together:
    """Small exchanges between all ranks on a gloo group that nothing else uses, so a background thread may use it."""

    def __init__(self) -> None:
        self.group: Any = None
        self.rank, self.size = 0, 1
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.group = dist.new_group(backend="gloo", timeout=timedelta(hours=2))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Everybody's value, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_main(self, value: T) -> T:
        """Rank 0's value."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def to_main(self, value: T) -> list[T]:
        """Everybody's value on rank 0, an empty list elsewhere."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size if self.is_main else []
        dist.gather_object(value, values if self.is_main else None, dst=0, group=self.group)
        return values

    def share(self, values: list[T]) -> T:
        """This rank's entry of rank 0's list."""
        if self.group is None:
            return values[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, values if self.is_main else None, src=0, group=self.group)
        return box[0]

    def main_decides(self, decide: Callable[[], T]) -> T:
        """Rank 0 calls `decide`; all ranks return its result or raise its exception (which must pickle)."""
        outcome: tuple[Any, BaseException | None] = (None, None)
        if self.is_main:
            try:
                outcome = (decide(), None)
            except Exception as error:
                outcome = (None, error)
        value, raised = self.from_main(outcome)
        if raised is not None:
            raise raised
        return value
