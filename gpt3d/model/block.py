"""One transformer layer, pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

from __future__ import annotations

from torch import Tensor, nn

from gpt3d.config.schema import ModelConfig
from gpt3d.model.attention import Attention, Rotary
from gpt3d.model.documents import Context
from gpt3d.model.mlp import MLP
from gpt3d.model.norm import Norm
from gpt3d.parallel.layers import Factory
from gpt3d.parallel.layout import Layout
from gpt3d.parallel.random import derive, dropout


class Block(nn.Module):
    """[s, b, h] -> [s, b, h] ([s/t, b, h] in and out under SP). `index` is the layer's number in the whole model."""

    def __init__(self, make: Factory, index: int, model: ModelConfig, recompute: str) -> None:
        super().__init__()
        self.layout, self.index, self.dropout = make.layout, index, model.hidden_dropout
        name = f"layers.{index}"
        self.attention_norm = Norm(make, f"{name}.attention_norm", model)
        self.attention = Attention(make, f"{name}.attention", model, recompute == "selective")
        self.mlp_norm = Norm(make, f"{name}.mlp_norm", model)
        self.mlp = MLP(make, f"{name}.mlp", model)

    def forward(self, x: Tensor, rotary: Rotary | None, seed: int, context: Context | None = None) -> Tensor:
        seeds = [derive(seed, self.index, site) for site in range(3)]
        p = self.dropout if self.training else 0.0
        y = self.attention(self.attention_norm(x), rotary, seeds[0], context)
        x = x + hidden_dropout(y, p, seeds[1], self.layout)
        return x + hidden_dropout(self.mlp(self.mlp_norm(x)), p, seeds[2], self.layout)


def hidden_dropout(x: Tensor, p: float, seed: int, layout: Layout) -> Tensor:
    """Dropout on the residual stream: TP ranks agree where they hold the same activation, not on sequence shards."""
    return dropout(x, p, derive(seed, layout.tp.rank) if layout.sequence_parallel else seed) if p else x
