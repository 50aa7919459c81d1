"""Bytes per parameter on each rank, measured, against the theory of ZeRO (Rajbhandari et al. 2020)."""

from __future__ import annotations

import dataclasses
from typing import Any

from gpt3d.config.schema import RunConfig
from gpt3d.learner import Learner
from gpt3d.model.flops import parameter_count
from gpt3d.verification.cases import LLAMA, Case
from tests.zero.bytes import live_bytes, live_storages
from tests.zero.steps import new_learner, own_rows
from tests.zero.test_loss import rows_with

MODEL = dataclasses.replace(
    LLAMA, num_layers=12, hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=64, ffn_hidden_size=704,
    vocab_size=4096, vocab_multiple=128, tied_embeddings=False,
)  # fmt: skip


def config_of(case: Case, bucket: int) -> RunConfig:
    config = case.config()
    config.model = MODEL
    config.zero.reduce_bucket_size = config.zero.allgather_bucket_size = config.zero.prefetch_bucket_size = bucket
    config.trainer.global_batch_size, config.trainer.micro_batch_size = 2 * case.dp, 1
    return config


def _measure(case: Case, bucket: int) -> tuple[float, float]:
    """Bytes per parameter: the highest of what is there after each backward of the second step; and after that step."""
    known = set(live_storages())
    config = config_of(case, bucket)
    learner: Learner = new_learner(config)
    rows = own_rows(learner.layout, rows_with(*[8] * config.trainer.global_batch_size), 1)
    learner.step(rows, 1e-3)
    highest = 0
    backward = learner.engine.backward

    def measured(*args: Any, **kwargs: Any) -> None:
        nonlocal highest
        backward(*args, **kwargs)
        highest = max(highest, live_bytes(known))

    learner.engine.backward = measured  # type: ignore[method-assign]
    learner.step(rows, 1e-3)
    n = parameter_count(MODEL)
    return highest / n, live_bytes(known) / n
