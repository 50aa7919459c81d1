"""Train a tiny model in one layout on gloo ranks and in one plain process, and compare every number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gpt3d.config.schema import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    RopeScalingConfig,
    RunConfig,
    TrainerConfig,
    ZeroConfig,
)
from tests.parity import reference

STEPS, ROWS, SEQ, LR, CLIP = 5, 8, 16, 1e-3, 0.3
EPS = 1e-6  # with 1e-8 Adam turns rounding in gradients near zero into whole steps, in any two orders of summation

LLAMA = ModelConfig(
    name="llama", num_layers=4, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden_size=48,
    vocab_size=61, vocab_multiple=16, max_seq_len=SEQ, position="rope", norm="rmsnorm", activation="swiglu", bias=False,
    tied_embeddings=False, rope_scaling=RopeScalingConfig(factor=8.0, original_max_seq_len=16),
)  # fmt: skip
GPT = ModelConfig(
    name="gpt", num_layers=4, hidden_size=32, num_heads=4, num_kv_heads=4, head_dim=8, ffn_hidden_size=64,
    vocab_size=61, vocab_multiple=16, max_seq_len=SEQ, position="learned", norm="layernorm", activation="gelu",
    bias=True, tied_embeddings=True,
)  # fmt: skip
FAMILIES = {
    "llama": LLAMA,
    "gpt": GPT,
    "llama_tied": dataclasses.replace(LLAMA, tied_embeddings=True),
    "gpt_untied": dataclasses.replace(GPT, tied_embeddings=False),
    "one_kv_head": dataclasses.replace(LLAMA, num_kv_heads=1),
    "one_kv_head_bias": dataclasses.replace(GPT, num_kv_heads=1),
}


@dataclass(frozen=True)
class Case:
    """One layout. `micro`: rows of a microbatch, of 8 rows in the global batch."""

    family: str = "llama"
    tp: int = 1
    dp: int = 1
    pp: int = 1
    sp: bool = False
    zero: int = 1
    micro: int = 2
    recompute: str = "none"
    schedule: str = "1f1b"
    chunks: int = 1
    offload_optimizer: str = "none"
    offload_param: str = "none"
    dtype: str = "fp32"
    grad_dtype: str = "fp32"
    layers: tuple[int, ...] | None = None
    clip: float = CLIP
    persist: int = 0
    prefetch: int = 2000
    options: tuple[tuple[str, Any], ...] = field(default=())

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.pp

    def __str__(self) -> str:
        default = Case()
        parts = [f"tp{self.tp}", f"dp{self.dp}", f"pp{self.pp}", f"zero{self.zero}", self.family]
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name not in ("tp", "dp", "pp", "zero", "family") and value != getattr(default, f.name):
                parts.append(f.name if value is True else f"{f.name}={value}")
        return "-".join(parts)

    def config(self) -> RunConfig:
        return RunConfig(
            model=FAMILIES[self.family],
            parallel=ParallelConfig(
                tp=self.tp, dp=self.dp, pp=self.pp, sequence_parallel=self.sp,
                layers_per_stage=list(self.layers) if self.layers else None,
            ),
            pipeline=PipelineConfig(schedule=self.schedule, chunks=self.chunks),
            zero=ZeroConfig(
                stage=self.zero, offload_optimizer=self.offload_optimizer, offload_param=self.offload_param,
                reduce_bucket_size=3000, allgather_bucket_size=5000, prefetch_bucket_size=self.prefetch,
                param_persistence_threshold=self.persist, **dict(self.options),
            ),
            precision=PrecisionConfig(dtype=self.dtype, grad_dtype=self.grad_dtype),
            optimizer=OptimizerConfig(lr=LR, grad_clip=self.clip, eps=EPS),
            trainer=TrainerConfig(steps=STEPS, global_batch_size=ROWS, micro_batch_size=self.micro),
            recompute=self.recompute,
            seed=7,
            run_name="parity",
        )  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Losses per token and gradient norms by step, validation loss at the end, and the full weights."""

    losses: list[float]
    norms: list[float]
    validation: float
    weights: dict[str, Tensor]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: random rows, with very different numbers of valid labels (row 1 has none)."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = torch.randint(0, 61, (ROWS, SEQ + 1), generator=generator)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].clone()
    labels[0, 4:] = -100
    labels[1] = -100
    labels[5, :9] = -100
    return tokens, labels


@lru_cache
def plain_result(family: str, clip: float = CLIP) -> Result:
    """The reference run: one process, whole batches, plain torch."""
    model = FAMILIES[family]
    weights = initial_weights(family)
    losses, norms, final = reference.train(
        weights, (batch(step) for step in range(STEPS)), model, lr=LR, clip=clip, eps=EPS
    )
    tokens, labels = batch(99)
    validation = float(reference.summed_loss(final, tokens, labels, model) / (labels >= 0).sum())
    return Result(losses, norms, validation, final)


@lru_cache
def initial_weights(family: str) -> dict[str, Tensor]:
    """The full initial weights, from a single-process build of the model."""
    from gpt3d.model.build import build_chunks
    from gpt3d.parallel.layout import single_process_layout
    from gpt3d.parallel.placement import placement_of

    config = Case(family=family).config()
    config.data.seq_len = SEQ
    chunk = build_chunks(config, single_process_layout())[0]
    return {placement_of(p).name: p.detach().clone() for p in chunk.parameters()}


def train_rank(case: Case) -> tuple[list[float], list[float], float, list[tuple[Any, Tensor]]]:
    """Runs on every rank: losses, norms, validation loss, and this rank's (placement, fp32 weights)."""
    from gpt3d.learner import Learner, Rows
    from gpt3d.parallel.layout import Sizes, create_layout

    config = case.config()
    config.data.seq_len = SEQ
    sizes = Sizes(tp=case.tp, dp=case.dp, pp=case.pp)
    layout = create_layout(
        sizes, torch.device("cpu"), sequence_parallel=case.sp, num_kv_heads=config.model.num_kv_heads
    )
    learner = Learner(config, layout)

    def rows(step: int) -> list[Rows]:
        tokens, labels = batch(step)
        mine = range(layout.at.dp * ROWS // case.dp, (layout.at.dp + 1) * ROWS // case.dp, case.micro)
        return [Rows(tokens[i : i + case.micro], labels[i : i + case.micro], step * ROWS + i) for i in mine]

    losses, norms = [], []
    for step in range(STEPS):
        if step == 2:  # an evaluation in the middle must leave no trace; replicas bring different numbers of rows
            learner.evaluate(rows(98)[: 1 + layout.at.dp])
        outcome = learner.step(rows(step), LR)
        losses.append(learner.total(outcome.loss_sum) / outcome.tokens)
        norms.append(outcome.grad_norm)
    loss, tokens = learner.evaluate(rows(99))
    return losses, norms, loss / tokens, [(p, w.clone()) for p, w in learner.engine.master_weights()]


def layout_result(world: Callable[..., list[Any]], case: Case, timeout: float = 90) -> Result:
    """Train on ranks; check that all agree on losses and norms, and that copies of a weight are equal."""
    ranks = world(train_rank, case, n=case.world, timeout=timeout)
    losses, norms, validation, _ = ranks[0]
    for other in ranks[1:]:
        assert other[0] == losses and other[2] == validation, "ranks report different losses"
        assert other[1] == norms, f"ranks report different gradient norms: {other[1]} {norms}"
    full: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for _, _, _, fragments in ranks:
        for place, value in fragments:
            assert tuple(value.shape) == place.local_shape
            target = full.setdefault(place.name, torch.full(place.shape, float("nan")))
            seen = filled.setdefault(place.name, torch.zeros(place.shape, dtype=torch.bool))
            dim = place.dim or 0
            ranges = place.ranges if place.dim is not None else ((0, place.shape[0]),)
            offset = 0
            for start, stop in ranges:
                part = value.narrow(dim, offset, stop - start)
                there, known = target.narrow(dim, start, stop - start), seen.narrow(dim, start, stop - start)
                assert torch.equal(there[known], part[known]), f"copies of {place.name} differ"
                there.copy_(part)
                known.fill_(True)
                offset += stop - start
    for name, seen in filled.items():
        assert seen.all(), f"no rank holds all of {name}"
    return Result(losses, norms, validation, full)


def assert_equal(got: Result, want: Result, loss: float = 2e-6, weight: float = 5e-6, norm: float = 5e-5) -> None:
    """The bounds of the README: absolute on losses and weights, relative on gradient norms."""
    worst_loss = max(
        abs(a - b) for a, b in zip([*got.losses, got.validation], [*want.losses, want.validation], strict=True)
    )
    worst_norm = max(abs(a - b) / b for a, b in zip(got.norms, want.norms, strict=True))
    assert got.weights.keys() == want.weights.keys()
    differences = {name: float((got.weights[name] - want.weights[name]).abs().max()) for name in want.weights}
    worst = max(differences, key=differences.__getitem__)
    message = f"loss {worst_loss:.1e}, norm {worst_norm:.1e}, weight {differences[worst]:.1e} ({worst})"
    assert worst_loss <= loss and worst_norm <= norm and differences[worst] <= weight, message
    print(message)
