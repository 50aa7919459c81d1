"""Copies of a parameter must stay equal to the last bit: over TP, over DP, and of the tied embedding over the ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpt3d.parallel.layout import Group, Layout
from gpt3d.parallel.placement import Placement

PIECE = 1 << 22  # elements looked at at once, so that the check needs little memory
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CopiesDiffer(RuntimeError):
    """Ranks that should hold the same numbers do not: a gradient was summed on some of them only, or memory is bad."""

    show_traceback = False


def check_copies(weights: Iterable[tuple[Placement, Tensor]], layout: Layout, sharded_over_dp: bool) -> None:
    """Compare checksums of this rank's `weights` over every group that can hold copies. Collective, some KiB.

    `sharded_over_dp`: each DP rank brings its shard of every weight (ZeRO-3), so there are no copies over DP.
    """
    places, sums = zip(*[(place, checksum(value)) for place, value in weights], strict=True)
    mine = {(p.name, p.ranges): value for p, value in zip(places, torch.stack(sums).tolist(), strict=True)}
    axes = {"tensor-parallel": layout.tp, "first and last pipeline": layout.ends}
    if not sharded_over_dp:
        axes["data-parallel"] = layout.dp
    for axis, group in axes.items():
        wrong = _differing(mine, group)
        if wrong:
            raise CopiesDiffer(
                f"the copies of {len(wrong)} parameters differ between the {axis} ranks {list(group.ranks)}: "
                f"{', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''}. The model has split in two and what it "
                "learns from here is undefined; continue from the last checkpoint"
            )


def _differing(mine: dict[tuple[str, Any], int], group: Group) -> list[str]:
    """Names of the parameters of which ranks of the group hold the same part with different contents."""
    if group.size == 1:
        return []
    tables: list[Any] = [None] * group.size
    dist.all_gather_object(tables, mine, group=group.handle)
    contents: defaultdict[tuple[str, Any], set[int]] = defaultdict(set)
    for table in tables:
        for part, value in table.items():
            contents[part].add(value)
    return sorted({name for (name, _), values in contents.items() if len(values) > 1})


def checksum(value: Tensor) -> Tensor:
    """62 bits of the exact contents: each element's bit pattern times an odd number that depends on its position."""
    bits = value.detach().contiguous().flatten().view(_INTEGERS[value.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, len(bits), PIECE):
        piece = bits[start : start + PIECE].to(torch.int64)
        position = torch.arange(start, start + len(piece), device=value.device)
        total += (piece * (position * 0x9E3779B97F4A7C1 | 1)).sum()
    return total & ((1 << 62) - 1)
