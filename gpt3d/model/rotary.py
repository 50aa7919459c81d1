"""Rotary position embedding (Su et al. 2021), with the frequency scaling of Llama 3.1 (Dubey et al. 2024)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpt3d.config.schema import ModelConfig


def rotary_frequencies(model: ModelConfig) -> Tensor:
    """Angle per position for each pair of dims, fp32 [head_dim / 2].

    Llama 3.1: wavelengths longer than original/low_freq_factor are stretched by `factor`, shorter than
    original/high_freq_factor are kept, those between are blended linearly.
    """
    exponent = torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim
    frequency = 1.0 / (model.rope_theta**exponent)
    scaling = model.rope_scaling
    if scaling.factor == 1.0:
        return frequency
    turns = scaling.original_max_seq_len * frequency / (2 * math.pi)  # full turns within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequency * (keep + (1.0 - keep) / scaling.factor)


def rotary_table(
    model: ModelConfig, seq_len: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [s, 1, 1, head_dim], computed in fp32; `dtype` is that of the activations they turn.

    Rounded here, once: rounded in each layer, autograd would keep a copy for each layer and microbatch.
    """
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float32), rotary_frequencies(model))
    angle = torch.cat([angle, angle], dim=-1)[:, None, None, :].to(device)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the dims (i, i + head_dim/2) of x [s, b, heads, head_dim] by their position's angle; all of one dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine
