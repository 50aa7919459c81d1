"""The planner's arithmetic against dry runs of the real layers: FLOPs and traffic to the last digit, memory close."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from gpt3d.config.schema import RunConfig
from gpt3d.dryrun.run import dry_run
from gpt3d.dryrun.tracker import by_module
from gpt3d.model.flops import rank_flops
from gpt3d.planner.memory import stage_memory
from gpt3d.planner.traffic import rank_traffic
from gpt3d.verification.cases import Case

SHAPE = dict(
    num_layers=4, hidden_size=1024, num_heads=16, head_dim=64, vocab_size=8000, vocab_multiple=128, max_seq_len=512
)
BF16 = {"dtype": "bf16"}
CASES = [
    Case("gpt", zero=0),
    Case("gpt", tp=2, sp=True, pp=2, zero=0, **BF16),  # tied over both ends, learned positions, biases
    Case("gpt_untied", tp=4, sp=True, pp=2, zero=0, recompute="full"),
    Case("llama", tp=2, pp=2, zero=0, recompute="selective", **BF16),
    Case("llama_tied", tp=2, sp=True, pp=2, zero=0, schedule="interleaved", chunks=2, **BF16),
    Case("llama", tp=2, sp=True, pp=2, zero=0, schedule="zb_h1", **BF16),
    Case("gpt", pp=2, tp=2, sp=True, zero=0, schedule="gpipe", recompute="full", **BF16),
    Case("one_kv_head_bias", tp=4, sp=True, zero=0, dp=2, **BF16),
    Case("llama", tp=2, dp=2, zero=1, **BF16),
    Case("gpt", tp=2, sp=True, pp=2, dp=4, zero=3),
]
MORE = [
    Case("llama", zero=0, **BF16, grad_dtype="bf16"),
    Case("gpt", tp=2, zero=0),
    Case("llama", tp=2, sp=True, zero=0),
    Case("llama", tp=2, pp=4, zero=0, recompute="full", **BF16),
    Case("gpt", pp=2, zero=0, schedule="interleaved", chunks=2, recompute="full"),
    Case("gpt", tp=2, sp=True, pp=4, zero=0, schedule="zb_h1"),
    Case("llama", tp=2, sp=True, pp=4, zero=0, schedule="zb_h1", recompute="full", **BF16, grad_dtype="bf16"),
    Case("llama", pp=4, zero=0, schedule="gpipe"),
    Case("one_kv_head", tp=2, pp=2, dp=2, zero=0, recompute="selective", **BF16),
    Case("llama", pp=2, dp=2, zero=2),
    Case("llama", dp=2, zero=1),
    Case("llama", pp=2, dp=2, zero=1, **BF16, grad_dtype="bf16"),
    Case("gpt", pp=2, dp=2, zero=2, schedule="interleaved", chunks=2),
]


def large(case: Case) -> RunConfig:
    """The layout of `case` on a model whose matrices are large beside what nobody counts."""
    config = case.config()
    llama = "llama" in case.family or case.family == "one_kv_head"
    heads = 1 if "one_kv" in case.family else 4 if llama else 16
    changes = dict(SHAPE, num_kv_heads=heads, ffn_hidden_size=2816 if llama else 4096)
    config.model = dataclasses.replace(config.model, **changes)  # type: ignore[arg-type]
    config.data.seq_len, config.trainer.micro_batch_size = 512, 1
    config.trainer.global_batch_size, config.cluster.device = 2 * case.pp * case.dp, "cuda"
    config.zero.reduce_bucket_size = 10**9 if case.zero == 0 else config.zero.reduce_bucket_size  # one call
    return config


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=str)
def test_planner_and_dry_run_agree(case: Case) -> None:
    config = large(case)
    copies = range(case.dp) if case.zero in (1, 2) else range(1)  # whose part of the gradients is copied when differs
    for stage, copy in itertools.product(range(case.pp), copies):
        run = dry_run(config, case.dp, rank=(stage * case.dp + copy) * case.tp)
        planned, traffic = stage_memory(config, case.dp, stage, copy=copy), rank_traffic(config, case.dp, stage)
        assert by_module(run.flops) == rank_flops(config, case.dp, stage)
        assert (run.calls, run.bytes) == (dict(traffic.calls), dict(traffic.bytes))
        assert run.parameters == planned.parameters
        # zb_h1 on four stages: the planner orders its postponed weight gradients more coarsely (4 and 6 % seen)
        # ZeRO-2: the planner has its buffers come at the fullest point of a layer's backward (at most 4.9 % seen)
        rough = 0.1 if case.schedule == "zb_h1" and case.pp > 2 else 0.05 if case.zero == 2 else 0.03
        assert planned.device == pytest.approx(run.peak, rel=rough)


def test_hidden_dropout_is_recomputed_to_the_end() -> None:
    """Its mask is saved behind the last collective of a layer, which recompute so repeats."""
    case = Case("gpt", tp=2, sp=True, zero=0, recompute="full")
    config = large(case)
    config.model.hidden_dropout = 0.1
    traffic = rank_traffic(config, 1, 0)
    assert dry_run(config, 1, 0).bytes == dict(traffic.bytes)


@pytest.mark.parametrize(
    "case", [Case("llama", pp=2, tp=2, zero=0), Case("gpt", pp=2, zero=0, schedule="zb_h1")], ids=str
)
def test_the_steady_state_stands_for_the_whole_step(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running every microbatch counts what running enough of them is said to count."""
    config = large(case)
    config.trainer.global_batch_size = 12
    short = dry_run(config, case.dp, 0)
    assert short.counted < short.microbatches
    monkeypatch.setattr("gpt3d.dryrun.run.microbatches_to_run", lambda config, dp: short.microbatches)
    whole = dry_run(config, case.dp, 0)
    assert (whole.flops, whole.calls, whole.bytes) == (short.flops, short.calls, short.bytes)
    assert whole.peak == pytest.approx(short.peak, abs=32 * 512 * (whole.counted - short.counted))  # token ids
