"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018)."""

from __future__ import annotations

import math

from gpt3d.config.schema import PrecisionConfig


class LossScaler:
    """Doubles the scale after `loss_scale_window` good steps, halves it after an overflow; constant 1 unless fp16.

    The norm that it judges is global, so all ranks decide alike without another message.
    """

    def __init__(self, precision: PrecisionConfig) -> None:
        self.dynamic = precision.dtype == "fp16"
        self.scale = precision.initial_loss_scale if self.dynamic else 1.0
        self.window, self.floor = precision.loss_scale_window, precision.min_loss_scale
        self.good_steps = 0

    def update(self, grad_norm: float) -> bool:
        """True when the step must be skipped because a gradient is not finite."""
        if math.isfinite(grad_norm):
            self.good_steps += 1
            if self.dynamic and self.good_steps % self.window == 0:
                self.scale *= 2.0
            return False
        self.good_steps = 0
        if self.dynamic:
            self.scale = max(self.scale / 2.0, self.floor)
        return True
