"""Where documents begin and end inside a microbatch, for attention that does not cross their boundaries."""

from __future__ import annotations

import torch
from torch import Tensor


def document_layout(tokens: Tensor, eod: int) -> tuple[Tensor, Tensor, int]:
    """Positions and boundaries of the documents in `tokens` [b, s]; one ends with each `eod` and with each row.

    Returns position_ids [b, s] int64, counted from each document's first token; cu_seqlens [n + 1] int32, the bounds of
    the n documents in the flattened b*s tokens (as varlen attention takes them); and the longest document's length.
    """
    rows, length = tokens.shape
    begins = torch.ones_like(tokens, dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-1] == eod
    column = torch.arange(length, device=tokens.device).expand(rows, length)
    position_ids = column - torch.where(begins, column, 0).cummax(dim=1).values
    starts = begins.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([starts, starts.new_tensor([rows * length])]).to(torch.int32)
    return position_ids, cu_seqlens, int(cu_seqlens.diff().max())
