"""What a rank moves in one step, by group and collective. Pure arithmetic.

Bytes are those of the whole buffer of a call: the tensor that is reduced or sent, what all ranks of an all-gather end
up with, what each of a reduce-scatter brings. Over a ring each of d ranks sends (d - 1) / d of it, in an all-reduce
twice (Rajbhandari et al. 2020, section 7). A dry run counts the same on the real layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from gpt3d.config.arithmetic import num_microbatches, stage_layers
from gpt3d.config.schema import RunConfig
from gpt3d.planner.dtypes import BYTES
from gpt3d.planner.memory import piece_parameters, size


class Call(NamedTuple):
    """A collective (all-reduce, all-gather, reduce-scatter, send, receive) and its group: tp, dp, pp (neighbouring
    stages), kv (copies of key/value heads), ends (the two copies of a tied embedding), model (tp x pp)."""

    group: str
    kind: str


class Traffic:
    """Calls and their bytes, as they add up."""

    def __init__(self) -> None:
        self.calls: Counter[Call] = Counter()
        self.bytes: Counter[Call] = Counter()

    def __add__(self, other: Traffic) -> Traffic:
        both = Traffic()
        both.calls, both.bytes = self.calls + other.calls, self.bytes + other.bytes
        return both

    def add(self, group: str, kind: str, each: int, times: int = 1) -> None:
        """`times` calls of `each` bytes."""
        if times and each:
            self.calls[Call(group, kind)] += times
            self.bytes[Call(group, kind)] += times * each


def sent(kind: str, count: int, ranks: int) -> int:
    """Bytes that each rank of a ring sends for a buffer of `count` bytes."""
    if kind in ("send", "receive"):
        return count if kind == "send" else 0
    return count * (ranks - 1) * (2 if kind == "all-reduce" else 1) // ranks


def rank_traffic(config: RunConfig, dp: int, stage: int) -> Traffic:
    """All that a rank of this pipeline stage moves in one step."""
    pp, pieces, count = config.parallel.pp, config.parallel.pp * config.pipeline.chunks, num_microbatches(config, dp)
    traffic = Traffic()
    for piece in range(stage, pieces, pp):
        if config.parallel.tp > 1:
            _layers(traffic, config, count * stage_layers(config)[piece])
            if piece == 0:
                _embedding(traffic, config, count)
            if piece == pieces - 1:
                _head(traffic, config, count)
        if pp > 1:
            _neighbours(traffic, config, count * (piece > 0), count * (piece < pieces - 1))
    return traffic + step_traffic(config, dp, stage)


def _shared(traffic: Traffic, config: RunConfig, vectors: int, times: int) -> None:
    """Under SP each rank sees some tokens only, so it has part of the gradient of `vectors` [h] that all hold."""
    for _ in range(vectors if config.parallel.sequence_parallel else 0):
        traffic.add("tp", "all-reduce", config.model.hidden_size * BYTES[config.precision.dtype], times)


def _activation(config: RunConfig) -> int:
    """Bytes of the activations of a microbatch between two layers."""
    tokens = config.trainer.micro_batch_size * config.data.seq_len
    return tokens * config.model.hidden_size * BYTES[config.precision.dtype]


def _layers(traffic: Traffic, config: RunConfig, times: int) -> None:
    """Forward and backward of `times` layers: two matrix pairs, and recompute."""
    model, tp, full = config.model, config.parallel.tp, _activation(config)
    # Recompute stops where the last saved tensor is back: with dropout that is behind the last collective.
    again = (2 if model.hidden_dropout else 1) if config.recompute == "full" else 0
    if config.parallel.sequence_parallel:
        gathers = 2 + 2 * 2 + (2 if config.recompute == "full" else 0)
        traffic.add("tp", "all-gather", full, gathers * times)
        traffic.add("tp", "reduce-scatter", full, (2 + 2 + again) * times)
    else:
        traffic.add("tp", "all-reduce", full, (2 + 2 + again) * times)
    norms = 2 * (2 if model.norm == "layernorm" else 1)
    _shared(traffic, config, norms + (2 if model.bias else 0), times)
    if tp > model.num_kv_heads:
        rows, element = 2 * model.head_dim, BYTES[config.precision.dtype]
        traffic.add("kv", "all-reduce", rows * model.hidden_size * element, times)
        traffic.add("kv", "all-reduce", rows * element, times if model.bias else 0)


def _embedding(traffic: Traffic, config: RunConfig, times: int) -> None:
    if not config.parallel.sequence_parallel:
        traffic.add("tp", "all-reduce", _activation(config), times)
        return
    traffic.add("tp", "reduce-scatter", _activation(config), times)
    traffic.add("tp", "all-gather", _activation(config), times)
    if config.model.position == "learned":
        row = config.model.hidden_size * BYTES[config.precision.dtype]
        traffic.add("tp", "all-gather", config.data.seq_len * row, times)


def _head(traffic: Traffic, config: RunConfig, times: int) -> None:
    """Final norm, projection, and the cross-entropy: a maximum, a sum and the target's logit, fp32 a token."""
    if config.parallel.sequence_parallel:
        traffic.add("tp", "all-gather", _activation(config), 2 * times)
        traffic.add("tp", "reduce-scatter", _activation(config), times)
    else:
        traffic.add("tp", "all-reduce", _activation(config), times)
    _shared(traffic, config, 2 if config.model.norm == "layernorm" else 1, times)
    tokens = config.trainer.micro_batch_size * config.data.seq_len
    traffic.add("tp", "all-reduce", 4 * tokens, times)
    traffic.add("tp", "all-reduce", 8 * tokens, times)


def _neighbours(traffic: Traffic, config: RunConfig, below: int, above: int) -> None:
    """Messages with the stages below and above: an activation one way, its gradient back."""
    message = _activation(config) // (config.parallel.tp if config.parallel.sequence_parallel else 1)
    traffic.add("pp", "send", message, below + above)
    traffic.add("pp", "receive", message, below + above)


def step_traffic(config: RunConfig, dp: int, stage: int) -> Traffic:
    """What the layers have no part in: the tied embedding's copies, the gradient norm, the replicas."""
    traffic = Traffic()
    model, tp, pp = config.model, config.parallel.tp, config.parallel.pp
    if model.tied_embeddings and pp > 1 and stage in (0, pp - 1):
        rows = model.padded_vocab_size // tp * model.hidden_size
        traffic.add("ends", "all-reduce", rows * BYTES[config.precision.grad_dtype])
    if tp * pp > 1:
        traffic.add("model", "all-reduce", 4)
    parameters = sum(piece_parameters(config)[stage::pp])
    for kind, each, times in zero_traffic(config, dp, config.zero.stage, parameters):
        traffic.add("dp", kind, each, times)
    return traffic


def zero_traffic(config: RunConfig, dp: int, stage: int, parameters: int) -> Iterator[tuple[str, int, int]]:
    """(collective, bytes, times) over the replicas of a rank with so many parameters, under ZeRO `stage`.

    Stages 0 and 1 reduce gradients once a step, 2 and 3 with each microbatch. Stages 1 and 2 gather parameters once a
    step, 3 twice a microbatch (forward and backward), and once more where the backward is split. DeepSpeed does it
    bucket by bucket; here a pass over all parameters is one call.
    """
    if dp == 1:
        return
    count, split = num_microbatches(config, dp), config.pipeline.schedule == "zb_h1" and config.parallel.pp > 1
    gradients, weights = (parameters * BYTES[d] for d in (config.precision.grad_dtype, config.precision.dtype))
    if stage == 0:
        yield "all-reduce", gradients, 1
        return
    yield "reduce-scatter", gradients, 1 if stage == 1 else count
    yield "all-gather", weights, 1 if stage < 3 else count * (3 if split else 2)


def zero_bytes(config: RunConfig, dp: int, stage: int) -> int:
    """Bytes that the fullest rank sends to its replicas in one step under ZeRO `stage`."""
    pp, pieces = config.parallel.pp, piece_parameters(config)
    parameters = max(sum(pieces[rank::pp]) for rank in range(pp))
    return sum(sent(kind, times * each, dp) for kind, each, times in zero_traffic(config, dp, stage, parameters))


def zero_cost(config: RunConfig, dp: int) -> Iterator[str]:
    """A note where ZeRO-2 or 3 meets several microbatches: what that costs in bytes and what would be cheaper."""
    stage, count = config.zero.stage, num_microbatches(config, dp)
    if stage < 2 or dp == 1 or count == 1:
        return
    now, once = zero_bytes(config, dp, stage), zero_bytes(config, dp, 1)
    work = "reduces gradients" if stage == 2 else "gathers parameters and reduces gradients"
    cheaper = [f"zero=1 sends {size(once)}"]
    if stage == 3:
        cheaper.append(f"zero=2 {size(zero_bytes(config, dp, 2))}")
    yield (
        f"ZeRO-{stage} {work} for each of {count} microbatches: {size(now)} sent a step by the fullest rank; "
        f"{', '.join(cheaper)}, if that fits; fewer, larger microbatches (trainer.micro_batch_size) also send less"
    )
