"""A backward in two halves gives the same gradients, and parameters see it as one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gpt3d.model.block import Block
from gpt3d.model.rotary import rotary_table
from gpt3d.parallel.layers import Factory
from gpt3d.parallel.layout import single_process_layout
from gpt3d.parallel.split_backward import backward_input, splitting
from gpt3d.verification.cases import FAMILIES, SEQ

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def new_block(family: str, device: str, recompute: str = "none") -> tuple[Block, Tensor, Tensor]:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = FAMILIES[family]
    layout = single_process_layout(device)
    block = Block(Factory(layout, torch.float32, 1), 0, model, recompute)
    x = torch.randn(SEQ, 2, model.hidden_size, generator=torch.Generator().manual_seed(1)).to(device)
    return block, x.requires_grad_(), torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(device)


def run(block: Block, family: str, x: Tensor) -> Tensor:
    model = FAMILIES[family]
    return block(x, rotary_table(model, SEQ, x.device) if model.position == "rope" else None, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family, recompute", [("gpt", "none"), ("llama", "none"), ("llama", "selective")])
def test_halves_equal_the_whole(family: str, recompute: str, device: str) -> None:
    block, x, grad = new_block(family, device, recompute)
    run(block, family, x).backward(grad)
    assert x.grad is not None
    want_x, x.grad = x.grad, None
    want = {name: p.grad for name, p in block.named_parameters()}
    block.zero_grad()
    fired: list[nn.Parameter] = []
    for p in block.parameters():
        p.register_post_accumulate_grad_hook(fired.append)

    dx, later = backward_input(get_gradient_edge(run(block, family, x)), grad, x, list(block.parameters()))
    assert torch.equal(dx, want_x) and x.grad is None
    assert not splitting() and not fired
    assert len(later.postponed) == 4, "one for each matrix"
    assert {id(p) for p, _ in later.known} == {
        id(p) for name, p in block.named_parameters() if "norm" in name or "bias" in name
    }

    later.deliver()
    for name, p in block.named_parameters():
        assert torch.equal(p.grad, want[name]), name  # type: ignore[arg-type]
    assert sorted(map(id, fired)) == sorted(map(id, block.parameters()))
    assert not later.postponed and not later.known, "activations are let go"


def test_an_error_inside_leaves_no_trace() -> None:
    block, x, grad = new_block("gpt", "cpu")
    edge = get_gradient_edge(run(block, "gpt", x))
    with pytest.raises(RuntimeError):
        backward_input(edge, grad[1:], x, list(block.parameters()))
    assert not splitting()
    run(block, "gpt", x).backward(grad)
    assert block.mlp.down.weight.grad is not None
