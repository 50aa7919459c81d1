"""What forward and backward hold beside weights, gradients and optimizer, as this model's layers allocate it.

Korthikanti et al. 2022, table 2, corrected to what the layers really save, and what a layer needs while it runs its
backward. A dry run counts the same on the layers themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpt3d.config.arithmetic import num_microbatches, stage_layers
from gpt3d.config.schema import ModelConfig, RunConfig
from gpt3d.model.flops import layer_parameters, norm_parameters
from gpt3d.pipeline.schedule import Kind
from gpt3d.planner.dtypes import BYTES
from gpt3d.planner.moments import Moment, moments
from gpt3d.planner.partition import Passing, gradient_bytes, has_bf16_optimizer, passing


def layer_activations(
    model: ModelConfig,
    micro_batch: int,
    seq_len: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    element: int = 2,
    flash: bool = True,
    on_cpu: bool = False,
) -> int:
    """Bytes that one layer keeps of one microbatch for its backward pass; `element` is the size of a number.

    With 2-byte numbers, ffn 4h, dropout and no flash attention this is sbh(34 + 5as/h); flash attention never holds the
    5as/h part, the attention matrix and its dropout mask.
    """
    tokens, h = micro_batch * seq_len, model.hidden_size
    outside = tp if sequence_parallel else 1
    if recompute == "full":
        return tokens * h * element // outside
    query, kv = model.num_heads * model.head_dim // tp, max(model.num_kv_heads // tp, 1) * model.head_dim
    # Inputs of two norms, of QKV and of the MLP, and two 1-byte dropout masks: whole on every tp rank without SP.
    whole = 2 * (h * element + _norm(model, element, on_cpu)) + (2 * h if model.hidden_dropout else 0)
    # The output of QKV, in one piece, and the core's output; the fused kernel keeps rotated queries and keys as well.
    rotated = query + kv if model.position == "rope" and recompute == "none" else 0
    attention = (2 * query + 2 * kv + rotated) * element
    # GELU keeps its input and output; SwiGLU gate, up, silu(gate) and their product.
    mlp = (4 if model.activation == "swiglu" else 2) * model.ffn_hidden_size // tp * element
    matrix = 0
    if not flash and recompute == "none":
        scores = model.num_heads // tp * seq_len
        matrix = scores * (2 * element + 1 if model.attention_dropout else element)
    if recompute == "none":
        matrix += 4 * model.num_heads // tp if flash else 0  # its log-sum-exp
    return tokens * (whole // outside + attention + mlp + matrix)


def _norm(model: ModelConfig, element: int, on_cpu: bool) -> int:
    """Bytes a token that a norm keeps: its input; torch's RMSNorm on a CPU keeps that and the result, both in fp32."""
    return model.hidden_size * (8 if on_cpu and model.norm == "rmsnorm" else element)


class Sizes(NamedTuple):
    """Bytes of one microbatch on one rank."""

    shard: int  # activations between layers, [s/t, b, h] under SP
    full: int  # the same of all tokens, [s, b, h]
    inner: int  # one tensor of the MLP's inner width, [s, b, f/t]
    projected: int  # queries, keys and values
    query: int
    logits: int  # numbers, not bytes


class Chunk(NamedTuple):
    """Bytes that a microbatch keeps on a chunk until its backward, and until its weight gradients; and parameters."""

    kept: int
    postponed: int
    weights: int


@dataclass
class Rank:
    """What `fullest_moment` looks at: one rank of a configuration. What it works out, it works out once."""

    config: RunConfig
    dp: int
    stage: int
    copy: int  # which of the dp ranks
    on_cpu: bool
    flash: bool

    @cached_property
    def element(self) -> int:
        return BYTES[self.config.precision.dtype]

    @cached_property
    def sizes(self) -> Sizes:
        c, tp = self.config, self.config.parallel.tp
        tokens = c.trainer.micro_batch_size * c.data.seq_len
        query, kv = c.model.num_heads * c.model.head_dim // tp, max(c.model.num_kv_heads // tp, 1) * c.model.head_dim
        full, inner = tokens * c.model.hidden_size, tokens * c.model.ffn_hidden_size // tp
        e, shard = self.element, full // (tp if self.sp else 1)
        logits = tokens * (c.model.padded_vocab_size // tp)
        return Sizes(e * shard, e * full, e * inner, e * tokens * (query + 2 * kv), e * tokens * query, logits)

    @property
    def sp(self) -> bool:
        return self.config.parallel.sequence_parallel and self.config.parallel.tp > 1

    @property
    def cast(self) -> int:
        """Bytes a number of each weight gradient's copy in the accumulator's type. DeepSpeed makes none."""
        grad = BYTES[self.config.precision.grad_dtype]
        return grad if self.config.zero.stage == 0 and grad != self.element else 0

    def layer(self, recompute: str) -> int:
        """What one layer keeps."""
        c = self.config
        return layer_activations(
            c.model, c.trainer.micro_batch_size, c.data.seq_len, c.parallel.tp, self.sp, recompute, self.element,
            self.flash, self.on_cpu,
        )  # fmt: skip

    @cached_property
    def layers(self) -> list[int]:
        """Layers of each chunk."""
        return stage_layers(self.config)[self.stage :: self.config.parallel.pp]

    def is_last(self, chunk: int) -> bool:
        return self.stage == self.config.parallel.pp - 1 and chunk == self.config.pipeline.chunks - 1

    def _kept(self, chunk: int) -> int:
        """Activations of a microbatch on a chunk: its layers', on the last one the final norm's input and output."""
        c, size = self.config, self.layers[chunk] * self.layer(self.config.recompute)
        if self.is_last(chunk):
            rows = c.trainer.micro_batch_size * c.data.seq_len // (c.parallel.tp if self.sp else 1)
            size += self.sizes.shard + rows * _norm(c.model, self.element, self.on_cpu)
        return size

    def _postponed(self, chunk: int) -> int:
        """What weight gradients that come later need: each matrix's input and output gradient."""
        s, c = self.sizes, self.config
        gates = 2 if c.model.activation == "swiglu" else 1
        one = 2 * s.shard + 2 * s.full + s.projected + s.query + (1 + gates) * s.inner
        return self.layers[chunk] * one + (s.shard + self.element * s.logits if self.is_last(chunk) else 0)

    def _weights(self, chunk: int) -> int:
        """Parameters of a chunk."""
        c, rows = self.config, vocabulary_weight(self.config)
        count = self.layers[chunk] * layer_parameters(c.model, c.parallel.tp)
        if self.stage == 0 and chunk == 0:
            count += rows + (c.model.max_seq_len * c.model.hidden_size if c.model.position == "learned" else 0)
        if self.is_last(chunk):
            count += norm_parameters(c.model) + (0 if c.model.tied_embeddings and c.parallel.pp == 1 else rows)
        return count

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The chunks of this rank."""
        count = self.config.pipeline.chunks
        return [Chunk(self._kept(i), self._postponed(i), self._weights(i)) for i in range(count)]

    @property
    def parameters(self) -> int:
        return sum(chunk.weights for chunk in self.chunks)

    @property
    def gradients(self) -> int:
        """Bytes of the gradients that this rank keeps on its device."""
        return gradient_bytes(self.config, self.dp, self.parameters)

    @cached_property
    def passing(self) -> list[Passing]:
        """What DeepSpeed takes for a while as gradients come, beside its buckets."""
        return list(passing(self.config, self.dp, self.stage, self.parameters, self.copy))

    def backward_work(self, split: bool) -> int:
        """The most that the backward of a layer needs beyond what forward kept of it, less what it has freed.

        Steps: the down projection and its weight gradient; the activation function; the up projection likewise. A split
        backward leaves the weights out, and frees nothing that they need.
        """
        s, c, gates = self.sizes, self.config, 2 if self.config.model.activation == "swiglu" else 1
        gathered = s.full if self.sp else 0
        down = 0 if split else c.model.ffn_hidden_size // c.parallel.tp * c.model.hidden_size
        again, up = self.layer("none") - s.shard if c.recompute == "full" else 0, gates * down
        gone = 0 if split else 2 * gates * s.inner
        one, two = self.element, self.element + self.cast
        return (
            again
            + s.shard
            + max(
                gathered + s.inner + down * one,
                (s.inner if split else 0) + down * two,
                gates * s.inner,
                gates * s.inner + gathered + s.full + up * one - gone + (s.shard if self.sp else 0),
                s.shard + up * two - gone,
            )
        )


def vocabulary_weight(config: RunConfig) -> int:
    """Parameters of the embedding, or of the head, on one rank."""
    return config.model.padded_vocab_size // config.parallel.tp * config.model.hidden_size


def largest_weight(config: RunConfig, stage: int) -> int:
    """Parameters of the largest matrix of a stage on one rank."""
    model, tp = config.model, config.parallel.tp
    up = (2 if model.activation == "swiglu" else 1) * model.ffn_hidden_size // tp * model.hidden_size
    return max(up, vocabulary_weight(config) if stage in (0, config.parallel.pp - 1) else 0)


Point = tuple[int, int, int, int]  # activations, logits, work, and bytes of gradients not there by then


def _points(rank: Rank) -> list[Point]:
    """Wherever in a step they may be most."""
    c = rank.config
    count = max(1, num_microbatches(c, rank.dp))
    found = moments(c.pipeline.schedule, c.parallel.pp, c.pipeline.chunks, count, rank.stage)
    points = [point for moment in found for point in _at(rank, moment)]
    taking = found if c.zero.stage > 1 else [_last_backward(c, graded=count > 1)]
    points += [point for x in rank.passing for moment in taking for point in _with_passing(rank, x, moment)]
    return points


def fullest_moment(rank: Rank) -> Point:
    """The point of a step at which they are most together."""
    return max(_points(rank), key=lambda point: point[0] + point[1] + point[2] - point[3])


def most_activations(config: RunConfig, dp: int, stage: int, flash: bool = True) -> int:
    """Bytes of activations when they themselves are most, whatever else there is by then."""
    return max(point[0] for point in _points(Rank(config, dp, stage, dp - 1, False, flash)))


def _last_backward(config: RunConfig, graded: bool) -> Moment:
    """The start of the last action of a step, the only one in which ZeRO-1 reduces gradients."""
    chunks, split = config.pipeline.chunks, config.pipeline.schedule == "zb_h1" and config.parallel.pp > 1
    one, none = (1, *[0] * (chunks - 1)), (0,) * chunks
    kind = Kind.BACKWARD_WEIGHT if split else Kind.BACKWARD
    return Moment(kind, 0, False, none if split else one, one if split else none, (graded,) * chunks)


def _with_passing(rank: Rank, passing: Passing, moment: Moment) -> list[Point]:
    """The points of a backward in which DeepSpeed has just taken that."""
    if moment.kind in (Kind.FORWARD, Kind.BACKWARD_INPUT):
        return []
    made = passing.before if moment.kind is Kind.BACKWARD and not moment.ending else 0.0
    gone = int(made * rank.chunks[moment.chunk].kept)
    left = 0.0 if rank.config.zero.stage == 2 else 1.0 - made  # stage 2's part is there with its first gradient
    points = [point for point in _at(rank, moment) if not point[1]]  # with logits no gradient is there yet
    return [(a - gone, logits, work + passing.size, int(left * missing)) for a, logits, work, missing in points]


def _at(rank: Rank, moment: Moment) -> list[Point]:
    """The same for the fullest points of one moment."""
    s, c, kind, chunk = rank.sizes, rank.config, moment.kind, moment.chunk
    split, final = kind is Kind.BACKWARD_INPUT, c.pipeline.chunks - 1
    counts = zip(rank.chunks, moment.held, moment.postponed, strict=True)
    kept = sum(held * part.kept + postponed * part.postponed for part, held, postponed in counts)
    whole = c.zero.stage == 0 or (c.zero.stage == 1 and not has_bf16_optimizer(c))
    grad = BYTES[c.precision.grad_dtype] if whole else 0
    missing = grad * sum(part.weights for part, there in zip(rank.chunks, moment.graded, strict=True) if not there)
    if c.zero.stage == 2 and not any(moment.graded):
        missing = rank.gradients
    messages = 3 * s.shard if c.parallel.pp > 1 else 0
    others = moment.held[final] - (0 if moment.ending else 1) if rank.is_last(final) else 0
    logits = 4 * s.logits * max(0, others)  # the softmax of microbatches whose backward is to come
    element, two = rank.element, rank.element + rank.cast
    head, made = vocabulary_weight(c), s.logits * (4 + (element if element < 4 else 0))
    last = rank.is_last(chunk)
    if kind is Kind.FORWARD:
        return [(kept, logits + (made if last else 0), messages + s.shard, missing)]
    if kind is Kind.BACKWARD_WEIGHT:
        # All of the chunk's gradients are made before any is accumulated.
        return [(kept, logits, messages + (rank.chunks[chunk].weights if moment.ending else head) * two, missing)]
    work = rank.backward_work(split)
    if moment.ending:
        own = 0 if split else grad * layer_parameters(c.model, c.parallel.tp)  # this layer's gradients are being made
        again = 0 if split else rank.layer(c.recompute)
        points = [(kept, logits, messages + again + work, missing + own)]
        if rank.stage == 0 and chunk == 0:
            points.append((kept, logits, messages + head * two, missing))
        return points
    points = [(kept, logits, messages + work, missing)]
    if last:
        gathered = s.full if rank.sp else 0
        points.append((kept, logits + made, messages, missing))
        if not split:
            points.append((kept, logits + element * s.logits, messages + s.full + gathered + head * element, missing))
            points.append((kept, logits, messages + s.shard + head * two, missing))
    return points
