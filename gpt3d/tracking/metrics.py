"""One dictionary a logged step, made once; every sink shows the same numbers. METRICS names them all."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

from gpt3d.config.schema import RunConfig
from gpt3d.model.flops import hardware_flops_per_token, model_flops_per_token

Metrics = dict[str, float | int | None]

EMA_DECAY = 0.99  # a step
LARGEST_EXPONENT = 700.0  # exp of more is no float


class Metric(NamedTuple):
    """`group`: the section of a tracker's page. docs/metrics.md has the same table."""

    group: str
    unit: str
    meaning: str


METRICS = {
    "step": Metric("", "steps", "optimizer steps done; the x axis of everything"),
    "loss": Metric("train", "nats per target token", "mean over all tokens since the last line, over all ranks"),
    "loss_ema": Metric("train", "nats per target token", "moving average of `loss`, weight 0.99 a step, debiased"),
    "lr": Metric("train", "", "learning rate of this step"),
    "grad_norm": Metric("train", "", "L2 norm of the whole model's gradient before clipping"),
    "parameter_norm": Metric("train", "", "L2 norm of the whole model's weights, as forward uses them"),
    "loss_scale": Metric("train", "", "factor on the loss (fp16), else 1"),
    "skipped_steps": Metric("train", "steps", "without an update so far (overflow, or a batch without targets)"),
    "validation_loss": Metric("validation", "nats per target token", "mean over `trainer.eval_batches` batches"),
    "validation_perplexity": Metric("validation", "", "exp(`validation_loss`)"),
    "validation_tokens": Metric("validation", "target tokens", "that `validation_loss` is the mean of"),
    "unigram_entropy": Metric("validation", "nats per token", "of the held-out text: what token frequencies give"),
    "tokens": Metric("progress", "tokens", "consumed since the start of the run"),
    "samples": Metric("progress", "sequences", "consumed since the start of the run"),
    "eta_s": Metric("progress", "s", "left at this speed"),
    "tokens_per_s": Metric("speed", "tokens/s", "of all ranks, over real time without validation and checkpoints"),
    "tokens_per_s_per_device": Metric("speed", "tokens/s", "`tokens_per_s` over the number of ranks"),
    "tflops_per_device": Metric("speed", "10^12 FLOP/s", "that the model needs: full attention square, no recompute"),
    "mfu": Metric("speed", "share", "`tflops_per_device` of the device's peak; null if that is not known"),
    "hfu": Metric("speed", "share", "as `mfu`, with what recompute does again"),
    "step_s": Metric("speed", "s", "one step, mean over the steps since the last line"),
    "data_wait": Metric("speed", "share of step_s", "waiting for the batch, on rank 0"),
    "forward_backward": Metric("speed", "share of step_s", "the pipeline schedule with its bubble, on rank 0"),
    "optimizer": Metric("speed", "share of step_s", "reduction of gradients, norm, clipping and update, on rank 0"),
    "logging": Metric("speed", "share of step_s", "making the last line and handing it to the sinks, on rank 0"),
    "pipeline_bubble": Metric("speed", "share of forward_backward", "idle stages in this step; null without pipeline"),
    "tp_bytes": Metric("traffic", "bytes a step", "sent over TP by the fullest rank, counted as they are issued"),
    "pp_bytes": Metric("traffic", "bytes a step", "sent over PP by the fullest rank, counted as messages are sent"),
    "dp_bytes": Metric("traffic", "bytes a step", "sent over DP by the fullest rank, counted as DeepSpeed issues them"),
    "memory_gb": Metric("memory", "2^30 bytes", "highest so far on any rank: CUDA allocations; the process on CPU"),
    "memory_now_gb": Metric("memory", "2^30 bytes", "as `memory_gb`, at this moment"),
    "host_memory_gb": Metric("memory", "2^30 bytes", "highest resident size so far of any rank's process"),
    "host_memory_now_gb": Metric("memory", "2^30 bytes", "as `host_memory_gb`, at this moment"),
    "memory_gb_stage_N": Metric("memory", "2^30 bytes", "`memory_gb` of pipeline stage N (with `parallel.pp` > 1)"),
    "memory_now_gb_stage_N": Metric("memory", "2^30 bytes", "`memory_now_gb` of pipeline stage N"),
    "host_memory_gb_stage_N": Metric("memory", "2^30 bytes", "`host_memory_gb` of pipeline stage N"),
    "host_memory_now_gb_stage_N": Metric("memory", "2^30 bytes", "`host_memory_now_gb` of pipeline stage N"),
    "node_cpu_N": Metric("nodes", "processes", "runnable per CPU of machine N (`tracking.node_metrics`)"),
    "node_memory_N": Metric("nodes", "share", "host memory of machine N in use"),
    "node_gpu_N": Metric("nodes", "share", "of the time that the GPUs of machine N compute; null if NVML does not say"),
    "node_gpu_watts_N": Metric("nodes", "W", "drawn by a GPU of machine N, mean over its ranks"),
    "gradient_norm_layer_N": Metric("layers", "", "L2 norm of layer N's gradient (`tracking.layer_norms_interval`)"),
    "gradient_norm_embedding": Metric("layers", "", "the same of the embeddings, a tied output layer included"),
    "gradient_norm_head": Metric("layers", "", "the same of the final norm and an untied output layer"),
    "activation_rms_layer_N": Metric("layers", "", "root mean square of layer N's output, over all tokens of the step"),
}  # fmt: skip


def metric(name: str) -> Metric:
    """The entry of a key as it is logged. Raises KeyError for one that nobody has documented."""
    stem, _, number = name.rpartition("_")
    return METRICS[f"{stem}_N" if number.isdigit() else name]


def grouped(metrics: Metrics) -> dict[str, float | int]:
    """As trackers want them: `train/loss` for loss, `step` as it is, and nothing that has no finite value."""
    found = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
    return {"/".join(filter(None, (metric(name).group, name))): value for name, value in found.items()}


def perplexity(loss: float) -> float:
    """exp(loss), finite for every loss."""
    return math.exp(min(loss, LARGEST_EXPONENT))


@dataclass
class Ema:
    """Moving average of values that each stand for some steps; divided by its weight, so the start is not pulled to 0.

    While all values are v it is v, from the first one on (the bias correction of Kingma and Ba 2015, section 3).
    """

    step: int = 0
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, step: int) -> float:
        """The average with `value`, the mean of the steps after the last call up to `step`, in it."""
        keep = EMA_DECAY ** (step - self.step)
        self.step = step
        self.total = keep * self.total + (1 - keep) * value
        self.weight = keep * self.weight + (1 - keep)
        return self.total / self.weight


@dataclass
class Meter:
    """Speeds over the steps since the last line; `pause` keeps validation and checkpoints out of them."""

    config: RunConfig
    devices: int
    peak_tflops: float | None

    def __post_init__(self) -> None:
        model, seq_len = self.config.model, self.config.data.seq_len
        self.tokens_per_step = self.config.trainer.global_batch_size * seq_len
        self.flops_per_token = model_flops_per_token(model, seq_len)
        self.hardware_flops = hardware_flops_per_token(model, seq_len, self.config.recompute) / self.flops_per_token
        self._restart()

    def _restart(self) -> None:
        self.begun, self.paused, self.waited, self.steps = time.perf_counter(), 0.0, 0.0, 0
        self.logging = 0.0

    def count(self, data_wait: float) -> None:
        """One more step, which waited `data_wait` seconds for its batch."""
        self.steps += 1
        self.waited += data_wait

    def logged(self, seconds: float) -> None:
        """Time that a line of metrics took."""
        self.logging += seconds

    def pause(self, seconds: float) -> None:
        """Time that is not training."""
        self.paused += seconds

    def read(self, step: int, phases: dict[str, float]) -> Metrics:
        """The speeds since the last call; `phases`: seconds of the parts of these steps."""
        seconds = max(time.perf_counter() - self.begun - self.paused, 1e-9)
        rate = self.steps * self.tokens_per_step / seconds
        tflops = rate * self.flops_per_token / self.devices / 1e12
        left = (self.config.trainer.steps - step) * seconds / max(self.steps, 1)
        mfu = tflops / self.peak_tflops if self.peak_tflops else None
        metrics: Metrics = {
            "tokens_per_s": rate,
            "tokens_per_s_per_device": rate / self.devices,
            "tflops_per_device": tflops,
            "mfu": mfu,
            "hfu": mfu * self.hardware_flops if mfu is not None else None,
            "step_s": seconds / max(self.steps, 1),
            "data_wait": self.waited / seconds,
            **{name: spent / seconds for name, spent in phases.items()},
            "logging": self.logging / seconds,
            "eta_s": left,
        }
        self._restart()
        return metrics
