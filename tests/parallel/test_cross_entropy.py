"""Vocab-parallel cross-entropy against F.cross_entropy, and the memory it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt3d.parallel.layers import vocab_parallel_cross_entropy
from gpt3d.parallel.layout import Sizes, create_layout, single_process_layout
from tests.parallel.counting import Allocations, saved_for_backward

S, B = 6, 3


def draw(vocab: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [s, b, v], labels [s, b] with ignored ones, and a weight per token."""
    generator = torch.Generator().manual_seed(vocab)
    logits = scale * torch.randn(S, B, vocab, generator=generator)
    labels = torch.randint(0, vocab, (S, B), generator=generator)
    labels[0], labels[3, 1] = -100, -1
    return logits, labels, torch.rand(S, B, generator=generator)


def compare(size: int, rank: int, layout: Any, padded: int, vocab: int, scale: float, dtype: torch.dtype) -> None:
    """`padded` columns of which `vocab` are real; the padding holds the largest logits of all."""
    logits, labels, weight = draw(vocab, scale)
    logits = logits.to(dtype)
    full = logits.float().clone().requires_grad_(True)
    want = F.cross_entropy(full.flatten(0, 1), labels.clamp(min=-1).flatten(), ignore_index=-1, reduction="none")
    (want * weight.flatten()).sum().backward()
    local = torch.cat([logits, torch.full((S, B, padded - vocab), 1e4, dtype=dtype)], -1).chunk(size, -1)[rank]
    x = local.clone().requires_grad_(True)
    got = vocab_parallel_cross_entropy(x * 1, labels, layout, vocab)
    (got * weight).sum().backward()
    assert got.dtype == torch.float32 and x.grad is not None and full.grad is not None
    close = {"rtol": 1e-5, "atol": 1e-5 if dtype == torch.float32 else 2e-5}
    torch.testing.assert_close(got.flatten(), want, **close)
    gradient = torch.cat([full.grad, torch.zeros(S, B, padded - vocab)], -1).chunk(size, -1)[rank]
    rounding = 0 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(x.grad.float(), gradient, rtol=1e-5 + rounding, atol=1e-6)
    assert bool((x.grad[labels < 0] == 0).all()), "ignored tokens give no gradient"


def _compare_all(size: int) -> int:
    layout = create_layout(Sizes(tp=size), torch.device("cpu"))
    for padded, vocab in [(64, 64), (64, 61), (64, 33), (64, 15)]:  # at TP 4 one, two and three ranks hold padding only
        for scale in (1.0, 300.0):
            compare(size, layout.tp.rank, layout, padded, vocab, scale, torch.float32)
        compare(size, layout.tp.rank, layout, padded, vocab, 3.0, torch.bfloat16)
    return size


@pytest.mark.parametrize("size", [2, 4])
def test_equals_plain_cross_entropy(world: Callable[..., list[Any]], size: int) -> None:
    assert world(_compare_all, size, n=size) == [size] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_process(dtype: torch.dtype) -> None:
    compare(1, 0, single_process_layout(), 64, 61, 1.0, dtype)


def _memory(dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Bytes of (this rank's logits in fp32, kept for backward, highest of new storages, largest one)."""
    layout = create_layout(Sizes(tp=2), torch.device("cpu"))
    tokens, shard = 64, 4096
    x = torch.randn(tokens, 1, shard, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 2 * shard, (tokens, 1))
    logits = x * 1
    with Allocations() as made, saved_for_backward() as kept:
        loss = vocab_parallel_cross_entropy(logits, labels, layout, 2 * shard).sum()
    with made:
        torch.autograd.grad(loss, logits)
    return tokens * shard * 4, sum(kept.values()), made.peak, made.largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeps_at_most_one_fp32_copy_of_its_shard(world: Callable[..., list[Any]], dtype: torch.dtype) -> None:
    """fp32 logits are overwritten: nothing of their size is new. bf16: one fp32 copy, and in backward the gradient."""
    for shard, kept, peak, largest in world(_memory, dtype, n=2):
        small = shard // 50
        assert shard <= kept <= shard + small
        assert largest <= shard, "never the logits of all ranks on one"
        assert peak <= (small if dtype == torch.float32 else shard * 3 // 2 + small)
