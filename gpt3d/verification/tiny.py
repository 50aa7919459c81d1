"""From a run's configuration to one that trains a tiny model of the same family in the same layout."""

from __future__ import annotations

import dataclasses
import math

from gpt3d.config.schema import ClusterConfig, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainerConfig
from gpt3d.verification.cases import CLIP, EPS, LR, SEQ, STEPS, VOCAB

HEAD_DIM, MIN_ROWS = 8, 8


def tiny_config(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The configuration to verify, and what the user should know about how it differs from theirs.

    Kept: the family of the model, parallel, pipeline, zero, precision, recompute. ZeRO's buckets become so small that a
    tiny model fills several.
    """
    notes = []
    parallel = dataclasses.replace(config.parallel, dp=config.parallel.dp or _default_dp(config))
    if config.parallel.dp is None:
        notes.append(f"parallel.dp=null is verified as parallel.dp={parallel.dp}")
    if config.parallel.layers_per_stage is not None:
        parallel.layers_per_stage = [min(count, 2) for count in config.parallel.layers_per_stage]
    if config.model.hidden_dropout or config.model.attention_dropout:
        notes.append("dropout is off: the plain process draws other masks")
    sequence = math.lcm(parallel.tp, SEQ)
    model = tiny_model(config, parallel.layers_per_stage, sequence)
    assert parallel.dp is not None
    microbatches = 2 * parallel.pp
    while microbatches * parallel.dp < MIN_ROWS:
        microbatches *= 2
    tiny = dataclasses.replace(
        config,
        model=model,
        parallel=parallel,
        zero=dataclasses.replace(
            config.zero,
            reduce_bucket_size=3000,
            allgather_bucket_size=5000,
            prefetch_bucket_size=2000,
            param_persistence_threshold=0,
        ),
        optimizer=OptimizerConfig(lr=LR, grad_clip=CLIP, eps=EPS),
        data=DataConfig(source="synthetic", seq_len=sequence),
        cluster=ClusterConfig(name="verify", device=config.cluster.device),
        trainer=TrainerConfig(steps=STEPS, global_batch_size=microbatches * parallel.dp, micro_batch_size=1),
        seed=7,
    )
    return tiny, notes


def tiny_model(config: RunConfig, layers_per_stage: list[int] | None, max_seq_len: int) -> ModelConfig:
    """The same family with heads of 8, two heads a rank, and two layers a stage."""
    model, tp = config.model, config.parallel.tp
    pieces = config.parallel.pp * config.pipeline.chunks
    # As many key/value heads a rank as ranks a head are what decides how they are cut: both are kept.
    heads = 2 * tp
    kv_heads = heads if model.num_kv_heads == model.num_heads else min(tp, model.num_kv_heads)
    return dataclasses.replace(
        model,
        name=f"tiny {model.name}",
        num_layers=sum(layers_per_stage) if layers_per_stage else max(4, 2 * pieces if pieces < 4 else pieces),
        hidden_size=heads * HEAD_DIM,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        ffn_hidden_size=3 * heads * HEAD_DIM // 2 * 2,
        vocab_size=VOCAB,
        vocab_multiple=math.lcm(16, tp),
        max_seq_len=max_seq_len,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _default_dp(config: RunConfig) -> int:
    """Two copies where ZeRO has something to shard."""
    return 2 if config.zero.stage else 1
