"""The pipeline of a configuration in words and numbers, before anything runs. Pure Python."""

from __future__ import annotations

from gpt3d.config.arithmetic import num_microbatches, stage_layers
from gpt3d.config.schema import RunConfig
from gpt3d.pipeline.schedule import all_ranks
from gpt3d.pipeline.simulate import simulate
from gpt3d.pipeline.stages import split_layers, stage_table
from gpt3d.planner.memory import piece_parameters


def stage_text(config: RunConfig) -> str:
    """The stage table for the log: which rank holds which layers and modules, and parameters a tensor-parallel rank."""
    counts = stage_layers(config)
    return stage_table(
        split_layers(sum(counts), len(counts), by_hand=counts),
        config.parallel.pp,
        piece_parameters(config),
        config.model.tied_embeddings,
    )


def ideal_bubble(config: RunConfig, dp: int) -> float:
    """Idle share of the schedule with equal stages, a backward twice a forward, and messages that take no time."""
    stages, chunks = config.parallel.pp, config.pipeline.chunks
    return simulate(all_ranks(config.pipeline.schedule, stages, chunks, num_microbatches(config, dp)), 1, 2).bubble
