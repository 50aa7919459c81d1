"""Bit-equal repetitions on CUDA (`debug.deterministic`): torch's deterministic kernels and cuBLAS's fixed workspace."""

from __future__ import annotations

import os

import torch


def make_deterministic(seed: int) -> None:
    """Ask torch for deterministic algorithms; an operation that has none is named in a warning. Before CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; 24 MB a stream
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # would write ZeRO's buckets, gigabytes, to no use
    torch.backends.cudnn.benchmark = False
    torch.manual_seed(seed)
