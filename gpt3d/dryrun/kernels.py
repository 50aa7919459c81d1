"""Kernels that a GPU has and tensors without a device do not: what they allocate and what they keep.

Left to itself torch takes attention and RMSNorm apart where no fused kernel is known, and a dry run would count score
matrices and fp32 copies that no GPU ever holds. Everything else has the same shapes on every device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count


@torch.library.custom_op("gpt3d_dry::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Fused causal attention of q [b, heads, s, d]: the output, and the log-sum-exp of each row of scores (fp32)."""
    raise NotImplementedError


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("gpt3d_dry::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    raise NotImplementedError


@attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@register_flop_formula(torch.ops.gpt3d_dry.attention)
def _attention_flops(q: Any, k: Any, v: Any, **_: Any) -> int:
    """Both products over the whole square, as torch counts its own kernels; a causal mask leaves half of it."""
    return sdpa_flop_count(q, k, v)


@register_flop_formula(torch.ops.gpt3d_dry.attention_backward)
def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Five products: the kernel computes the scores again."""
    return sdpa_backward_flop_count(grad, q, k, v)


class FusedAttention(torch.autograd.Function):
    """Keeps q, k, v, the output and one fp32 number a row, as FlashAttention does (Dao 2023)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attention(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return attention_backward(grads[0], *ctx.saved_tensors)


class FusedRMSNorm(torch.autograd.Function):
    """Keeps its input and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return FusedAttention.apply(q, k, v)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float | None = None) -> Tensor:
    return FusedRMSNorm.apply(x, weight)


# What stands in for torch's functions, by the device whose kernels are meant. A CPU has no fused RMSNorm.
KERNELS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "cuda": {"scaled_dot_product_attention": _attention, "rms_norm": _rms_norm},
    "cpu": {"scaled_dot_product_attention": _attention},
}


@contextlib.contextmanager
def fused_kernels(device: str) -> Iterator[None]:
    """While open, functions that `device` has a fused kernel for allocate what the kernel would.

    Not a torch function mode: those are off inside torch.autograd.grad, where recompute calls the layers.
    """
    before = {name: getattr(F, name) for name in KERNELS[device]}
    try:
        for name, kernel in KERNELS[device].items():
            setattr(F, name, kernel)
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)
