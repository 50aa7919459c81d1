"""Ranks without processes: the placements that a layout gives each rank, and the fragments ZeRO would own of them.

Geometry, planners and storage are the real ones, driven rank after rank, so that many pairs of layouts are quick.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt3d.checkpoint.planner import PieceLoadPlanner, PieceSavePlanner
from gpt3d.checkpoint.state import held_state, owned_state, saved_shape
from gpt3d.checkpoint.storage import RawReader, RawWriter
from gpt3d.config.schema import ModelConfig
from gpt3d.model.build import build_chunks
from gpt3d.parallel.layout import Group, Layout, Sizes
from gpt3d.parallel.placement import Placement, placement_of
from gpt3d.verification.cases import Case
from gpt3d.zero.fragments import KINDS, Fragment

ALIGN = 4  # elements to which DeepSpeed pads the shares of a flat group


def layout_of(sizes: Sizes, rank: int, kv_heads: int) -> Layout:
    """The layout of one rank of a world that does not exist."""

    def mine(*axes: str) -> Group:
        ranks = next(ranks for ranks in sizes.groups(*axes) if rank in ranks)
        return Group(ranks, ranks.index(rank))

    tp, pp = mine("tp"), mine("pp")
    copies = max(1, sizes.tp // kv_heads)
    kv = tuple(tp.ranks[tp.rank // copies * copies :][:copies])
    ends = tuple(sorted({pp.ranks[0], pp.ranks[-1]}))
    return Layout(
        sizes, rank, torch.device("meta"), False, tp, mine("dp"), mine("tp", "pp"), pp,
        Group(kv, kv.index(rank)), Group(ends, ends.index(rank) if rank in ends else 0),
        Group(tuple(range(sizes.world)), rank),
    )  # fmt: skip


@dataclass
class SimulatedState:
    """What one rank owns under `case.zero`, all NaN at first."""

    case: Case
    rank: int
    pieces: list[Fragment] = field(default_factory=list)
    steps: int = 0
    scaler: Any = None

    def __post_init__(self) -> None:
        config = self.case.config()
        sizes = Sizes(tp=self.case.tp, dp=self.case.dp, pp=self.case.pp)
        self.layout = layout_of(sizes, self.rank, config.model.num_kv_heads)
        chunks = build_chunks(config, self.layout)
        places = [placement_of(p) for chunk in chunks for p in chunk.parameters()]
        dp = self.layout.dp
        if self.case.zero in (1, 2):
            for decays in (True, False):
                self._cut_group([p for p in places if p.decays == decays], dp)
            return
        for place in places:
            count = torch.Size(place.local_shape).numel()
            if self.case.zero == 0:
                self.pieces.append(Fragment(place, 0, new(count), dp.rank, dp.size))
            else:
                shard = -(-count // dp.size)
                if (held := min(shard, count - dp.rank * shard)) > 0:
                    self.pieces.append(Fragment(place, dp.rank * shard, new(held)))

    def _cut_group(self, places: list[Placement], dp: Group) -> None:
        counts = [torch.Size(place.local_shape).numel() for place in places]
        share = -(-sum(counts) // (ALIGN * dp.size)) * ALIGN
        low, high, at = dp.rank * share, (dp.rank + 1) * share, 0
        for place, count in zip(places, counts, strict=True):
            first, stop = max(low, at), min(high, at + count)
            if first < stop:
                self.pieces.append(Fragment(place, first - at, new(stop - first)))
            at += count

    def fragments(self) -> Iterator[Fragment]:
        yield from self.pieces

    def adopt(self, steps: int) -> None:
        self.steps = steps


def new(count: int) -> dict[str, Tensor]:
    return {kind: torch.full((count,), float("nan")) for kind in KINDS}


@cache
def truth(key: str, shape: tuple[int, ...]) -> Tensor:
    """The global tensor of a key: random numbers that depend on the key alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))


def expected(fragment: Fragment, kind: str, model: ModelConfig) -> Tensor:
    """What `fragment` must hold: taken from the global tensor the long way, NaN in the padding of the vocabulary."""
    place = fragment.placement
    full = torch.full(place.shape, float("nan"))
    shape = saved_shape(place, model)
    full[: shape[0]] = truth(f"{kind}/{place.name}", shape)
    return place.take(full).reshape(-1)[fragment.start :][: fragment.tensors[kind].numel()]


@cache
def _built(case: Case) -> list[SimulatedState]:
    return [SimulatedState(case, rank) for rank in range(case.world)]


@cache
def answers(case: Case) -> list[list[dict[str, Tensor]]]:
    """By rank and fragment, what each kind must hold."""
    model = case.config().model
    return [[{kind: expected(f, kind, model) for kind in KINDS} for f in state.pieces] for state in _built(case)]


def ranks(case: Case) -> list[SimulatedState]:
    """The ranks of a layout, holding nothing yet."""
    for state in _built(case):
        for fragment in state.pieces:
            for values in fragment.tensors.values():
                values.fill_(float("nan"))
    return _built(case)


def save(case: Case, folder: Path) -> list[int]:
    """Write a checkpoint of the true values in this layout; the bytes that each rank wrote."""
    model = case.config().model
    planners = []
    for state, right in zip(ranks(case), answers(case), strict=True):
        for fragment, want in zip(state.pieces, right, strict=True):
            for kind, values in fragment.tensors.items():
                values.copy_(want[kind])
        planner = PieceSavePlanner()
        planner.set_up_planner(owned_state(state, model))
        planners.append(planner)
    writer = RawWriter(folder)
    plans, metadata = planners[0].create_global_plan([p.create_local_plan() for p in planners])
    plans = writer.prepare_global_plan(plans)
    results = [writer.write_data(plan, planner).wait() for plan, planner in zip(plans, planners, strict=True)]
    writer.finish(metadata, results)
    return [sum(r.size_in_bytes for r in rank) for rank in results]


def load(case: Case, folder: Path) -> list[SimulatedState]:
    """Read a checkpoint on every rank of a layout."""
    states = ranks(case)
    reader = RawReader(folder)
    metadata = reader.read_metadata()
    for state in states:
        planner = PieceLoadPlanner()
        planner.set_up_planner(held_state(state, case.config().model), metadata)
        reader.read_data(planner.create_local_plan(), planner)
    return states
