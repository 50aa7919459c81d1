"""Decoding with kept keys and values: each token is computed once, whatever comes after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KeyValueCache:
    """Keys and values of `rows` texts of up to `length` tokens: a Context for forwards that go on where they ended.

    A token looks at what stands at its position in its text and before. So texts of different lengths share a batch,
    filled up on the right: what stands beyond a text's end is never looked at, and is overwritten when the text grows.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self.position_ids = torch.empty(0)
        self.stop = 0
        self.kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # by layer: [b, kv heads, length, d]

    def move_to(self, position_ids: Tensor, stop: int) -> None:
        """The next forward's tokens stand at `position_ids` [b, s] (on the device) of their texts, all below `stop`."""
        self.position_ids, self.stop = position_ids, stop

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Keep k and v of these tokens, and attend to all that this layer has kept."""
        if layer not in self.kept:
            shape = (self.rows, k.shape[2], self.length, k.shape[3])
            self.kept[layer] = (k.new_zeros(shape), v.new_zeros(shape))
        row = torch.arange(self.rows, device=q.device)[:, None]
        for kept, new in zip(self.kept[layer], (k, v), strict=True):
            kept[row, :, self.position_ids] = new.transpose(0, 1)  # [b, s, kv heads, d]
        keys, values = (kept[:, :, : self.stop] for kept in self.kept[layer])
        visible = torch.arange(self.stop, device=q.device) <= self.position_ids[:, :, None]  # [b, s, stop]
        y = F.scaled_dot_product_attention(
            q.permute(1, 2, 0, 3), keys, values, visible[:, None], enable_gqa=q.shape[2] != k.shape[2]
        )
        return y.permute(2, 0, 1, 3)
