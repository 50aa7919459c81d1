"""Sizes that follow from the configuration: ranks, replicas, microbatches, layers a stage. The one place for each."""

from __future__ import annotations

from dataclasses import dataclass

from gpt3d.config.schema import ClusterConfig, ModelConfig, RunConfig
from gpt3d.pipeline.stages import split_layers


@dataclass(frozen=True)
class World:
    """What is known about the machines before anything starts; None: not known.

    `ranks` and `ranks_per_node` come from a launcher's environment; without one (`ranks` None) the ranks are started on
    this machine. `gpus` are the visible ones here, `device` is cuda or cpu; GB are 2^30 bytes.
    """

    ranks: int | None = None
    ranks_per_node: int | None = None
    gpus: int | None = None
    device: str | None = None
    host_memory_gb: float | None = None
    gpu_name: str | None = None
    gpu_memory_gb: float | None = None


def device_of(cluster: ClusterConfig, world: World) -> str | None:
    """cuda or cpu: what the configuration asks for, else what the machine has; None while unknown."""
    return world.device if cluster.device == "auto" else cluster.device


def model_ranks(config: RunConfig) -> int:
    """Ranks of one copy of the model: tp x cp x pp."""
    return config.parallel.tp * config.parallel.cp * config.parallel.pp


def available_ranks(config: RunConfig, world: World) -> int | None:
    """Ranks there are: the launcher's, else the cluster's GPUs, else this machine's; None: as many as asked for."""
    if world.ranks is not None:
        return world.ranks
    if config.cluster.gpus_per_node is not None:
        return config.cluster.nodes * config.cluster.gpus_per_node
    if device_of(config.cluster, world) == "cuda" and world.gpus:
        return config.cluster.nodes * world.gpus
    return None


def resolve_dp(config: RunConfig, world: World) -> int:
    """Data-parallel degree: `parallel.dp`, or what remains of the world (at least 1; rules check that it divides)."""
    if config.parallel.dp is not None:
        return config.parallel.dp
    available = available_ranks(config, world)
    return 1 if available is None else max(1, available // model_ranks(config))


def total_ranks(config: RunConfig, world: World) -> int:
    """Ranks of the whole run: tp x cp x pp x dp."""
    return model_ranks(config) * resolve_dp(config, world)


def num_microbatches(config: RunConfig, dp: int) -> int:
    """Microbatches of one step on each model copy: global / (micro x dp). Exact once the rules have passed."""
    return config.trainer.global_batch_size // (config.trainer.micro_batch_size * dp)


def stage_layers(config: RunConfig) -> list[int]:
    """Layers of each of the pp x chunks pieces, in model order; piece i lies on stage i % pp. Exact if rules passed."""
    p, pieces = config.parallel, config.parallel.pp * config.pipeline.chunks
    if p.layers_per_stage is not None:
        return list(p.layers_per_stage)
    layers = max(config.model.num_layers, pieces)
    return [len(held) for held in split_layers(layers, pieces, p.embedding_layers, p.head_layers)]


def even_split(layers: int, pieces: int) -> list[int]:
    """Layers of each piece, the most even split; the first and last are the smaller: they hold embedding and head."""
    split, short = [-(-layers // pieces)] * pieces, -(-layers // pieces) * pieces - layers
    for i in sorted(range(pieces), key=lambda i: min(i, pieces - 1 - i))[:short]:
        split[i] -= 1
    return split


def tp_splits_heads(model: ModelConfig, tp: int) -> bool:
    """Each rank gets whole query heads, and whole KV heads or one copied KV head."""
    kv = model.num_kv_heads
    return model.num_heads % tp == 0 and (kv % tp == 0 or tp % kv == 0)


def legal_tp(model: ModelConfig) -> list[int]:
    """Every tensor-parallel degree this model can have."""
    return [
        tp
        for tp in range(1, model.num_heads + 1)
        if tp_splits_heads(model, tp) and model.ffn_hidden_size % tp == 0 and model.padded_vocab_size % tp == 0
    ]


def multiples_around(value: int, step: int) -> list[int]:
    """The nearest positive multiples of `step` below and above `value`."""
    below = value // step * step
    return [below, below + step] if below else [step]
