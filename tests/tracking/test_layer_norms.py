"""Norms of each layer, and bytes sent: equal in every layout, against one process and against arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from gpt3d.config.arithmetic import num_microbatches
from gpt3d.model.flops import parameter_count
from gpt3d.tracking.metrics import metric
from gpt3d.verification.cases import LLAMA, SEQ, Case
from gpt3d.verification.compare import batch
from tests.zero.steps import new_learner, own_rows

World = Callable[..., list[Any]]
Seen = tuple[dict[str, float], float, tuple[float, ...]]


def watched(case: Case) -> Seen:
    """The norms of the second of two steps, that step's global gradient norm, and bytes sent a step."""
    config = case.config()
    learner = new_learner(config)
    for step in range(2):
        if step == 1:
            learner.watch_layers()
        rows = own_rows(learner.layout, batch(step), config.trainer.micro_batch_size)
        norm = learner.step(rows, 1e-3).grad_norm
    norms: Any = learner.take_layer_norms()
    return norms, norm, learner.take_sent(2)


@pytest.fixture(scope="module")
def plain() -> dict[str, Seen]:
    return {}


CASES = [
    Case(dp=2, zero=0, family="gpt", recompute="full"),
    Case(dp=2, zero=1),
    Case(tp=2, pp=2, sp=True, zero=2, family="gpt"),
    Case(pp=2, dp=2, zero=3, family="llama_tied"),
]
MORE = [Case(tp=4, sp=True, micro=4, recompute="full", zero=stage) for stage in range(4)] + [
    Case(dp=2, zero=2, offload_optimizer="cpu"),
    Case(dp=2, zero=3, offload_optimizer="cpu", offload_param="cpu", family="gpt"),
    Case(tp=2, family="one_kv_head_bias", zero=1),
    Case(pp=2, schedule="zb_h1", zero=1),
]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=str)
def test_every_layout_sees_the_norms_of_one_process(world: World, plain: dict[str, Seen], case: Case) -> None:
    if case.family not in plain:
        (plain[case.family],) = world(watched, Case(family=case.family, zero=0), n=1)
    want, norm, _ = plain[case.family]
    gradients = [value for name, value in want.items() if name.startswith("gradient")]
    assert math.hypot(*gradients) == pytest.approx(norm, rel=1e-5), "each number counts once"
    assert all(value > 0 for value in want.values())
    for got, _, _ in world(watched, case, n=case.world):
        assert got == pytest.approx(want, rel=5e-5, abs=1e-7)
        assert all(metric(name).group == "layers" for name in got)


def test_bytes_are_those_of_the_formulas(world: World) -> None:
    """PP: an activation or a gradient of [s, b, h] a microbatch. TP: per layer 4 all-reduces of it, and the ends."""
    ranks = world(watched, Case(pp=2, zero=0, family="llama"), n=2)
    rows = len(batch(0)[0])
    message = SEQ * rows * LLAMA.hidden_size * 4
    assert [sent for *_, sent in ranks] == [(0.0, message, 0.0), (0.0, message, 0.0)]
    ranks = world(watched, Case(tp=2, zero=0, family="llama"), n=2)
    layers = len([name for name in ranks[0][0] if name.startswith("activation")])
    tokens = SEQ * rows * 4
    peak_and_sums = 3 * tokens  # of the cross-entropy
    want = (4 * layers + 2) * message + peak_and_sums  # an all-reduce on 2 ranks sends the buffer once
    assert [sent for *_, sent in ranks] == [(want, 0.0, 0.0)] * 2


def sent(case: Case) -> tuple[float, ...]:
    """Bytes a step in two steps after the first, in which ZeRO-3 learns what comes next."""
    config = case.config()
    learner = new_learner(config)
    for step in range(3):
        learner.step(own_rows(learner.layout, batch(step), config.trainer.micro_batch_size), 1e-3)
        if step == 0:
            learner.take_sent(1)
    return learner.take_sent(2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_deepspeed_sends_is_counted(world: World, stage: int) -> None:
    """fp32 and two ranks: an all-reduce sends its buffer once, gather and scatter half of it; two scalars beside."""
    case = Case(dp=2, zero=stage, family="llama")
    parameters, microbatches = parameter_count(case.config().model), num_microbatches(case.config(), 2)
    once = 4 * parameters
    want = [once, 1.5 * once, microbatches * once + once / 2, microbatches * once][stage]
    for tp, pp, dp in world(sent, case, n=2):
        assert (tp, pp) == (0.0, 0.0) and want <= dp < 1.01 * want
