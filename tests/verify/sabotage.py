"""Rank bodies that train with one deliberate fault. Each rank is a fresh process, so the damage ends with it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

import gpt3d.model.build
import gpt3d.model.norm
import gpt3d.zero.replicated
from gpt3d.config.schema import RunConfig
from gpt3d.parallel.layout import Group, Layout
from gpt3d.pipeline.stages import split_layers
from gpt3d.verification.compare import RankResult, train_rank


def no_tied_sum(config: RunConfig) -> RankResult:
    """The two copies of the tied embedding keep their own gradients."""
    from gpt3d.zero.deepspeed_engine import DeepSpeedEngine

    DeepSpeedEngine._sum_tied_gradients = lambda self: None  # type: ignore[method-assign]
    return train_rank(config)


def no_norm_sum(config: RunConfig) -> RankResult:
    """Norm weights under sequence parallelism keep the gradient of this rank's tokens only."""

    def alone(parameter: Tensor, layout: Layout) -> Tensor:
        return parameter

    gpt3d.model.norm.shared_by_region = alone
    return train_rank(config)


def no_data_average(config: RunConfig) -> RankResult:
    """Replicas never exchange gradients."""
    from gpt3d.zero.replicated import ReplicatedEngine

    ReplicatedEngine._average_gradients = lambda self: None  # type: ignore[method-assign]
    return train_rank(config)


def swapped_stages(config: RunConfig) -> RankResult:
    """The layers of the stages lie in reverse order."""

    def swapped(*args: Any, **kwargs: Any) -> list[range]:
        return split_layers(*args, **kwargs)[::-1]

    gpt3d.model.build.split_layers = swapped
    return train_rank(config)


def norm_without_rank_1(config: RunConfig) -> RankResult:
    """Rank 1 adds nothing to the gradient norm (ZeRO-0)."""
    original = gpt3d.zero.replicated.all_reduce

    def without(x: Tensor, group: Group, *args: Any) -> Tensor:
        return original(torch.zeros_like(x) if os.environ["RANK"] == "1" else x, group, *args)

    gpt3d.zero.replicated.all_reduce = without
    return train_rank(config)


def deepspeed_norm_without_rank_1(config: RunConfig) -> RankResult:
    """The same for DeepSpeed's flags."""
    import gpt3d.zero.deepspeed_engine as engine

    mark = engine.mark_counted

    def without(module: nn.Module) -> None:
        mark(module)
        if os.environ["RANK"] == "1":
            for p in module.parameters():
                p.model_parallel, p.ds_pipe_replicated = False, True  # type: ignore[attr-defined]

    engine.mark_counted = without
    return train_rank(config)
