"""Layouts to choose from: TP x PP x schedule x chunks x micro batch x recompute x ZeRO x offload; DP is what remains.

What changes the training (global batch, sequence, precision) stays as given. A key that isn't free stays as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product

from gpt3d.config.arithmetic import even_split, legal_tp
from gpt3d.config.auto import AUTO
from gpt3d.config.schema import ParallelConfig, PipelineConfig, RunConfig, TrainerConfig, ZeroConfig

ALL = frozenset(AUTO)
MICRO_BATCHES = (1, 2, 4, 8, 16)
OFFLOADS = {0: [("none", "none")], 1: [("none", "none"), ("cpu", "none")]}
OFFLOADS |= {2: OFFLOADS[1], 3: [*OFFLOADS[1], ("cpu", "cpu")]}


def candidates(
    config: RunConfig, ranks: int, free: Collection[str] = ALL, leanest: bool = False
) -> Iterator[tuple[RunConfig, int]]:
    """Legal layouts of `ranks` GPUs with their dp; `leanest`: only the free settings that need the least memory."""
    recomputes = [config.recompute]
    if "recompute" in free:
        recomputes = ["full"] if leanest else ["none", "selective", "full"]
    for parallel, pipeline, dp in _sizes(config, ranks, free):
        for trainer in _micro_batches(config, free, dp, parallel.pp if pipeline.schedule == "interleaved" else 1):
            for recompute, zero in product(recomputes, _zeros(config, free, dp, leanest)):
                yield (
                    replace(
                        config, parallel=parallel, pipeline=pipeline, trainer=trainer, zero=zero, recompute=recompute
                    ),
                    dp,
                )
            if leanest and "trainer.micro_batch_size" in free:
                break


def _sizes(
    config: RunConfig, ranks: int, free: Collection[str]
) -> Iterator[tuple[ParallelConfig, PipelineConfig, int]]:
    """Sizes with their schedule: tp groups lie within a node, every piece has a layer, and the batch divides."""
    p, model = config.parallel, config.model
    per_node = config.cluster.gpus_per_node or ranks
    tps = legal_tp(model) if "parallel.tp" in free else [p.tp]
    for tp in tps:
        crosses = ranks > per_node and per_node % tp
        if ranks % tp or (crosses and not p.allow_cross_node_tp):
            continue
        divides = config.data.seq_len % tp == 0
        sequence_parallel = p.sequence_parallel
        if "parallel.tp" in free:
            sequence_parallel = tp > 1 and divides and (p.sequence_parallel or config.search)
        pps = range(1, min(model.num_layers, ranks // tp) + 1) if "parallel.pp" in free else [p.pp]
        for pp in pps:
            dp = ranks // tp // pp
            if not dp or ranks // tp % pp or config.trainer.global_batch_size % dp:
                continue
            if p.dp not in (None, dp) and not config.search:
                continue
            for pipeline in _schedules(config, free, pp):
                parallel = replace(p, tp=tp, pp=pp, dp=dp, sequence_parallel=sequence_parallel)
                if "parallel.pp" not in free:
                    yield parallel, pipeline, dp
                elif (dealt := _dealt(config, parallel, pp * pipeline.chunks)) is not None:
                    yield dealt, pipeline, dp


def _schedules(config: RunConfig, free: Collection[str], pp: int) -> Iterator[PipelineConfig]:
    """Schedules for pp stages; chunks leave equal pieces, or only the two ends a layer short."""
    given, layers = config.pipeline, config.model.num_layers
    if "pipeline.schedule" not in free:
        if given.chunks == 1 or (pp > 1 and pp * given.chunks <= layers):
            yield given
        return
    yield PipelineConfig("1f1b", 1)
    if pp > 1:
        yield PipelineConfig("gpipe", 1)
        yield PipelineConfig("zb_h1", 1)
        for chunks in range(2, layers // pp + 1):
            if -layers % (pp * chunks) <= 2:
                yield PipelineConfig("interleaved", chunks)


def _dealt(config: RunConfig, parallel: ParallelConfig, pieces: int) -> ParallelConfig | None:
    """Layers over the pieces: as the user dealt them (None: not into that many), else as evenly as can be."""
    given = parallel.layers_per_stage
    if not config.search and given is not None:
        return parallel if len(given) == pieces else None
    if not config.search and parallel.embedding_layers + parallel.head_layers:
        return parallel
    split = even_split(config.model.num_layers, pieces)
    return replace(parallel, layers_per_stage=split, embedding_layers=0.0, head_layers=0.0)


def _micro_batches(config: RunConfig, free: Collection[str], dp: int, multiple: int) -> Iterator[TrainerConfig]:
    """Batches whose number of microbatches is whole, and a multiple of `multiple`."""
    sizes = MICRO_BATCHES if "trainer.micro_batch_size" in free else [config.trainer.micro_batch_size]
    each = config.trainer.global_batch_size // dp
    for micro in sizes:
        if each % micro == 0 and each // micro % multiple == 0:
            yield replace(config.trainer, micro_batch_size=micro)


def _zeros(config: RunConfig, free: Collection[str], dp: int, leanest: bool) -> Iterator[ZeroConfig]:
    """ZeRO stages with what they may offload."""
    if "zero.stage" not in free:
        yield config.zero
        return
    for stage in [3] if leanest else range(4):
        if dp == 1 and stage > 1 and not leanest:
            continue  # nothing to shard: stage 1 is there for its offload
        for optimizer, parameters in OFFLOADS[stage][-1:] if leanest else OFFLOADS[stage]:
            yield replace(config.zero, stage=stage, offload_optimizer=optimizer, offload_param=parameters)
