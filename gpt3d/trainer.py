"""The trainer: builds the parts from a config, owns the loop, and reports."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpt3d.checkpoint.run import RunCheckpoints
from gpt3d.config.arithmetic import World, resolve_dp
from gpt3d.config.problems import ConfigError
from gpt3d.config.rules import check_vocabulary, require_valid
from gpt3d.config.schema import RunConfig
from gpt3d.data import Batches, MicroBatch, build_data, validation_batches
from gpt3d.debug import Aids
from gpt3d.generation import generate
from gpt3d.learner import Learner, Outcome, Rows
from gpt3d.optim.lr import lr_at
from gpt3d.parallel.device import Device
from gpt3d.parallel.layout import Sizes, create_layout
from gpt3d.pipeline.describe import stage_text
from gpt3d.pipeline.picture import bubble_in_words, write_timelines
from gpt3d.pipeline.simulate import Timeline, ideal_of
from gpt3d.planner.hardware import peak_tflops
from gpt3d.planner.report import run_plan
from gpt3d.tracking.banner import banner, summary
from gpt3d.tracking.metrics import Ema, Meter, Metrics, perplexity
from gpt3d.tracking.ranks import node_metrics, rank_metrics
from gpt3d.tracking.tracker import Tracker


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why and what to do."""

    show_traceback = False


class Trainer:
    """One rank's view of a run. All ranks construct it and call `run` alike; rank 0 speaks."""

    def __init__(self, config: RunConfig, device: Device) -> None:
        self.config, self.device = config, device
        world = dist.get_world_size()
        known = World(ranks=world, device=device.kind)
        require_valid(config, known)
        p = config.parallel
        sizes = Sizes(tp=p.tp, cp=p.cp, dp=resolve_dp(config, known), pp=p.pp)
        self.layout = create_layout(
            sizes,
            device.torch_device,
            sequence_parallel=p.sequence_parallel,
            num_kv_heads=config.model.num_kv_heads,
        )
        self.data = build_data(config, self.layout.at.dp, sizes.dp)
        if problems := check_vocabulary(config, self.data.largest_id):
            raise ConfigError(problems)
        self.learner = Learner(config, self.layout)
        t, self.begun = config.trainer, time.perf_counter()
        self.step = self.skipped = self.skipped_in_a_row = self.tokens = 0
        self.loss_sum, self.loss_tokens = torch.zeros((), device=self.layout.device), 0
        self.loss: float | None = None
        self.loss_ema = Ema()
        self.validation_loss: float | None = None
        self.first_step, self.timelines = 0, list[Timeline]()
        self.run_dir = Path(config.run_dir or ".")
        plan = run_plan(config, sizes.dp, device.kind)
        self.tracker = Tracker(config, self.run_dir, is_main=self.layout.rank == 0, plan=plan)
        self.checkpoints = RunCheckpoints(config, self.learner, self.data.fingerprint, self.run_dir, self.say)
        self.aids = Aids(config, self.learner, self.run_dir, self.say)
        resumed = self.checkpoints.resume()
        self.batches = Batches(
            self.data.train, t.global_batch_size, t.micro_batch_size, self.layout.at.dp, sizes.dp,
            start=resumed["consumed_samples"] if resumed else 0, pin_memory=device.kind == "cuda",
        )  # fmt: skip
        if resumed:
            self._restore(resumed)
        name = torch.cuda.get_device_name(device.torch_device) if device.kind == "cuda" else None
        peak = peak_tflops(name, config.precision.dtype, config.cluster.peak_tflops if name else None)
        self.meter = Meter(config, world, peak)

    def run(self) -> dict[str, Any]:
        """Train for `trainer.steps` steps, validate, and sample; returns the run's results."""
        self.first_step = self.step
        with self.tracker:
            return self._run()

    def _run(self) -> dict[str, Any]:
        t, begun, tokens_before = self.config.trainer, time.perf_counter(), self.tokens
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in self.learner.engine.module.parameters())
        self.say(banner(self.config, self.layout, self.device, self.data.info, parameters))
        if self.layout.sizes.pp > 1:
            self.say(stage_text(self.config))
        first_loss: float | None = None
        with self.checkpoints:
            while self.step < t.steps:
                try:
                    metrics = self.train_step()
                except TrainingStopped:
                    self.checkpoints.at_stop(self.step, self.progress)
                    raise
                if metrics is not None:
                    begun_logging = time.perf_counter()
                    self.log(metrics)
                    self.meter.logged(time.perf_counter() - begun_logging)
                    first_loss = first_loss if first_loss is not None else self.loss
                if t.eval_interval and self.step % t.eval_interval == 0 and self.step < t.steps:
                    self.validate()
                begun_saving = time.perf_counter()
                self.checkpoints.after_step(self.step, self.progress)
                self.meter.pause(time.perf_counter() - begun_saving)
            self.batches.close()
            self.validate()
            self.checkpoints.at_end(self.step, self.progress)
        seconds = time.perf_counter() - begun
        results = {
            "steps": self.step,
            "first_loss": first_loss,
            "validation_loss": self.validation_loss,
            "unigram_entropy": self.data.unigram_entropy,
            "tokens": self.tokens,
            "seconds": seconds,
            "tokens_per_s": (self.tokens - tokens_before) / seconds,
        }
        if (verdict := self.aids.verdict(first_loss, self.loss)) is not None:
            self.say(verdict)
        text = self.sample()
        if text is not None:
            self.tracker.event("sample", step=self.step, text=text)
        self.tracker.end_panel()
        self.say(summary(self.config, results, text, self.run_dir))
        return results

    def train_step(self) -> Metrics | None:
        """One optimizer step; its metrics if this step is to be logged."""
        batch = self.aids.next(self.batches)
        lr = lr_at(self.step, self.config.optimizer.lr, self.config.lr, self.config.trainer.steps)
        t = self.config.trainer
        tracking, logged = self.config.tracking, self._is_logged(self.step + 1)
        timeline = t.timeline and 0 < self.step - self.first_step <= t.timeline_steps
        if recording := timeline or (logged and self.layout.sizes.pp > 1):
            self.learner.start_recording()
        watching = tracking.layer_norms_interval and (self.step + 1) % tracking.layer_norms_interval == 0
        if watching:
            self.learner.watch_layers()
        with self.aids.step(self.step):
            outcome = self.learner.step([_rows(micro_batch) for micro_batch in batch], lr)
        bubble = None
        if timeline:
            bubble = self._keep_timeline()
        elif recording:
            bubble = self.learner.take_bubble()
        self.step += 1
        self.tokens += self.meter.tokens_per_step
        self.meter.count(self.batches.wait_seconds)
        self.loss_sum += outcome.loss_sum
        self.loss_tokens += outcome.tokens
        self._watch_skips(outcome)
        check_interval = self.config.trainer.copy_check_interval
        if check_interval and self.step % check_interval == 0:
            self.learner.check_copies()
        self.tracker.advance()
        if watching:
            self.log({"step": self.step, **self.learner.take_layer_norms()})
        return self._metrics(lr, outcome, bubble) if logged else None

    def _is_logged(self, step: int) -> bool:
        return step % self.config.tracking.log_interval == 0 or step in (1, self.config.trainer.steps)

    def _metrics(self, lr: float, outcome: Outcome, bubble: float | None) -> Metrics:
        """The one dictionary of this step. Collective: the loss comes from the last stage, memory from all ranks."""
        begun = time.perf_counter()
        loss = self.learner.total(self.loss_sum) / max(self.loss_tokens, 1)
        self.loss_sum, self.loss_tokens = torch.zeros_like(self.loss_sum), 0
        if not math.isfinite(loss):
            raise TrainingStopped(f"the loss is {loss} at step {self.step}: training has diverged. {self._remedies()}")
        metrics: Metrics = {
            "step": self.step,
            "loss": loss,
            "loss_ema": self.loss_ema.add(loss, self.step),
            "lr": lr,
            "grad_norm": outcome.grad_norm,
            "parameter_norm": self.learner.parameter_norm(),
            "loss_scale": self.learner.engine.loss_scale,
            "skipped_steps": self.skipped,
            "tokens": self.tokens,
            "samples": self.batches.consumed_samples,
            "pipeline_bubble": bubble,
            **rank_metrics(self.device, self.layout, self.learner.take_sent(self.meter.steps)),
            **(node_metrics(self.device, self.layout) if self.config.tracking.node_metrics else {}),
            **self.meter.read(self.step, self.learner.stopwatch.read()),
        }
        self.loss = loss
        self.meter.logged(time.perf_counter() - begun)
        return metrics

    def _keep_timeline(self) -> float | None:
        """Collect the step's timeline, draw them after the last one; the step's bubble (on rank 0)."""
        timeline = self.learner.take_timeline()
        if timeline is None:
            return None
        self.timelines.append(timeline)
        if len(self.timelines) == self.config.trainer.timeline_steps:
            chunks, begun = self.config.pipeline.chunks, time.perf_counter()
            files = write_timelines(self.timelines, chunks, self.config.run_name, self.run_dir)
            self.say(f"{bubble_in_words(self.timelines, chunks)}; drawn in {files[0]}")
            ideal = ideal_of(timeline, chunks).bubble
            self.meter.pause(time.perf_counter() - begun)
            self.tracker.event("timeline", step=self.step + 1, bubble=timeline.bubble, ideal=ideal)
        return timeline.bubble

    def _watch_skips(self, outcome: Outcome) -> None:
        """Count steps without an update; all ranks see the same ones and stop together when there are too many."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if outcome.skipped else 0
        self.skipped += outcome.skipped
        scale = f"; loss scale {self.learner.engine.loss_scale:g}" if self.config.precision.dtype == "fp16" else ""
        if outcome.skipped:
            why = "its gradients are not finite" if outcome.tokens else "its batch has no target tokens"
            self.say(f"step {self.step} skipped: {why}{scale}")
            self.tracker.event("skipped", step=self.step, why=why)
        limit = self.config.precision.max_skipped_steps
        if self.skipped_in_a_row >= limit:
            raise TrainingStopped(
                f"{limit} steps in a row were skipped (precision.max_skipped_steps={limit}){scale}. " + self._remedies()
            )

    def _remedies(self) -> str:
        o, warmup = self.config.optimizer, self.config.lr.warmup_steps
        return (
            f"Usual remedies: a smaller optimizer.lr={o.lr:g}, a longer lr.warmup_steps={warmup}, gradient clipping "
            f"(optimizer.grad_clip={o.grad_clip:g}), precision=bf16 instead of fp16"
        )

    def validate(self) -> None:
        """Loss on the first `trainer.eval_batches` global batches of the held-out text."""
        if self.data.validation is None:
            return
        begun, t = time.perf_counter(), self.config.trainer
        loss, tokens = 0.0, 0
        for batch in validation_batches(
            self.data.validation, t.global_batch_size, t.micro_batch_size, self.layout.at.dp, self.layout.sizes.dp,
            limit=t.eval_batches,
        ):  # fmt: skip
            batch_loss, batch_tokens = self.learner.evaluate([_rows(micro_batch) for micro_batch in batch])
            loss, tokens = loss + batch_loss, tokens + batch_tokens
        self.validation_loss = loss / max(tokens, 1)
        self.log(
            {
                "step": self.step,
                "validation_loss": self.validation_loss,
                "validation_perplexity": perplexity(self.validation_loss),
                "validation_tokens": tokens,
                "unigram_entropy": self.data.unigram_entropy,
            }
        )
        self.meter.pause(time.perf_counter() - begun)

    def progress(self) -> dict[str, Any]:
        """All that the loop needs to go on, beside weights and optimizer. Collective."""
        sums: list[Any] = [None] * self.layout.world.size
        dist.all_gather_object(
            sums, float(self.loss_sum)
        )  # each rank's own: the next logged loss is then the same bits
        return {
            "step": self.step,
            "consumed_samples": self.batches.consumed_samples,
            "consumed_tokens": self.tokens,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "loss_sums": {"tp": self.layout.sizes.tp, "ranks": sums},
            "loss_tokens": self.loss_tokens,
            "loss": self.loss,
            "loss_ema": dataclasses.asdict(self.loss_ema),
            "tracking": self.tracker.state(),
            "validation_loss": self.validation_loss,
            "seconds": time.perf_counter() - self.begun,
        }

    def _restore(self, progress: dict[str, Any]) -> None:
        """The inverse of `progress`, in any layout."""
        self.step, self.tokens = progress["step"], progress["consumed_tokens"]
        self.skipped, self.skipped_in_a_row = progress["skipped"], progress["skipped_in_a_row"]
        self.loss, self.validation_loss = progress["loss"], progress["validation_loss"]
        self.begun -= progress["seconds"]
        tp, sums = progress["loss_sums"]["tp"], progress["loss_sums"]["ranks"]
        if tp != self.layout.tp.size or len(sums) != self.layout.world.size:
            sums = [sum(sums) / tp * self.layout.tp.size, *[0.0] * (self.layout.world.size - 1)]
        self.loss_sum += sums[self.layout.rank]
        self.loss_tokens = progress["loss_tokens"]
        self.loss_ema = Ema(**progress.get("loss_ema", {}))
        self.tracker.restore(self.step, progress.get("tracking", {}))

    def sample(self) -> str | None:
        """Text sampled from the model, if `trainer.sample_tokens` asks for it."""
        t = self.config.trainer
        if not t.sample_tokens:
            return None
        return generate(self.learner, self.data.tokenizer, t.sample_prompt, t.sample_tokens, seed=self.config.seed)

    def log(self, metrics: Metrics) -> None:
        """One dictionary to every sink, from rank 0."""
        self.tracker.log(metrics)

    def say(self, text: str) -> None:
        """A line from rank 0."""
        self.tracker.say(text)


def _rows(batch: MicroBatch) -> Rows:
    return Rows(batch["tokens"], batch["labels"], batch["index"], batch.get("position_ids"))
