"""One dictionary a logged step, made once; every sink shows the same numbers.

step              optimizer steps done
loss              nats per target token, mean over the tokens since the last line, over all ranks
lr                learning rate of this step
grad_norm         L2 norm of the gradient before clipping, over all axes
loss_scale        factor on the loss (fp16), else 1
skipped_steps     steps without an update so far (overflow, or a batch without targets)
tokens            target and context tokens consumed since the start of the run
tokens_per_s      over the time since the last line, without validation; over all ranks
tokens_per_s_per_device
tflops_per_device model TFLOP/s (10^12; no recompute counted, attention as the full square)
mfu               tflops_per_device over the device's peak, or null if that is not known
data_wait         share of the time spent waiting for data on this rank
memory_gb         highest memory in use on any rank (2^30 bytes): CUDA allocations, or the process on CPU
eta_s             seconds left at this speed
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from gpt3d.config.schema import RunConfig
from gpt3d.model.flops import model_flops_per_token

Metrics = dict[str, float | int | None]


@dataclass
class Meter:
    """Speeds over the steps since the last line; `pause` keeps validation out of them."""

    config: RunConfig
    devices: int
    peak_tflops: float | None

    def __post_init__(self) -> None:
        self.tokens_per_step = self.config.trainer.global_batch_size * self.config.data.seq_len
        self.flops_per_token = model_flops_per_token(self.config.model, self.config.data.seq_len)
        self._restart()

    def _restart(self) -> None:
        self.begun, self.paused, self.waited, self.steps = time.perf_counter(), 0.0, 0.0, 0

    def count(self, data_wait: float) -> None:
        """One more step, which waited `data_wait` seconds for its batch."""
        self.steps += 1
        self.waited += data_wait

    def pause(self, seconds: float) -> None:
        """Time that is not training."""
        self.paused += seconds

    def read(self, step: int) -> Metrics:
        """The speeds since the last call."""
        seconds = max(time.perf_counter() - self.begun - self.paused, 1e-9)
        rate = self.steps * self.tokens_per_step / seconds
        tflops = rate * self.flops_per_token / self.devices / 1e12
        left = (self.config.trainer.steps - step) * seconds / max(self.steps, 1)
        metrics: Metrics = {
            "tokens": step * self.tokens_per_step,
            "tokens_per_s": rate,
            "tokens_per_s_per_device": rate / self.devices,
            "tflops_per_device": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            "data_wait": self.waited / seconds,
            "eta_s": left,
        }
        self._restart()
        return metrics
