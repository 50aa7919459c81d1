"""The feed-forward block with its inner dim cut over TP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gpt3d.config.schema import ModelConfig
from gpt3d.parallel.layers import ColumnParallelLinear, Factory, RowParallelLinear


class MLP(nn.Module):
    """GELU (tanh form, as GPT-2 and GPT-3) or SwiGLU (Shazeer 2020): [s, b, h] -> [s, b, h] ([s/t, b, h] under SP).

    SwiGLU's gate and up projections are one fused weight, global rows [gate; up].
    """

    def __init__(self, make: Factory, name: str, model: ModelConfig) -> None:
        super().__init__()
        self.gated = model.activation == "swiglu"
        rows = (model.ffn_hidden_size,) * (2 if self.gated else 1)
        up = "gate_up" if self.gated else "up"
        out_std = model.init_std / (2 * model.num_layers) ** 0.5
        self.up = ColumnParallelLinear(
            make, f"{name}.{up}", model.hidden_size, rows, bias=model.bias, std=model.init_std
        )
        self.down = RowParallelLinear(
            make, f"{name}.down", model.ffn_hidden_size, model.hidden_size, bias=model.bias, std=out_std
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            return self.down(F.silu(gate) * x)
        return self.down(F.gelu(x, approximate="tanh"))
