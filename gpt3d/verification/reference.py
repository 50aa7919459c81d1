"""The same GPT in plain torch, one process, none of gpt3d's parallel code: what every layout must reproduce.

It takes a dict of full weights by canonical name and is written for obviousness: [batch, sequence, hidden] activations,
explicit softmax attention, F.cross_entropy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt3d.config.schema import ModelConfig

Weights = dict[str, Tensor]


def norm(w: Weights, name: str, x: Tensor, model: ModelConfig) -> Tensor:
    if model.norm == "layernorm":
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], model.norm_eps)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.norm_eps) * w[f"{name}.weight"]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def rope(x: Tensor, model: ModelConfig) -> Tensor:
    """x [b, heads, s, d]; Llama 3.1 scaling as published, one frequency at a time."""
    d, scaling = model.head_dim, model.rope_scaling
    frequencies = []
    for i in range(d // 2):
        f = model.rope_theta ** (-2 * i / d)
        wavelength = 2 * math.pi / f
        if scaling.factor != 1:
            longest = scaling.original_max_seq_len / scaling.low_freq_factor
            shortest = scaling.original_max_seq_len / scaling.high_freq_factor
            if wavelength > longest:
                f = f / scaling.factor
            elif wavelength >= shortest:
                smooth = (scaling.original_max_seq_len / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                f = (1 - smooth) * f / scaling.factor + smooth * f
        frequencies.append(f)
    angle = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * torch.tensor(frequencies)[None]
    real, imaginary = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([real * angle.cos() - imaginary * angle.sin(), imaginary * angle.cos() + real * angle.sin()], -1)


def attention(w: Weights, name: str, x: Tensor, model: ModelConfig) -> Tensor:
    b, s, _ = x.shape
    h, kv, d = model.num_heads, model.num_kv_heads, model.head_dim
    q, k, v = linear(w, f"{name}.qkv", x).split([h * d, kv * d, kv * d], -1)
    q, k, v = (t.view(b, s, -1, d).transpose(1, 2) for t in (q, k, v))
    if model.position == "rope":
        q, k = rope(q, model), rope(k, model)
    k, v = (t.repeat_interleave(h // kv, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(d)
    scores = scores.masked_fill(torch.triu(torch.ones(s, s, dtype=torch.bool), 1), float("-inf"))
    y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, h * d)
    return linear(w, f"{name}.out", y)


def mlp(w: Weights, name: str, x: Tensor, model: ModelConfig) -> Tensor:
    if model.activation == "swiglu":
        gate, up = linear(w, f"{name}.gate_up", x).chunk(2, -1)
        return linear(w, f"{name}.down", F.silu(gate) * up)
    return linear(w, f"{name}.down", F.gelu(linear(w, f"{name}.up", x), approximate="tanh"))


def logits(w: Weights, tokens: Tensor, model: ModelConfig) -> Tensor:
    x = w["embedding.word.weight"][tokens]
    if model.position == "learned":
        x = x + w["embedding.position.weight"][: tokens.shape[1]]
    for i in range(model.num_layers):
        x = x + attention(w, f"layers.{i}.attention", norm(w, f"layers.{i}.attention_norm", x, model), model)
        x = x + mlp(w, f"layers.{i}.mlp", norm(w, f"layers.{i}.mlp_norm", x, model), model)
    head = w["embedding.word.weight" if model.tied_embeddings else "head.weight"]
    return F.linear(norm(w, "final_norm", x, model), head[: model.vocab_size])


def summed_loss(w: Weights, tokens: Tensor, labels: Tensor, model: ModelConfig) -> Tensor:
    out = logits(w, tokens, model).float()
    return F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def train(
    weights: Weights, batches: Iterable[tuple[Tensor, Tensor]], model: ModelConfig, *, lr: float, clip: float,
    weight_decay: float = 0.1, eps: float = 1e-8,
) -> tuple[list[float], list[float], Weights]:  # fmt: skip
    """AdamW on whole global batches: losses per token, gradient norms before clipping, and the final weights."""
    w = {name: value.clone().requires_grad_(True) for name, value in weights.items()}
    decay = [p for p in w.values() if p.dim() > 1]
    plain = [p for p in w.values() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=eps)
    losses, norms = [], []
    for tokens, labels in batches:
        loss = summed_loss(w, tokens, labels, model) / (labels >= 0).sum()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(w.values()), clip or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: value.detach() for name, value in w.items()}
