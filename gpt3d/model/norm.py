"""LayerNorm and RMSNorm over the hidden dim; replicated over TP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gpt3d.config.schema import ModelConfig
from gpt3d.parallel.layers import Factory, shared_by_region


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019): [s, b, h] -> [s, b, h]."""

    def __init__(self, make: Factory, name: str, model: ModelConfig) -> None:
        super().__init__()
        self.layout, self.eps = make.layout, model.norm_eps
        shape = (model.hidden_size,)
        self.weight = make.constant(make.replicated(f"{name}.weight", shape), 1.0)
        has_bias = model.norm == "layernorm"
        self.bias = make.constant(make.replicated(f"{name}.bias", shape), 0.0) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = shared_by_region(self.weight, self.layout)
        if self.bias is None:
            return F.rms_norm(x, (x.shape[-1],), weight, self.eps)
        return F.layer_norm(x, (x.shape[-1],), weight, shared_by_region(self.bias, self.layout), self.eps)
