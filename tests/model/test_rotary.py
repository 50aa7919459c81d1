"""Rotary tables are rounded once, and kept once, however many layers turn by them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gpt3d.model.build import build_chunks
from gpt3d.parallel.layout import single_process_layout
from gpt3d.verification.cases import SEQ, Case


def test_autograd_keeps_one_table_for_all_layers() -> None:
    config = Case(family="llama", dtype="bf16").config()
    config.model = dataclasses.replace(config.model, num_layers=3)
    (model,) = build_chunks(config, single_process_layout())
    kept: set[int] = set()

    def keep(x: Tensor) -> Tensor:
        if tuple(x.shape) == (SEQ, 1, 1, config.model.head_dim):
            assert x.dtype == torch.bfloat16
            kept.add(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(torch.zeros(2, SEQ, dtype=torch.long), 0, torch.zeros(2, SEQ, dtype=torch.long))
    assert len(kept) == 2, "cosines and sines"
