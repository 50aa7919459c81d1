"""The arithmetic of ranks, and the groups that a running world really gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gpt3d.parallel.layout import AXES, Coordinates, Sizes, create_layout, single_process_layout

small = st.integers(1, 5)
sizes = st.builds(Sizes, tp=small, cp=small, dp=small, pp=small)
axes = st.sets(st.sampled_from(AXES))


@given(sizes, st.data())
def test_rank_formula_and_inverse(s: Sizes, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, s.world - 1))
    at = s.coordinates(rank)
    assert rank == ((at.pp * s.dp + at.dp) * s.cp + at.cp) * s.tp + at.tp
    assert s.rank_at(at) == rank


@given(sizes, axes)
def test_groups_partition_the_world(s: Sizes, chosen: set[str]) -> None:
    groups = s.groups(*chosen)
    assert sorted(rank for group in groups for rank in group) == list(range(s.world))
    for group in groups:
        places = [s.coordinates(rank) for rank in group]
        assert list(group) == sorted(group)
        for axis in AXES:
            values = {getattr(place, axis) for place in places}
            assert values == set(range(getattr(s, axis))) if axis in chosen else len(values) == 1


@pytest.mark.parametrize(
    ("axis", "groups"),
    [
        ("tp", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("dp", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("pp", [(0, 4), (1, 5), (2, 6), (3, 7)]),
    ],
)
def test_eight_ranks_by_hand(axis: str, groups: list[tuple[int, ...]]) -> None:
    assert Sizes(tp=2, dp=2, pp=2).groups(axis) == groups


def test_tensor_parallel_neighbours_are_consecutive() -> None:
    assert all(g == tuple(range(g[0], g[0] + 8)) for g in Sizes(tp=8, dp=3, pp=4).groups("tp"))


def test_single_process_layout_communicates_with_nobody() -> None:
    layout = single_process_layout()
    assert layout.at == Coordinates(0, 0, 0, 0) and layout.is_first_stage and layout.is_last_stage
    assert all(g.size == 1 and g.handle is None for g in (layout.tp, layout.dp, layout.model, layout.kv, layout.ends))


def _sums_over_groups() -> dict[str, tuple[list[int], float]]:
    """Ranks and all-reduced rank number of each group; three stages, so that the middle one is no end."""
    layout = create_layout(Sizes(tp=2, pp=3), torch.device("cpu"), sequence_parallel=True, num_kv_heads=1)
    found = {}
    for name in ("tp", "dp", "model", "pp", "kv", "ends", "world"):
        group = getattr(layout, name)
        assert group.ranks[group.rank] == layout.rank
        total = torch.tensor(float(layout.rank))
        if group.size > 1:
            dist.all_reduce(total, group=group.handle)
        found[name] = (list(group.ranks), total.item())
    return found


def test_groups_of_a_world(world: Callable[..., list[Any]]) -> None:
    ranks = world(_sums_over_groups, n=6)
    for found in ranks:
        assert all(sum(members) == total for members, total in found.values())
    members = {name: [found[name][0] for found in ranks] for name in ranks[0]}
    assert members["tp"] == members["kv"] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    assert members["pp"][3] == [1, 3, 5] and members["dp"][3] == [3] and members["model"][3] == list(range(6))
    assert members["ends"] == [[0, 4], [1, 5], [2], [3], [0, 4], [1, 5]]


def _wrong_world() -> str:
    with pytest.raises(ValueError) as error:
        create_layout(Sizes(tp=3), torch.device("cpu"))
    return str(error.value)


def test_wrong_world_size_is_one_clear_error(world: Callable[..., list[Any]]) -> None:
    assert world(_wrong_world, n=2)[0] == "TP 3 x CP 1 x DP 1 x PP 1 = 3 ranks, not 2"
