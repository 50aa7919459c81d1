"""The executor on ranks: memory bound, order independent of timing, rows that stay together, overflow on a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpt3d.launch import RankFailed
from gpt3d.pipeline.check import check
from gpt3d.pipeline.schedule import all_ranks
from gpt3d.verification.cases import SEQ, Case
from tests.pipeline import runs

World = Callable[..., list[Any]]
HIDDEN, BYTES = 32, 4  # of the tiny models, in fp32


@pytest.mark.parametrize("zero", [0, 3])
def test_memory_is_that_of_the_microbatches_in_flight(world: World, zero: int) -> None:
    ranks = world(runs.memory, Case(pp=2, micro=1, zero=zero), (2, 8, 32), n=2)
    for rank, (few, some, many) in enumerate(ranks):
        assert many[2] == pytest.approx(some[2], rel=0.02)
        in_flight = 2 - rank
        assert few[0] == some[0] == many[0] == (in_flight if rank else 0)  # the first stage's input is tokens
        assert few[1] == some[1] == many[1] == in_flight - 1, "an output outlived its sending"


@pytest.mark.parametrize(
    "schedule, chunks, pp", [("1f1b", 1, 4), ("zb_h1", 1, 4), ("interleaved", 2, 2), ("gpipe", 1, 2)]
)
def test_stage_inputs_alive_are_what_the_checker_says(world: World, schedule: str, chunks: int, pp: int) -> None:
    counts = (8,) if schedule == "gpipe" else (8, 16)
    ranks = world(runs.memory, Case(pp=pp, micro=1, schedule=schedule, chunks=chunks), counts, n=pp)
    for i, count in enumerate(counts):
        bound = check(all_ranks(schedule, pp, chunks, count), pp, chunks).in_flight
        for rank in range(1, pp):
            assert ranks[rank][i][0] <= bound[rank]
            if schedule != "zb_h1":  # there x may go with the input gradient
                assert ranks[rank][i][0] == bound[rank]


@pytest.mark.parametrize("case", [Case(pp=2, micro=1, zero=1), Case(pp=2, micro=1, zero=3, schedule="zb_h1")], ids=str)
def test_nothing_grows_over_50_steps(world: World, case: Case) -> None:
    for early, late in world(runs.live_tensors, case, (5, 50), n=2, timeout=120):
        assert early == late


@pytest.mark.parametrize(
    "case, counts, layers",
    [
        (Case(pp=2, schedule="interleaved", chunks=2, micro=1), (2, 3, 4, 5, 6), 4),
        (Case(pp=4, schedule="interleaved", chunks=2, micro=1), (4, 8), 8),
        (Case(pp=2, schedule="zb_h1", micro=1), (1, 2, 5), 4),
    ],
    ids=str,
)
def test_a_slow_rank_changes_nothing(world: World, case: Case, counts: tuple[int, ...], layers: int) -> None:
    single = world(runs.losses_with_delay, Case(micro=1, zero=0), counts, layers, 0, 0.0, n=1)[0]
    prompt = world(runs.losses_with_delay, case, counts, layers, 0, 0.0, n=case.pp)[0]
    assert prompt == pytest.approx(single, abs=2e-6)
    for slow in {0, case.pp - 1}:
        assert world(runs.losses_with_delay, case, counts, layers, slow, 0.05, n=case.pp)[0] == prompt


@pytest.mark.parametrize("case", [Case(pp=2, schedule="gpipe", micro=1, zero=0), Case(pp=4, micro=1, zero=0)], ids=str)
def test_neighbours_are_connected_before_a_receive_is_posted_ahead(world: World, case: Case) -> None:
    world(runs.connected_at_first_use, case, (1, 4), n=case.pp)


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 2), ("zb_h1", 1)])
def test_each_microbatch_meets_its_own_labels(world: World, schedule: str, chunks: int) -> None:
    steps = (1, 10, 50)
    alone = world(runs.microbatch_losses, Case(micro=1, zero=0), 4, steps, n=1)[0]
    case = Case(pp=2, micro=1, zero=0, schedule=schedule, chunks=chunks)
    first, last = world(runs.microbatch_losses, case, 4, steps, n=2)
    assert first == [[], [], []]
    for got, want in zip(last, alone, strict=True):
        assert len(set(want)) == 4  # rows differ, so a mix-up would show
        assert got == pytest.approx(want, rel=2e-4)


def test_sequence_parallelism_sends_each_number_once(world: World) -> None:
    whole = SEQ * 2 * HIDDEN * BYTES  # one activation of two rows
    assert world(runs.bytes_sent, Case(pp=2, micro=2), 3, n=2) == [3 * whole, 3 * whole]
    assert world(runs.bytes_sent, Case(tp=2, pp=2, sp=True, micro=2), 3, n=4) == [3 * whole // 2] * 4


def test_evaluation_of_any_number_of_batches(world: World) -> None:
    counts = (1, 3, 0, 2)
    alone = world(runs.ragged_evaluation, Case(zero=0), counts, n=1)[0]
    for case in (Case(pp=2), Case(pp=2, schedule="interleaved", chunks=2, zero=3), Case(pp=2, schedule="zb_h1")):
        for got in world(runs.ragged_evaluation, case, counts, n=2):
            for (loss, targets), (want, want_targets) in zip(got, alone, strict=True):
                assert targets == want_targets and loss == pytest.approx(want, rel=2e-6)


@pytest.mark.parametrize("dtype, zero", [("fp16", 0), *(("fp32", zero) for zero in range(4)), ("bf16", 1), ("bf16", 3)])
def test_overflow_on_one_stage_is_skipped_by_all(world: World, dtype: str, zero: int) -> None:
    case = Case(pp=2, micro=1, zero=zero, dtype=dtype)
    first, last = world(runs.overflow_on_last_stage, case, 3, 4, n=2)
    assert first == last
    assert [skipped for skipped, _, _ in first] == [False, False, True, False]
    assert [moved for _, _, moved in first] == [True, True, False, True]
    scales = [scale for _, scale, _ in first]
    assert scales == ([65536.0, 65536.0, 32768.0, 32768.0] if dtype == "fp16" else [1.0] * 4)


COPIES = [
    ("final_norm.weight", Case(tp=2, pp=2, family="gpt", zero=0), "tensor-parallel"),
    ("embedding.word.weight", Case(tp=2, pp=2, family="gpt", zero=2), "first and last pipeline"),
    ("layers.3.attention.qkv.weight", Case(tp=4, family="one_kv_head", zero=3), "tensor-parallel"),
    ("layers.0.mlp.down.weight", Case(dp=2, zero=1), "data-parallel"),
]


@pytest.mark.parametrize("name, case, axis", COPIES, ids=lambda value: str(value))
def test_a_copy_that_differs_in_one_bit_is_named(world: World, name: str, case: Case, axis: str) -> None:
    world(runs.damaged_copies, case, 0, None, n=case.world)
    with pytest.raises(RankFailed, match=rf"(?s)differ between the {axis} ranks.*{name}"):
        world(runs.damaged_copies, case, case.world - 1, name, n=case.world)
