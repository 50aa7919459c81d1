"""Sizes, coordinates and process groups of a run: the one object that says who talks to whom.

Ranks are numbered with TP fastest, then CP, DP, PP (tensor-parallel neighbours share a node):
`rank = ((pp * DP + dp) * CP + cp) * TP + tp`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

AXES = ("tp", "cp", "dp", "pp")  # fastest first


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Sizes:
    """Number of ranks along each axis; pure arithmetic, no processes needed."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """The place of `rank` on each axis."""
        place: dict[str, int] = {}
        for axis in AXES:
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**place)

    def rank_at(self, place: Coordinates) -> int:
        """The inverse of `coordinates`."""
        rank = 0
        for axis in reversed(AXES):
            rank = rank * getattr(self, axis) + getattr(place, axis)
        return rank

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All sets of ranks that differ only on `axes`, in rank order. They partition the world."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            place = self.coordinates(rank)
            fixed = tuple(getattr(place, axis) for axis in AXES if axis not in axes)
            found.setdefault(fixed, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]


@dataclass
class Sent:
    """Bytes that this rank has sent in a group, counted where its collectives are issued."""

    total: int = 0


@dataclass(frozen=True)
class Group:
    """Some ranks that communicate. `handle` is None for a group of one, on which every collective is a no-op."""

    ranks: tuple[int, ...]
    rank: int  # this rank's place in `ranks`
    handle: Any = None
    sent: Sent = field(default_factory=Sent, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def count(self, whole: Tensor, passes: int = 1) -> None:
        """A collective on the buffer `whole`: a ring sends all but one part of it, an all-reduce in 2 `passes`."""
        self.count_bytes(whole.numel() * whole.element_size(), passes)

    def count_bytes(self, whole: int, passes: int = 1) -> None:
        """As `count`, for a buffer of so many bytes."""
        self.sent.total += passes * whole * (self.size - 1) // self.size


@dataclass(frozen=True)
class Layout:
    """Where this rank stands and the groups it belongs to. Passed to whoever needs it; there are no module globals.

    Groups: `tp`; `dp` (the ranks ZeRO shards over); `model` (TP x PP of one replica); `pp`; `world`; `kv` (TP
    neighbours that hold the same key/value heads when TP exceeds their number); `ends` (first and last stage, for the
    tied embedding).
    """

    sizes: Sizes
    rank: int
    device: torch.device
    sequence_parallel: bool
    tp: Group
    dp: Group
    model: Group
    pp: Group
    kv: Group
    ends: Group
    world: Group

    @property
    def at(self) -> Coordinates:
        return self.sizes.coordinates(self.rank)

    @property
    def is_first_stage(self) -> bool:
        return self.at.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.at.pp == self.sizes.pp - 1


def single_process_layout(device: torch.device | str = "cpu") -> Layout:
    """The layout of one plain process: every group has one member and nothing is communicated."""
    alone = Group((0,), 0)
    return Layout(Sizes(), 0, torch.device(device), False, *([alone] * 7))


def new_group(ranks: tuple[int, ...]) -> Any:
    """A handle for `ranks`; None for one rank. All ranks of the world call this together, each with its own set.

    A rank without partners must call it too: torch derives the name of a group from the number of groups that the rank
    has made. Only members meet, so start-up stays short.
    """
    handle = dist.new_group(list(ranks), use_local_synchronization=True)
    return handle if len(ranks) > 1 else None


def create_layout(
    sizes: Sizes, device: torch.device, *, sequence_parallel: bool = False, num_kv_heads: int | None = None
) -> Layout:
    """Build all process groups of an initialised world; every rank must call it with the same arguments.

    Raises ValueError when the world does not have `sizes.world` ranks.
    """
    if not dist.is_initialized():
        if sizes.world != 1:
            raise ValueError(f"{sizes} needs {sizes.world} ranks, but torch.distributed is not initialised")
        return single_process_layout(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != sizes.world:
        raise ValueError(
            f"TP {sizes.tp} x CP {sizes.cp} x DP {sizes.dp} x PP {sizes.pp} = {sizes.world} ranks, not {world}"
        )

    def mine(partition: list[tuple[int, ...]]) -> Group:
        """The set that holds this rank, or this rank alone."""
        ranks = next((ranks for ranks in partition if rank in ranks), (rank,))
        trivial = all(len(ranks) == 1 for ranks in partition)
        return Group(ranks, ranks.index(rank), None if trivial else new_group(ranks))

    kv_copies = max(1, sizes.tp // num_kv_heads) if num_kv_heads else 1
    tp_groups, pp_groups = sizes.groups("tp"), sizes.groups("pp")
    kv_groups = [ranks[i : i + kv_copies] for ranks in tp_groups for i in range(0, sizes.tp, kv_copies)]
    ends = [tuple(sorted({ranks[0], ranks[-1]})) for ranks in pp_groups]
    return Layout(
        sizes=sizes,
        rank=rank,
        device=device,
        sequence_parallel=sequence_parallel and sizes.tp > 1,
        tp=mine(tp_groups),
        dp=mine(sizes.groups("dp")),
        model=mine(sizes.groups("tp", "pp")),
        pp=mine(pp_groups),
        kv=mine(kv_groups) if kv_copies > 1 else Group((rank,), 0),
        ends=mine(ends),
        world=Group(tuple(range(world)), rank, dist.group.WORLD),
    )
