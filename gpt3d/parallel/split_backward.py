"""A backward pass in two parts: the input gradient now, weight gradients later (zero-bubble schedules, Qi et al. 2023).

While `backward_input` runs, each linear layer hands in how to compute its weight gradient instead of computing it
(`weight_gradient`). Gradients of small parameters (norms, biases) cost next to nothing and are computed at once, but
no parameter sees any until `WeightGradients.deliver`: to hooks on parameters the whole is one ordinary backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass
class WeightGradients:
    """The weight gradients of one microbatch on their way: known ones, and how to compute the others."""

    known: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    postponed: list[tuple[GradientEdge, Callable[[], Tensor]]] = field(default_factory=list)

    def deliver(self) -> None:
        """Compute what is postponed and accumulate everything into the parameters, as one backward pass."""
        edges: list[Any] = [get_gradient_edge(parameter) for parameter, _ in self.known]
        grads = [grad for _, grad in self.known]
        with torch.no_grad():
            while self.postponed:
                edge, compute = self.postponed.pop()  # each closure's activations are freed once used
                edges.append(edge)
                grads.append(compute())
        self.known.clear()
        torch.autograd.backward(edges, grads)


_open: WeightGradients | None = None  # not thread-local: on CUDA autograd calls layers from a thread of its own


def splitting() -> bool:
    """Whether the running backward pass is only for input gradients."""
    return _open is not None


def weight_gradient(ctx: Any, position: int, compute: Callable[[], Tensor]) -> Tensor | None:
    """What a layer's backward returns for the weight at `position` of its inputs: the gradient, or None for now."""
    if not ctx.needs_input_grad[position]:
        return None
    if _open is None:
        return compute()
    node, output = ctx.next_functions[position]
    _open.postponed.append((GradientEdge(node, output), compute))
    return None


def backward_input(
    output: GradientEdge, grad: Tensor, x: Tensor, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, WeightGradients]:
    """The gradient of `x`, an input that `output` depends on, and those of `parameters` for later."""
    global _open
    gradients = _open = WeightGradients()
    try:
        dx, *others = torch.autograd.grad(output, [x, *parameters], grad, allow_unused=True)
    finally:
        _open = None
    gradients.known = [(p, g) for p, g in zip(parameters, others, strict=True) if g is not None]
    return dx, gradients
