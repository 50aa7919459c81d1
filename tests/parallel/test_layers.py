"""Each parallel layer against the plain one: output, input gradient, weight gradients; TP 2 and 4, SP on and off."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt3d.model.norm import Norm
from gpt3d.parallel.layers import ColumnParallelLinear, Factory, QKVLinear, RowParallelLinear, VocabParallelEmbedding
from gpt3d.parallel.layout import Layout, Sizes, create_layout
from gpt3d.parallel.placement import Normal, Placement, new_parameter, placement_of
from gpt3d.verification.cases import GPT, LLAMA

S, B, H, HEAD = 8, 2, 16, 4
CPU = torch.device("cpu")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Twin:
    """Full weights of a parallel layer, for the plain computation; made of the layer's own placements.

    Constant initial values (zero biases, unit norms) are replaced by random ones in both.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.full: dict[str, Tensor] = {}
        for p in module.parameters():
            place = placement_of(p)
            shape = place.shape if len(place.shape) == 2 else (1, *place.shape)
            whole = new_parameter(Placement(place.name, shape), Normal(0.5, 11), CPU, torch.float32)
            self.full[place.name] = whole.detach().view(place.shape).requires_grad_(True)
            p.data.copy_(place.take(self.full[place.name].detach()))

    def __getitem__(self, name: str) -> Tensor:
        return self.full[name]

    def check(self) -> None:
        """After backward on both sides: each local gradient is this rank's part of the full one."""
        for p in self.module.parameters():
            place = placement_of(p)
            full = self.full[place.name].grad
            assert p.grad is not None and full is not None
            torch.testing.assert_close(p.grad, place.take(full), rtol=1e-5, atol=2e-5)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


def shard(x: Tensor, layout: Layout) -> Tensor:
    """What this rank holds of an activation outside the region: all of it, or its sequence part under SP."""
    return x.chunk(layout.tp.size)[layout.tp.rank] if layout.sequence_parallel else x


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(True)


def column(make: Factory, layout: Layout) -> None:
    layer = ColumnParallelLinear(make, "c", H, (8, 24), bias=True, std=0.1)
    twin, whole = Twin(layer), leaf(draw(S, B, H))
    x = leaf(shard(whole, layout))
    full = F.linear(whole, twin["c.weight"], twin["c.bias"])
    grad = draw(S, B, 32, seed=1)
    ranges = placement_of(layer.weight).ranges
    local = [torch.cat([t[..., a:b] for a, b in ranges], -1) for t in (full, grad)]
    y = layer(x)
    close(y, local[0])
    y.backward(local[1])
    full.backward(grad)
    close(x.grad, shard(whole.grad, layout))
    twin.check()


def row(make: Factory, layout: Layout) -> None:
    layer = RowParallelLinear(make, "r", 24, H, bias=True, std=0.1)
    twin, whole = Twin(layer), leaf(draw(S, B, 24))
    start, stop = placement_of(layer.weight).ranges[0]
    x = leaf(whole[..., start:stop])
    full = F.linear(whole, twin["r.weight"], twin["r.bias"])
    grad = draw(S, B, H, seed=1)
    y = layer(x)
    close(y, shard(full, layout))
    y.backward(shard(grad, layout))
    full.backward(grad)
    close(x.grad, whole.grad[..., start:stop])
    twin.check()


def qkv(make: Factory, layout: Layout, kv_heads: int) -> None:
    heads = 4
    layer = QKVLinear(make, "a", H, heads * HEAD, HEAD, kv_heads, bias=True, std=0.1)
    twin, whole = Twin(layer), leaf(draw(S, B, H))
    x = leaf(shard(whole, layout))
    q, k, v = F.linear(whole, twin["a.weight"], twin["a.bias"]).split(
        [heads * HEAD, kv_heads * HEAD, kv_heads * HEAD], -1
    )
    mine = range(layout.tp.rank * heads // layout.tp.size, (layout.tp.rank + 1) * heads // layout.tp.size)
    kv = sorted({h * kv_heads // heads for h in mine})
    wanted = [head_columns(q, mine), head_columns(k, kv), head_columns(v, kv)]
    got = layer(x)
    for a, b in zip(got, wanted, strict=True):
        close(a, b)
    # what attention does with them: each query head reads its own key and value head
    weights = [draw(*q.shape, seed=s) for s in (1, 2, 3)]
    full = sum(
        (t.unflatten(-1, (-1, HEAD)).repeat_interleave(heads // (t.shape[-1] // HEAD), -2).flatten(-2) * w).sum()
        for t, w in zip((q, k, v), weights, strict=True)
    )
    part = sum(
        (t.unflatten(-1, (-1, HEAD)).repeat_interleave(len(mine) // (t.shape[-1] // HEAD), -2).flatten(-2)
         * head_columns(w, mine)).sum()
        for t, w in zip(got, weights, strict=True)
    )  # fmt: skip
    part.backward()
    full.backward()
    close(x.grad, shard(whole.grad, layout))
    twin.check()


def head_columns(x: Tensor, heads: Any) -> Tensor:
    return torch.cat([x[..., h * HEAD : (h + 1) * HEAD] for h in heads], -1)


def embedding(make: Factory, layout: Layout) -> None:
    layer = VocabParallelEmbedding(make, "e", 32, H, 0.1)
    twin = Twin(layer)
    tokens = torch.randint(0, 32, (B, S), generator=torch.Generator().manual_seed(5))
    full = F.embedding(tokens.t(), twin["e.weight"])
    grad = draw(S, B, H, seed=1)
    y = layer(tokens)
    close(y, shard(full, layout))
    y.backward(shard(grad, layout))
    full.backward(grad)
    twin.check()


def norm(make: Factory, layout: Layout, kind: str) -> None:
    """Replicated weights that see a sequence shard under SP: the gradients are summed (NUM-05)."""
    model = dataclasses.replace(LLAMA if kind == "rmsnorm" else GPT, hidden_size=H)
    layer = Norm(make, "n", model)
    twin, whole = Twin(layer), leaf(draw(S, B, H))
    x = leaf(shard(whole, layout))
    if kind == "rmsnorm":
        full = F.rms_norm(whole, (H,), twin["n.weight"], model.norm_eps)
    else:
        full = F.layer_norm(whole, (H,), twin["n.weight"], twin["n.bias"], model.norm_eps)
    grad = draw(S, B, H, seed=1)
    y = layer(x)
    close(y, shard(full, layout))
    y.backward(shard(grad, layout))
    full.backward(grad)
    close(x.grad, shard(whole.grad, layout))
    twin.check()


def _check_layers(size: int) -> int:
    for sequence_parallel in (False, True):
        for kv_heads in (4, 2, 1):
            layout = create_layout(Sizes(tp=size), CPU, sequence_parallel=sequence_parallel, num_kv_heads=kv_heads)
            make = Factory(layout, torch.float32, 11)
            qkv(make, layout, kv_heads)
        for check in (column, row, embedding):
            check(make, layout)
        for kind in ("layernorm", "rmsnorm"):
            norm(make, layout, kind)
    return size


@pytest.mark.parametrize("size", [2, 4])
def test_layers_equal_plain_layers(world: Callable[..., list[Any]], size: int) -> None:
    assert world(_check_layers, size, n=size) == [size] * size
