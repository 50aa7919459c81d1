"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from gpt3d.config.schema import LrConfig


def lr_at(step: int, peak: float, lr: LrConfig, total_steps: int) -> float:
    """Learning rate of step `step` (the first is 0) of `total_steps`.

    Warm-up rises linearly and reaches `peak` on its last step. Then: constant; linear or cosine (Loshchilov and Hutter
    2017) down to `min_ratio * peak` at `decay_steps` and flat after it; or wsd (Hu et al. 2024): flat, and linear down
    over the last `decay_steps`.
    """
    if step < lr.warmup_steps:
        return peak * (step + 1) / lr.warmup_steps
    if lr.schedule == "constant":
        return peak
    if lr.schedule == "wsd":
        length = lr.decay_steps or max(1, total_steps // 10)
        progress = (step - (total_steps - length)) / length
        shape = 1.0 - min(max(progress, 0.0), 1.0)
    else:
        end = lr.decay_steps or total_steps
        progress = min((step - lr.warmup_steps) / max(1, end - lr.warmup_steps), 1.0)
        shape = 1.0 - progress if lr.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (lr.min_ratio + (1.0 - lr.min_ratio) * shape)
