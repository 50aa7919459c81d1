"""The part of training that knows about layouts: model, ZeRO engine and pipeline as one thing that takes steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gpt3d.config.schema import RunConfig
from gpt3d.model.build import build_chunks
from gpt3d.model.documents import Documents
from gpt3d.parallel.collectives import all_gather_last, all_reduce
from gpt3d.parallel.copies import check_copies
from gpt3d.parallel.layout import Layout
from gpt3d.parallel.random import derive
from gpt3d.pipeline.executor import Executor, Microbatch
from gpt3d.pipeline.recorder import Recorder
from gpt3d.pipeline.simulate import Timeline
from gpt3d.pipeline.transport import connect
from gpt3d.tracking.layer_norms import LayerNorms
from gpt3d.tracking.metrics import Metrics
from gpt3d.tracking.stopwatch import Stopwatch
from gpt3d.zero.engine import DTYPES, new_engine, sharder


@dataclass(frozen=True)
class Rows:
    """Some rows of a batch on the host: tokens and labels [b, s] (labels < 0 are ignored).

    `index` is the number of the first row in the whole run; it names the rows for dropout.
    """

    tokens: Tensor
    labels: Tensor
    index: int
    position_ids: Tensor | None = None  # [b, s], 0 at the start of each document: attention stays within documents


@dataclass(frozen=True)
class Outcome:
    """One step. `loss_sum` [nats] is this rank's share, `Learner.total` adds them up; `tokens` is the global count."""

    loss_sum: Tensor
    tokens: int
    grad_norm: float
    skipped: bool


class Learner:
    """Trains the model of `config` on this rank of `layout`; every rank calls the same methods in the same order."""

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        self.layout, self.seed, self.zero_stage = layout, config.seed, config.zero.stage
        self.engine = new_engine(config, layout, build_chunks(config, layout, sharder(config, layout)))
        self.stopwatch = Stopwatch(layout.device)
        self.num_layers = config.model.num_layers
        self.layer_norms: LayerNorms | None = None
        self.sent = [0, 0, 0]  # bytes over TP, PP and DP in the training steps since `take_sent`
        self.before_update: Callable[[], None] = lambda: None  # who still reads the optimizer's state has it wait here
        self.seq_len, self.micro_batch_size = config.data.seq_len, config.trainer.micro_batch_size
        self.padded_vocab_size = config.model.padded_vocab_size
        sequence = self.seq_len // (layout.tp.size if layout.sequence_parallel else 1)
        shape = (sequence, self.micro_batch_size, config.model.hidden_size)
        chunks = config.pipeline.chunks
        transport = connect(layout, shape, DTYPES[config.precision.dtype], ring=chunks > 1)
        transport.meet()
        self.executor = Executor(layout, self.engine, transport, config.pipeline.schedule, chunks)
        rows = config.trainer.global_batch_size // layout.dp.size
        self.executor.plan(rows // self.micro_batch_size)  # an impossible schedule is refused before the first step

    def step(self, rows: Sequence[Rows], lr: float) -> Outcome:
        """One optimizer step on this replica's microbatches.

        The loss is the sum over the valid targets of the global batch divided by their count. DP averages gradients, so
        each replica scales by DP / count. A batch without any valid target is skipped by all ranks alike.
        """
        tokens = self.count_targets(rows)
        if tokens == 0:
            return Outcome(torch.zeros((), device=self.layout.device), 0, 0.0, True)
        before = self._sent()
        self.stopwatch.start()
        loss_sum = self.executor.train(self._to_device(rows), self.layout.dp.size / tokens)
        self.stopwatch.lap("forward_backward")
        self.before_update()
        result = self.engine.step(lr)
        self.stopwatch.lap("optimizer")
        self.sent = [total + now - then for total, now, then in zip(self.sent, self._sent(), before, strict=True)]
        return Outcome(loss_sum, tokens, result.grad_norm, result.skipped)

    def start_recording(self) -> None:
        """Note when each action of the next step begins and ends. Collective."""
        self.executor.recorder = Recorder(self.layout)

    def take_timeline(self) -> Timeline | None:
        """Stop recording; the timeline of the first replica's pipeline, on rank 0 only. Collective."""
        recorder, self.executor.recorder = self.executor.recorder, None
        assert recorder is not None, "start_recording comes first"
        first = self.layout.at.tp == 0 and self.layout.at.dp == 0
        return recorder.gather() if first else None

    def take_bubble(self) -> float | None:
        """Stop recording; the idle share of this rank's pipeline, None if nothing ran. Collective."""
        recorder, self.executor.recorder = self.executor.recorder, None
        assert recorder is not None, "start_recording comes first"
        return recorder.bubble()

    def watch_layers(self) -> None:
        """Take the norms of each layer in the next step. Reading all gradients costs about one more reduction."""
        self.layer_norms = LayerNorms(self.engine.module, self.num_layers, self.layout)
        self.engine.on_gradients = self.layer_norms.gradients

    def take_layer_norms(self) -> Metrics:
        """Stop watching; the norms, equal on all ranks. Collective."""
        watched, self.layer_norms, self.engine.on_gradients = self.layer_norms, None, None
        assert watched is not None, "watch_layers comes first"
        return watched.read()

    def take_sent(self, steps: int) -> tuple[float, ...]:
        """Bytes that this rank has sent over TP, PP and DP, a step, in the `steps` since the last call."""
        sent, self.sent = self.sent, [0, 0, 0]
        return tuple(count / max(steps, 1) for count in sent)

    def _sent(self) -> tuple[int, int, int]:
        layout = self.layout
        tp, pp = layout.tp.sent.total + layout.kv.sent.total, self.executor.transport.sent + layout.ends.sent.total
        return tp, pp, layout.dp.sent.total

    def evaluate(self, rows: Sequence[Rows]) -> tuple[float, int]:
        """Summed loss [nats] and number of targets over all replicas; each may bring another number of rows.

        All replicas run as many forwards as the longest (ZeRO-3 gathers parameters together), on ignored rows.
        """
        most = int(all_reduce(torch.tensor(len(rows), device=self.layout.device), self.layout.dp, dist.ReduceOp.MAX))
        padded = [*rows, *[self._ignored_rows()] * (most - len(rows))]
        module = self.engine.module
        module.eval()
        loss = self.total(self.executor.evaluate(self._to_device(padded)))
        module.train()
        return loss, self.count_targets(rows)

    def _ignored_rows(self) -> Rows:
        shape = (self.micro_batch_size, self.seq_len)
        return Rows(torch.zeros(shape, dtype=torch.long), torch.full(shape, -100), 0)

    def check_copies(self) -> None:
        """Raise CopiesDiffer unless all ranks that hold the same part of a parameter hold the same bits. Collective."""
        check_copies(self.engine.held_weights(), self.layout, sharded_over_dp=self.zero_stage == 3)

    def parameter_norm(self) -> float:
        """L2 norm of all weights as forward uses them: one read of what this rank holds. Collective."""
        own = [
            torch.linalg.vector_norm(value, dtype=torch.float32).square().to(self.layout.device)
            for place, value in self.engine.held_weights()
            if place.counted
        ]
        total = all_reduce(
            torch.stack(own).sum() if own else torch.zeros((), device=self.layout.device), self.layout.model
        )
        return float(all_reduce(total, self.layout.dp) if self.zero_stage == 3 else total) ** 0.5

    def next_token_logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [V] (fp32, CPU) of the token after `ids` (at most `seq_len` of them). Collective; equal everywhere.

        The row is filled up to the pipeline's fixed shape; attention is causal, so what follows `ids` has no effect.
        """
        tokens = torch.zeros((self.micro_batch_size, self.seq_len), dtype=torch.long)
        tokens[:, : len(ids)] = torch.tensor(ids)
        self.engine.module.eval()
        logits = self.executor.logits(tokens.to(self.layout.device))
        self.engine.module.train()
        vocab = torch.zeros(self.padded_vocab_size, device=self.layout.device)
        if logits is not None:
            vocab = all_gather_last(logits[len(ids) - 1, 0].float(), self.layout.tp)
        return all_reduce(vocab, self.layout.pp).cpu()

    def total(self, loss_sum: Tensor) -> float:
        """Sum over replicas; TP ranks of the last stage hold equal shares, the other stages zero. Collective."""
        return float(all_reduce(loss_sum, self.layout.world)) / self.layout.tp.size

    def count_targets(self, rows: Sequence[Rows]) -> int:
        """Valid targets in the rows of all replicas. Collective over DP."""
        own = sum(int((r.labels >= 0).sum()) for r in rows)
        return int(all_reduce(torch.tensor(own, device=self.layout.device), self.layout.dp))

    def _to_device(self, rows: Sequence[Rows]) -> list[Microbatch]:
        device = self.layout.device
        return [
            Microbatch(
                r.tokens.to(device, non_blocking=True),
                r.labels.to(device, non_blocking=True),
                derive(self.seed, r.index),
                None if r.position_ids is None else Documents.of(r.position_ids, device),
            )
            for r in rows
        ]
