"""Attention over other tokens than a whole causal row: what a layer is told, and documents that share a row."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Context(Protocol):
    """Which tokens a token may look at, when a row is not simply one causal text from position 0 on."""

    @property
    def position_ids(self) -> Tensor:
        """Position [b, s] of each token in its text."""

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Attention of `layer`: q [s, b, heads, d], k and v [s, b, kv heads, d] -> [s, b, heads, d]."""


@dataclass(frozen=True)
class Documents:
    """Where documents lie in the rows of a microbatch: a new one starts wherever `position_ids` [b, s] is 0.

    `bounds` are the starts of all of them in the flattened b*s tokens, and its end: on the host, and as `cu_seqlens`
    (int32) on the device; `longest` counts tokens.
    """

    position_ids: Tensor
    bounds: tuple[int, ...]
    cu_seqlens: Tensor
    longest: int

    @classmethod
    def of(cls, position_ids: Tensor, device: torch.device) -> Documents:
        """From position_ids on the host."""
        starts = (position_ids.flatten() == 0).nonzero().flatten().tolist()
        bounds = (*starts, position_ids.numel())
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
        longest = max(stop - start for start, stop in pairwise(bounds))
        return cls(position_ids.to(device, non_blocking=True), bounds, cu_seqlens, longest)

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Causal attention of each document by itself.

        One variable-length flash kernel on CUDA in half precision (it has no dropout); else one fused call a document,
        which costs less than attention over whole rows, since the cost is quadratic in the length.
        """
        s, b, heads, d = q.shape
        q, k, v = (x.transpose(0, 1).reshape(b * s, -1, d) for x in (q, k, v))
        grouped = k.shape[1] != heads
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0:
            from torch.nn.attention.varlen import varlen_attn

            at, most = self.cu_seqlens, self.longest
            y = varlen_attn(q, k, v, at, at, most, most, window_size=(-1, 0), enable_gqa=grouped)
            assert isinstance(y, Tensor)
        else:
            parts = []
            for start, stop in pairwise(self.bounds):
                heads_first = [x[start:stop].transpose(0, 1).unsqueeze(0) for x in (q, k, v)]  # [1, heads, length, d]
                part = F.scaled_dot_product_attention(
                    heads_first[0],
                    heads_first[1],
                    heads_first[2],
                    dropout_p=dropout,
                    is_causal=True,
                    enable_gqa=grouped,
                )
                parts.append(part.squeeze(0).transpose(0, 1))
            y = torch.cat(parts)
        return y.view(b, s, heads, d).transpose(0, 1)
