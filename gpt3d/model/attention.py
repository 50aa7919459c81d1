"""Causal self-attention with heads cut over TP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt3d.config.schema import ModelConfig
from gpt3d.model.documents import Context
from gpt3d.model.rotary import rotate
from gpt3d.parallel.layers import Factory, QKVLinear, RowParallelLinear
from gpt3d.parallel.random import derive, seed_default_generator

Rotary = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Multi-head or grouped-query attention: [s, b, h] -> [s, b, h] ([s/t, b, h] under SP).

    The core (scores, softmax, values) is torch's fused kernel and never stores the s x s scores; `recompute_core` runs
    it again in backward instead of keeping its output (selective recompute, Korthikanti et al. 2022).
    """

    def __init__(self, make: Factory, name: str, model: ModelConfig, recompute_core: bool) -> None:
        super().__init__()
        self.layout, self.head_dim = make.layout, model.head_dim
        self.dropout, self.recompute_core = model.attention_dropout, recompute_core
        rows = model.num_heads * model.head_dim
        out_std = model.init_std / (2 * model.num_layers) ** 0.5
        self.qkv = QKVLinear(
            make,
            f"{name}.qkv",
            model.hidden_size,
            rows,
            model.head_dim,
            model.num_kv_heads,
            bias=model.bias,
            std=model.init_std,
        )
        self.out = RowParallelLinear(make, f"{name}.out", rows, model.hidden_size, bias=model.bias, std=out_std)

    def forward(self, x: Tensor, rotary: Rotary | None, seed: int, context: Context | None = None) -> Tensor:
        q, k, v = self.qkv(x)
        if self.recompute_core and self.training:
            core = checkpoint(self.core, q, k, v, rotary, seed, context, use_reentrant=False, preserve_rng_state=False)
        else:
            core = self.core(q, k, v, rotary, seed, context)
        return self.out(core)

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary | None, seed: int, context: Context | None
    ) -> Tensor:
        """q [s, b, local heads x d], k and v [s, b, local kv heads x d] -> [s, b, local heads x d]."""
        s, b, _ = q.shape
        q, k, v = (x.view(s, b, -1, self.head_dim) for x in (q, k, v))
        if rotary is not None:
            cosine, sine = rotary[0][:s], rotary[1][:s]
            q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        p = self.dropout if self.training else 0.0
        if p > 0.0:  # heads differ between TP ranks, so do their masks
            seed_default_generator(q.device, derive(seed, self.layout.tp.rank))
        if context is not None:
            return context.attend(self, q, k, v, p).reshape(s, b, -1)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, heads, s, d]
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=grouped)
        return y.permute(2, 0, 1, 3).reshape(s, b, -1)
