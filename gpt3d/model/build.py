"""From a config and a layout to this rank's part of the model."""

from __future__ import annotations

from torch import nn

from gpt3d.config.arithmetic import stage_layers
from gpt3d.config.schema import RunConfig
from gpt3d.model.gpt import GPTStage, OnBuilt, keep_whole
from gpt3d.parallel.layout import Layout
from gpt3d.pipeline.schedule import global_stage
from gpt3d.pipeline.stages import split_layers
from gpt3d.zero.engine import DTYPES


def build_chunks(config: RunConfig, layout: Layout, on_built: OnBuilt = keep_whole) -> list[nn.Module]:
    """The model chunks of this rank, lowest first. Initial values depend on `config.seed` alone, not on the layout."""
    stages, chunks = layout.sizes.pp, config.pipeline.chunks
    parts = split_layers(config.model.num_layers, stages * chunks, by_hand=stage_layers(config))
    built: list[nn.Module] = []
    for chunk in range(chunks):
        stage = global_stage(layout.at.pp, chunk, stages)
        built.append(
            GPTStage(
                config.model,
                layout,
                parts[stage],
                first=stage == 0,
                last=stage == stages * chunks - 1,
                seq_len=config.data.seq_len,
                dtype=DTYPES[config.precision.dtype],
                seed=config.seed,
                recompute=config.recompute,
                on_built=on_built,
            )
        )
    return built
