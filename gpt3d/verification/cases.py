"""Tiny models of each family, and a compact way to name a layout that trains one of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from gpt3d.config.schema import (
    ClusterConfig,
    DataConfig,
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

STEPS, ROWS, SEQ, VOCAB, LR, CLIP = 5, 8, 16, 61, 1e-3, 0.3
EPS = 1e-6  # with 1e-8 Adam turns rounding in gradients near zero into whole steps, in any two orders of summation

LLAMA = ModelConfig(
    name="llama", num_layers=4, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden_size=48,
    vocab_size=VOCAB, vocab_multiple=16, max_seq_len=SEQ, position="rope", norm="rmsnorm", activation="swiglu",
    bias=False, tied_embeddings=False, rope_scaling=RopeScalingConfig(factor=8.0, original_max_seq_len=16),
)  # fmt: skip
GPT = ModelConfig(
    name="gpt", num_layers=4, hidden_size=32, num_heads=4, num_kv_heads=4, head_dim=8, ffn_hidden_size=64,
    vocab_size=VOCAB, vocab_multiple=16, max_seq_len=SEQ, position="learned", norm="layernorm", activation="gelu",
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
            data=DataConfig(source="synthetic", seq_len=SEQ),
            cluster=ClusterConfig(name="test", device="cpu"),
            recompute=self.recompute,
            seed=7,
            run_name="parity",
        )  # fmt: skip
