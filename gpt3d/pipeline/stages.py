"""Which layers live on which global stage. The first also holds the embedding, the last the final norm and the head."""

from __future__ import annotations

from collections.abc import Sequence


def split_layers(
    num_layers: int,
    stages: int,
    embedding_weight: float = 0.0,
    head_weight: float = 0.0,
    by_hand: Sequence[int] | None = None,
) -> list[range]:
    """The layers of each global stage (`stages` is pipeline ranks x chunks), in order, each layer once.

    The most loaded stage is loaded as little as can be; `embedding_weight` and `head_weight` count the ends as so many
    layers. Or `by_hand`: the number of layers of each stage (`parallel.layers_per_stage`). ValueError if it can't be.
    """
    if by_hand is None:
        counts = _balanced(num_layers, stages, embedding_weight, head_weight)
    else:
        counts = _by_hand(list(by_hand), num_layers, stages)
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def stage_table(
    layers: Sequence[range],
    pipeline_ranks: int,
    parameters: Sequence[int] | None = None,
    tied_embeddings: bool = False,
) -> str:
    """The split as text for the log: global stage, rank, chunk, layers, other modules, and parameters if given."""
    rows = [["stage", "rank", "chunk", "layers", "also"] + (["parameters"] if parameters is not None else [])]
    for stage, held in enumerate(layers):
        chunk, rank = divmod(stage, pipeline_ranks)
        text = f"{held.start}-{held.stop - 1} ({len(held)})" if held else "none"
        also = ["embedding"] if stage == 0 else []
        if stage == len(layers) - 1:
            also += ["final norm", "head (tied to the embedding)" if tied_embeddings else "head"]
        count = [f"{parameters[stage]:,}"] if parameters is not None else []
        rows.append([str(stage), str(rank), str(chunk), text, ", ".join(also) or "-", *count])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _balanced(num_layers: int, stages: int, embedding_weight: float, head_weight: float) -> list[int]:
    """One layer each, then one by one to the least loaded stage: optimal, since all layers weigh the same."""
    if num_layers < stages:
        raise ValueError(
            f"model.num_layers={num_layers} cannot fill {stages} pipeline stages (parallel.pp x pipeline.chunks): "
            f"each needs a layer; use at most {num_layers} stages"
        )
    if min(embedding_weight, head_weight) < 0:
        raise ValueError(f"weights in layers must be >= 0, got embedding {embedding_weight}, head {head_weight}")
    counts, load = [1] * stages, [1.0] * stages
    load[0] += embedding_weight
    load[-1] += head_weight
    for _ in range(num_layers - stages):
        # At equal load the ends come last, which hold modules that a weight of 0 leaves out: the head is the heavier.
        stage = min(range(stages), key=lambda s: (load[s], s == stages - 1, s == 0, s))
        counts[stage] += 1
        load[stage] += 1
    return counts


def _by_hand(counts: list[int], num_layers: int, stages: int) -> list[int]:
    """`counts` as given; ValueError unless there is one for each stage and they add up."""
    example = _balanced(num_layers, stages, 0, 0) if num_layers >= stages else None
    hint = f"; for example {example}" if example else ""
    key = f"parallel.layers_per_stage={counts}"
    if len(counts) != stages:
        raise ValueError(
            f"{key} has {len(counts)} entries for {stages} stages (parallel.pp x pipeline.chunks, "
            f"chunk 0 of all ranks first){hint}"
        )
    if sum(counts) != num_layers:
        raise ValueError(f"{key} adds up to {sum(counts)} layers, but model.num_layers={num_layers}{hint}")
    # An end may be left to its embedding or head; a stage between them without a layer would have no parameters.
    if min(counts) < 0 or 0 in counts[1:-1]:
        raise ValueError(f"{key}: only the first and the last stage may be without a layer, and none below 0{hint}")
    return counts
