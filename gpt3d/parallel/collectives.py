"""Collectives on a `Group`, and the pairs of them that autograd needs at the borders of a tensor-parallel region.

A border has a forward and a backward that are each other's transpose (Shoeybi et al. 2019; Korthikanti et al. 2022):

    copy_to_region             identity        <->  all-reduce
    reduce_from_region         all-reduce      <->  identity
    gather_from_region         all-gather h    <->  split h
    scatter_to_region          split h         <->  all-gather h
    gather_sequence            all-gather s    <->  reduce-scatter s
    reduce_scatter_sequence    reduce-scatter s <-> all-gather s
    scatter_sequence           split s         <->  all-gather s

h is the last dim, s the first: activations are [sequence, batch, hidden], so a sequence shard is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpt3d.parallel.layout import Group

Collective = Callable[[Tensor, Group], Tensor]


def identity(x: Tensor, group: Group) -> Tensor:
    """`x` itself, as a new autograd output."""
    return x.view_as(x)


def all_reduce(x: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Sum (or `op`) over the group, in a new tensor."""
    if group.size == 1:
        return x.view_as(x)
    out = x.contiguous().clone()
    group.count(out, passes=2)
    dist.all_reduce(out, op=op, group=group.handle)
    return out


def all_gather_first(x: Tensor, group: Group) -> Tensor:
    """Concatenate over the group along dim 0: [s/t, ...] -> [s, ...]."""
    if group.size == 1:
        return x.view_as(x)
    out = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    group.count(out)
    dist.all_gather_single(out, x.contiguous(), group=group.handle)
    return out


def reduce_scatter_first(x: Tensor, group: Group) -> Tensor:
    """Sum over the group and keep this rank's part of dim 0: [s, ...] -> [s/t, ...]."""
    if group.size == 1:
        return x.view_as(x)
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    group.count(x)
    dist.reduce_scatter_single(out, x.contiguous(), group=group.handle)
    return out


def split_first(x: Tensor, group: Group) -> Tensor:
    """This rank's part of dim 0."""
    return x.chunk(group.size, dim=0)[group.rank].contiguous()


def all_gather_last(x: Tensor, group: Group) -> Tensor:
    """Concatenate over the group along the last dim: [..., h/t] -> [..., h]."""
    if group.size == 1:
        return x.view_as(x)
    return torch.cat(all_gather_first(x.unsqueeze(0), group).unbind(0), dim=-1)


def split_last(x: Tensor, group: Group) -> Tensor:
    """This rank's part of the last dim."""
    return x.chunk(group.size, dim=-1)[group.rank].contiguous()


class _Border(torch.autograd.Function):
    """Apply `forward_op` going forward and `backward_op`, its transpose, going backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, forward_op: Collective, backward_op: Collective) -> Tensor:
        ctx.group, ctx.backward_op = group, backward_op
        ctx.set_materialize_grads(False)
        return forward_op(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        # No gradient: that of a weight behind this border is postponed, on all ranks of the group alike.
        return None if grads[0] is None else ctx.backward_op(grads[0], ctx.group), None, None, None


def _border(forward_op: Collective, backward_op: Collective) -> Collective:
    def apply(x: Tensor, group: Group) -> Tensor:
        return x if group.size == 1 else _Border.apply(x, group, forward_op, backward_op)

    return apply


copy_to_region = _border(identity, all_reduce)
reduce_from_region = _border(all_reduce, identity)
gather_from_region = _border(all_gather_last, split_last)
scatter_to_region = _border(split_last, all_gather_last)
gather_sequence = _border(all_gather_first, reduce_scatter_first)
reduce_scatter_sequence = _border(reduce_scatter_first, all_gather_first)
scatter_sequence = _border(split_first, all_gather_first)
