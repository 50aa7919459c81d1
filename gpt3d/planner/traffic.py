"""What ZeRO moves over the data-parallel ranks in one step when it works once a microbatch. Pure arithmetic.

Ring collectives: of a buffer of n bytes each of d ranks sends n (d - 1) / d (Rajbhandari et al. 2020, section 7).
"""

from __future__ import annotations

from collections.abc import Iterator

from gpt3d.config.arithmetic import num_microbatches
from gpt3d.config.schema import RunConfig
from gpt3d.planner.memory import BYTES, piece_parameters, size


def zero_bytes(config: RunConfig, dp: int, stage: int) -> int:
    """Bytes that the fullest rank sends to its replicas in one step under ZeRO `stage`.

    Stages 0 and 1 reduce gradients once a step, 2 and 3 with each microbatch. Stages 1 and 2 gather parameters once a
    step, 3 twice a microbatch (forward and backward), and once more where the backward is split.
    """
    pp, count = config.parallel.pp, num_microbatches(config, dp)
    pieces = piece_parameters(config)
    parameters = max(sum(pieces[rank::pp]) for rank in range(pp))
    reduced = parameters * BYTES[config.precision.grad_dtype]
    gathered = parameters * BYTES[config.precision.dtype]
    split = config.pipeline.schedule == "zb_h1" and pp > 1
    times = {0: (2, 0), 1: (1, 1), 2: (count, 1), 3: (count, count * (3 if split else 2))}
    reductions, gathers = times[stage]
    return (reductions * reduced + gathers * gathered) * (dp - 1) // dp


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
