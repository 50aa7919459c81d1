"""Tensor-parallel layers (Shoeybi et al. 2019), with sequence parallelism (Korthikanti et al. 2022).

A matrix pair y = f(x A) B is cut as A by columns, B by rows: each rank computes f(x A_i) B_i and the sum over ranks is
y, so one all-reduce forward and one backward serve the pair. Under sequence parallelism x and y are sharded along the
sequence and the all-reduce becomes an all-gather in front of A and a reduce-scatter behind B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gpt3d.parallel.collectives import (
    all_gather_first,
    all_reduce,
    copy_to_region,
    reduce_from_region,
    reduce_scatter_sequence,
)
from gpt3d.parallel.layout import Layout
from gpt3d.parallel.placement import Constant, Normal, Placement, even_range, new_parameter
from gpt3d.parallel.split_backward import splitting, weight_gradient


@dataclass(frozen=True)
class Factory:
    """What every layer needs to make its parameters: the layout, the number format and the seed."""

    layout: Layout
    dtype: torch.dtype
    seed: int

    def normal(self, placement: Placement, std: float) -> nn.Parameter:
        return new_parameter(placement, Normal(std, self.seed), self.layout.device, self.dtype)

    def constant(self, placement: Placement, value: float) -> nn.Parameter:
        return new_parameter(placement, Constant(value), self.layout.device, self.dtype)

    def replicated(self, name: str, shape: tuple[int, ...]) -> Placement:
        """Every TP rank holds the whole tensor."""
        return Placement(name, shape, copy=self.layout.tp.rank, copies=self.layout.tp.size)


def shared_by_region(parameter: Tensor, layout: Layout) -> Tensor:
    """A replicated parameter where SP shows each rank only part of the tokens: its gradient is summed over TP."""
    return copy_to_region(parameter, layout.tp) if layout.sequence_parallel else parameter


class ColumnLinearFunction(torch.autograd.Function):
    """y = x W^T at the entrance of a tensor-parallel region.

    Forward: all-gather the sequence shards (SP) or nothing. Backward: reduce-scatter (SP) or all-reduce of dx, running
    while dW is computed. Under SP only the shard of x is kept and gathered again in backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(x, weight)
        full = all_gather_first(x, layout.tp) if layout.sequence_parallel else x
        return F.linear(full, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad = grads[0].contiguous()
        x, weight = ctx.saved_tensors
        layout: Layout = ctx.layout
        handle: Any = None
        full: Tensor | None = None if layout.sequence_parallel else x
        if layout.sequence_parallel and not splitting():
            full = x.new_empty((x.shape[0] * layout.tp.size, *x.shape[1:]))
            layout.tp.count(full)
            handle = dist.all_gather_single(full, x.contiguous(), group=layout.tp.handle, async_op=True)
        dx = grad @ weight
        if handle is not None:
            handle.wait()
        summed = dx
        if layout.sequence_parallel:
            summed = torch.empty_like(x)
            layout.tp.count(dx)
            handle = dist.reduce_scatter_single(summed, dx, group=layout.tp.handle, async_op=True)
        elif layout.tp.size > 1:
            layout.tp.count(summed, passes=2)
            handle = dist.all_reduce(summed, group=layout.tp.handle, async_op=True)
        dw = weight_gradient(ctx, 1, lambda: _product(grad, all_gather_first(x, layout.tp) if full is None else full))
        if handle is not None:
            handle.wait()
        return summed, dw, None


class RowLinearFunction(torch.autograd.Function):
    """y = x W^T on this rank's columns of W, the sum over TP still to come; the weight gradient can be postponed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        grad = grads[0].contiguous()
        x, weight = ctx.saved_tensors
        return grad @ weight, weight_gradient(ctx, 1, lambda: _product(grad, x))


def _product(grad: Tensor, x: Tensor) -> Tensor:
    """Weight gradient [out, in] of y = x W^T from the gradient of y and x, summed over all leading dims."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the rows of W (columns of the product) cut over TP.

    Input [s, b, in] ([s/t, b, in] under SP), output [s, b, out/t]. A weight that fuses several matrices gives
    `global_rows` for each of them; each is cut evenly, and the global layout does not depend on TP.
    """

    def __init__(
        self, make: Factory, name: str, in_features: int, global_rows: tuple[int, ...], *, bias: bool, std: float
    ) -> None:
        super().__init__()
        self.layout = make.layout
        tp = make.layout.tp
        ranges, offset = [], 0
        for rows in global_rows:
            start, stop = even_range(rows, tp.size, tp.rank)[0]
            ranges.append((offset + start, offset + stop))
            offset += rows
        self.weight = make.normal(Placement(f"{name}.weight", (offset, in_features), 0, tuple(ranges)), std)
        self.bias = make.constant(Placement(f"{name}.bias", (offset,), 0, tuple(ranges)), 0.0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = ColumnLinearFunction.apply(x, self.weight, self.layout)
        return y if self.bias is None else y + self.bias


class QKVLinear(nn.Module):
    """The fused projection to queries, keys and values; the global rows are [Q; K; V], each in head order.

    With more TP ranks than key/value heads (Ainslie et al. 2023, GQA), TP / num_kv_heads neighbours hold the same head:
    keys and values are then a parameter of their own, whose gradient is summed over those neighbours.
    """

    def __init__(
        self,
        make: Factory,
        name: str,
        in_features: int,
        q_rows: int,
        head_dim: int,
        kv_heads: int,
        *,
        bias: bool,
        std: float,
    ) -> None:
        super().__init__()
        self.layout = make.layout
        tp, kv = make.layout.tp, make.layout.kv
        kv_rows = kv_heads * head_dim
        total = q_rows + 2 * kv_rows
        q = even_range(q_rows, tp.size, tp.rank)[0]
        start, stop = even_range(kv_rows, tp.size // kv.size, tp.rank // kv.size)[0]
        keys = (q_rows + start, q_rows + stop)
        values = (q_rows + kv_rows + start, q_rows + kv_rows + stop)
        fused = kv.size == 1
        ranges = (q, keys, values) if fused else (q,)
        self.weight = make.normal(Placement(f"{name}.weight", (total, in_features), 0, ranges), std)
        self.bias = make.constant(Placement(f"{name}.bias", (total,), 0, ranges), 0.0) if bias else None
        self.kv_weight: nn.Parameter | None = None
        self.kv_bias: nn.Parameter | None = None
        if not fused:
            copies = (keys, values)
            weight = Placement(f"{name}.weight", (total, in_features), 0, copies, kv.rank, kv.size)
            self.kv_weight = make.normal(weight, std)
            if bias:
                place = Placement(f"{name}.bias", (total,), 0, copies, kv.rank, kv.size)
                self.kv_bias = make.constant(place, 0.0)
        self.local_rows = (q[1] - q[0], stop - start, stop - start)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, in] ([s/t, b, in] under SP) -> q [s, b, q_rows/t], k and v [s, b, local kv rows]."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.kv_weight is not None:
            weight = torch.cat([weight, copy_to_region(self.kv_weight, self.layout.kv)])
            if bias is not None and self.kv_bias is not None:
                bias = torch.cat([bias, copy_to_region(self.kv_bias, self.layout.kv)])
        y = ColumnLinearFunction.apply(x, weight, self.layout)
        if bias is not None:
            y = y + bias
        q, k, v = y.split(self.local_rows, dim=-1)
        return q, k, v


class RowParallelLinear(nn.Module):
    """y = x W^T + b, the columns of W cut over TP: input [s, b, in/t], output [s, b, out] ([s/t, b, out] under SP)."""

    def __init__(
        self, make: Factory, name: str, in_features: int, out_features: int, *, bias: bool, std: float
    ) -> None:
        super().__init__()
        self.layout = make.layout
        tp = make.layout.tp
        columns = even_range(in_features, tp.size, tp.rank)
        self.weight = make.normal(Placement(f"{name}.weight", (out_features, in_features), 1, columns), std)
        self.bias = make.constant(make.replicated(f"{name}.bias", (out_features,)), 0.0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = leave_region(RowLinearFunction.apply(x, self.weight), self.layout)
        return y if self.bias is None else y + shared_by_region(self.bias, self.layout)


def leave_region(partial: Tensor, layout: Layout) -> Tensor:
    """Sum the partial results over TP; under SP keep only this rank's part of the sequence (dim 0)."""
    return (reduce_scatter_sequence if layout.sequence_parallel else reduce_from_region)(partial, layout.tp)


class VocabParallelEmbedding(nn.Module):
    """Token embedding with the vocabulary cut over TP: tokens [b, s] -> [s, b, h] ([s/t, b, h] under SP)."""

    def __init__(self, make: Factory, name: str, vocab: int, hidden: int, std: float) -> None:
        super().__init__()
        self.layout = make.layout
        rows = even_range(vocab, make.layout.tp.size, make.layout.tp.rank)
        self.first, self.last = rows[0]
        self.weight = make.normal(Placement(f"{name}.weight", (vocab, hidden), 0, rows), std)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.t()
        if self.layout.tp.size == 1:
            return F.embedding(tokens, self.weight)
        elsewhere = (tokens < self.first) | (tokens >= self.last)
        rows = F.embedding((tokens - self.first).masked_fill(elsewhere, 0), self.weight)
        return leave_region(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.layout)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits whose vocabulary is cut over TP; one fp32 copy of the local shard is all that is kept.

    fp32 logits are overwritten in place: the GEMM that made them does not need its output again.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, layout: Layout, first: int, vocab: int) -> Tensor:
        scores = logits.detach() if logits.dtype == torch.float32 else logits.float()
        local = scores.shape[-1]
        if first + local > vocab:  # padding rows of the vocabulary: never a candidate
            scores[..., max(0, vocab - first) :] = float("-inf")
        peak = scores.amax(-1)
        if layout.tp.size > 1:
            peak = all_reduce(peak, layout.tp, dist.ReduceOp.MAX)
        scores.sub_(peak.unsqueeze(-1))
        valid = labels >= 0
        mine = valid & (labels >= first) & (labels < first + local)
        position = (labels - first).masked_fill(~mine, 0).unsqueeze(-1)
        target = scores.gather(-1, position).squeeze(-1).masked_fill(~mine, 0.0)
        scores.exp_()
        total, target = all_reduce(torch.stack([scores.sum(-1), target]), layout.tp).unbind(0)
        scores.div_(total.unsqueeze(-1))
        ctx.save_for_backward(scores, position, mine, valid)
        ctx.dtype = logits.dtype
        return (total.log() - target).masked_fill(~valid, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        scores, position, mine, valid = ctx.saved_tensors  # softmax; turned into the gradient in place
        scores.scatter_add_(-1, position, -mine.unsqueeze(-1).to(scores.dtype))
        scores.mul_((grads[0] * valid).unsqueeze(-1))
        return scores.to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, layout: Layout, vocab: int) -> Tensor:
    """Loss per token in nats, fp32: logits [..., V/t] (consumed), labels [...] with negative values ignored -> [...].

    `vocab` is the number of real entries: padded ones get probability 0. Ignored tokens give loss 0 and gradient 0.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, layout, layout.tp.rank * logits.shape[-1], vocab)
