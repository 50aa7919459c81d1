"""What DeepSpeed takes for a while as gradients come, under ZeRO 1 to 3 (its stage_1_and_2.py and stage3.py).

A full bucket is reduced from copies. Where stages 1 and 2 sum gradients in the parameters' own type, each backward
copies the rank's part of them into a new buffer, and adds it to the sum when it is over: for a while there are two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gpt3d.config.arithmetic import num_microbatches, stage_layers
from gpt3d.config.schema import RunConfig
from gpt3d.model.flops import layer_parameters
from gpt3d.planner.dtypes import BYTES


class Passing(NamedTuple):
    """`size` bytes; `before`: the share of its layers that a backward has been through, at the least, by then."""

    size: int
    before: float


def has_own_type(config: RunConfig) -> bool:
    """Whether DeepSpeed sums gradients of ZeRO-1 and 2 in the parameters' type, not in an fp32 buffer made for them."""
    return config.zero.stage in (1, 2) and config.precision.grad_dtype == config.precision.dtype


def has_bf16_optimizer(config: RunConfig) -> bool:
    """Whether ZeRO-1 is DeepSpeed's BF16_Optimizer: whole fp32 gradients in one flat buffer, reduced in place."""
    zero, precision = config.zero, config.precision
    mixed = precision.dtype == "bf16" and precision.grad_dtype == "fp32"
    return zero.stage == 1 and mixed and zero.offload_optimizer == "none"


def matrices(config: RunConfig, stage: int) -> list[int]:
    """Elements of the parameters of a stage that decay, on one rank, in the order of the model."""
    model, tp, pp = config.model, config.parallel.tp, config.parallel.pp
    query, kv = model.num_heads * model.head_dim // tp, max(model.num_kv_heads // tp, 1) * model.head_dim
    up = (2 if model.activation == "swiglu" else 1) * model.ffn_hidden_size // tp
    joined = [query, 2 * kv] if tp > model.num_kv_heads else [query + 2 * kv]  # heads that several ranks copy
    layer = [model.hidden_size * width for width in (*joined, query, up, model.ffn_hidden_size // tp)]
    rows = model.padded_vocab_size // tp * model.hidden_size
    found = layer * sum(stage_layers(config)[stage::pp])
    if stage == 0:
        positions = [model.max_seq_len * model.hidden_size] if model.position == "learned" else []
        found = [rows, *positions, *found]
    if stage == pp - 1 and not (model.tied_embeddings and pp == 1):
        found.append(rows)
    return found


def part_of(config: RunConfig, dp: int, stage: int, parameters: int, copy: int) -> int:
    """Elements in the buffer of data-parallel rank `copy`: all parameters with one in its part, each in whole."""
    sizes = matrices(config, stage)
    total, position, held = sum(sizes), 0, 0
    cut = -(-total // dp)
    for size in sizes:
        held += size if position < (copy + 1) * cut and position + size > copy * cut else 0
        position += size
    return held + -(-(parameters - total) // dp)


def gradient_bytes(config: RunConfig, dp: int, parameters: int) -> int:
    """Bytes of gradients on a rank's device when all are there; `passing` has what whole parameters are beyond it.

    With the optimizer offloaded, gradients are summed on the host from stage 2 on, but for stage 2's fp32 sums.
    """
    zero, grad = config.zero, BYTES[config.precision.grad_dtype]
    if zero.stage < 2:
        return parameters * grad
    on_host = zero.offload_optimizer == "cpu" and (zero.stage == 3 or has_own_type(config))
    return 0 if on_host else -(-parameters * grad // dp)


def host_bytes(config: RunConfig, dp: int, stage: int, parameters: int, copy: int) -> int:
    """Bytes that data-parallel rank `copy` keeps in its machine's memory.

    With the optimizer: fp32 master, two moments and an fp32 gradient. Besides, stages 1 and 2 have the updated weights
    in the parameters' type and room for the largest gradient, stage 2 the sum of several microbatches where it is of
    that type, in whole parameters; stage 3 has the sum.
    """
    zero, element, grad = config.zero, BYTES[config.precision.dtype], BYTES[config.precision.grad_dtype]
    share, size = -(-parameters // dp), 0
    if zero.offload_param == "cpu":
        size += share * element
    if zero.offload_optimizer == "none":
        return size
    if zero.stage == 3:
        return size + share * (16 + grad)
    size += share * (16 + element) + largest(config, stage) * element
    if zero.stage == 2 and has_own_type(config) and num_microbatches(config, dp) > 1:
        size += part_of(config, dp, stage, parameters, copy) * element
    return size


def largest(config: RunConfig, stage: int) -> int:
    """Elements of the largest parameter of a stage on one rank."""
    return max(matrices(config, stage), default=0)


def passing(config: RunConfig, dp: int, stage: int, parameters: int, copy: int) -> Iterator[Passing]:
    """What data-parallel rank `copy` takes, with `parameters` on its stage.

    Gradients come from the last parameter to the first, so the last rank takes its buffer first. A bucket is reduced
    when the next gradient does not fit into it; gradients larger than a bucket go alone.
    """
    zero, element, grad = config.zero, BYTES[config.precision.dtype], BYTES[config.precision.grad_dtype]
    if zero.stage == 0 or has_bf16_optimizer(config):
        return
    sizes, layers = matrices(config, stage), sum(stage_layers(config)[stage :: config.parallel.pp])
    if not layers:
        return
    total, bucket, most = sum(sizes), min(zero.reduce_bucket_size, parameters), max(sizes)
    head = sizes[-1] if stage == config.parallel.pp - 1 and not config.model.tied_embeddings else 0

    def before(elements: int) -> float:
        """The share of the layers whose gradients are among the last `elements` and those of a filled bucket."""
        made = max(0, elements - head) + max(0, bucket - most)
        return min(1.0, made / (layers * layer_parameters(config.model, config.parallel.tp)))

    after = max(0, total - (copy + 1) * -(-total // dp))  # elements of parameters behind the rank's part
    cast, alone = grad if grad != element else 0, most if most > bucket else 0
    joined = bucket * (grad if zero.stage == 3 else element + cast)
    yield Passing(max(joined, alone * cast), before(0))
    if has_own_type(config) and zero.contiguous_gradients and zero.offload_optimizer == "none":
        size = part_of(config, dp, stage, parameters, copy) * element
        if zero.stage == 2:  # the first one becomes the sum
            size = size * min(2, num_microbatches(config, dp)) - gradient_bytes(config, dp, parameters)
        yield Passing(size, before(after))
    if zero.stage == 1 and not has_own_type(config):  # fp32 sums: a flat buffer of the rank's part
        yield Passing(-(-parameters // dp) * grad, before(after))
