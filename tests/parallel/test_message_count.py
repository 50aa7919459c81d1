"""How many collectives one attention block and one MLP block cost.

Without SP: one all-reduce forward, one backward (Shoeybi et al. 2019). With SP: one all-gather and one reduce-scatter
each way; backward gathers the input once more, beside the weight gradient, instead of keeping it whole (Korthikanti et
al. 2022). Replicated vectors (norms, row biases) add one all-reduce of [h] each under SP, backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt3d.model.attention import Attention
from gpt3d.model.block import Block
from gpt3d.model.mlp import MLP
from gpt3d.model.rotary import rotary_table
from gpt3d.parallel.layers import Factory
from gpt3d.parallel.layout import Sizes, create_layout
from gpt3d.verification.cases import GPT, LLAMA, SEQ
from tests.parallel.counting import counted_collectives

Counts = tuple[dict[str, int], dict[str, int]]


def count(run: Callable[[Tensor], Tensor], sequence: int, hidden: int) -> Counts:
    x = torch.randn(sequence, 2, hidden, requires_grad=True)
    with counted_collectives() as forward:
        y = run(x)
    with counted_collectives() as backward:
        y.backward(torch.ones_like(y))
    return dict(forward), dict(backward)


def _count(sequence_parallel: bool) -> dict[str, Counts]:
    layout = create_layout(Sizes(tp=2), torch.device("cpu"), sequence_parallel=sequence_parallel)
    make = Factory(layout, torch.float32, 1)
    sequence = SEQ // 2 if sequence_parallel else SEQ
    rotary = rotary_table(LLAMA, SEQ, layout.device)
    attention = Attention(make, "a", LLAMA, recompute_core=True)
    mlp = MLP(make, "m", LLAMA)
    gpt = dataclasses.replace(GPT, bias=True)
    whole: nn.Module = Block(make, 0, gpt, "none")
    return {
        "attention": count(lambda x: attention(x, rotary, 0), sequence, LLAMA.hidden_size),
        "mlp": count(mlp, sequence, LLAMA.hidden_size),
        "gpt block": count(lambda x: whole(x, None, 0), sequence, gpt.hidden_size),
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_messages_of_a_block(world: Callable[..., list[Any]], sequence_parallel: bool) -> None:
    for counts in world(_count, sequence_parallel, n=2):
        for block in ("attention", "mlp"):
            forward, backward = counts[block]
            if sequence_parallel:
                assert forward == {"all_gather_single": 1, "reduce_scatter_single": 1}
                assert backward == {"all_gather_single": 2, "reduce_scatter_single": 1}
            else:
                assert forward == backward == {"all_reduce": 1}
        forward, backward = counts["gpt block"]
        if sequence_parallel:
            vectors = 2 * 2 + 2  # weight and bias of two norms, two row biases
            assert forward == {"all_gather_single": 2, "reduce_scatter_single": 2}
            assert backward == {"all_gather_single": 4, "reduce_scatter_single": 2, "all_reduce": vectors}
        else:
            assert forward == backward == {"all_reduce": 2}
