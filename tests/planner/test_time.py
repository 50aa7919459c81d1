"""The time model: its parts add up, its closed forms follow the simulated schedule, more work takes longer."""

from __future__ import annotations

import dataclasses

import pytest

from gpt3d.planner.machine import Software, machine_of
from gpt3d.planner.time import mfu, step_time
from gpt3d.planner.time_report import PARTS
from tests.planner.conftest import Make


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_closed_form_follows_the_schedule(make: Make, chunks: int) -> None:
    config = make("70b", {"trainer.global_batch_size": 16, "pipeline.chunks": chunks})
    config.pipeline.schedule = "interleaved" if chunks > 1 else "1f1b"
    machine = machine_of(config)
    assert machine is not None
    quick, exact = step_time(config, 1, machine), step_time(config, 1, machine, exact=True)
    assert exact.bubble > 0 and quick.total == pytest.approx(exact.total, rel=0.03)


def test_what_costs_time(make: Make) -> None:
    config = make("70b", {"trainer.global_batch_size": 64})
    machine = machine_of(config)
    assert machine is not None
    base = step_time(config, 2, machine)
    assert (
        base.total == pytest.approx(sum(getattr(base, part) for part in PARTS)) and base.recompute == base.offload == 0
    )
    config.recompute = "full"
    assert step_time(config, 2, machine).recompute == pytest.approx(base.compute / 3, rel=0.1)  # all but the head again
    config.recompute, config.zero.offload_optimizer = "none", "cpu"
    assert step_time(config, 2, machine).offload > 0
    config.trainer.global_batch_size = 128
    assert step_time(config, 2, machine).bubble == pytest.approx(base.bubble)
    assert step_time(config, 2, machine).compute == pytest.approx(2 * base.compute)


# Korthikanti et al. 2022, table 5, on A100s, TP 8, without fused attention: layers, hidden, heads, pp, chunks, micro
# batch, batch; seconds a step with full recompute and without SP, and with selective recompute and SP.
TABLE_5 = {
    "22B": (48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
    "175B": (96, 12288, 96, 8, 3, 1, 64, 18.13, 13.75),
    "530B": (105, 20480, 128, 35, 3, 1, 280, 49.05, 37.83),
}


@pytest.mark.parametrize("name", TABLE_5)
def test_published_steps(make: Make, name: str) -> None:
    layers, hidden, heads, pp, chunks, micro, batch, full, selective = TABLE_5[name]
    changes = {"parallel.pp": pp, "pipeline.chunks": chunks, "zero.stage": 0, "data.seq_len": 2048}
    config = make("175b", {**changes, "cluster.gpu": "A100-SXM4-80GB", "cluster.peak_tflops": 312.0})
    config.cluster.intra_node_gb_per_s, config.cluster.inter_node_gb_per_s = 300.0, 25.0
    config.pipeline.schedule = "interleaved" if chunks > 1 else "1f1b"
    config.trainer.micro_batch_size, config.trainer.global_batch_size = micro, batch
    config.model = dataclasses.replace(
        config.model, num_layers=layers, hidden_size=hidden, num_heads=heads, num_kv_heads=heads,
        head_dim=hidden // heads, ffn_hidden_size=4 * hidden, vocab_size=51200,
    )  # fmt: skip
    machine = machine_of(config, Software("unfused"))
    assert machine is not None
    for recompute, parallel, seconds in (("full", False, full), ("selective", True, selective)):
        config.recompute, config.parallel.sequence_parallel = recompute, parallel
        assert step_time(config, 1, machine, exact=True).total == pytest.approx(seconds, rel=0.2)


def test_collectives_that_the_backward_hides(make: Make) -> None:
    """With SP half of the backward's ring is exposed; the split backward of zb_h1 hides nothing."""
    config = make("70b", {"trainer.global_batch_size": 64, "parallel.sequence_parallel": True})
    machine, old = machine_of(config), machine_of(config, Software(overlaps_tp=False))
    assert machine is not None and old is not None
    now, before = step_time(config, 2, machine), step_time(config, 2, old)
    assert before.tp_hidden == 0 < now.tp_hidden
    assert now.tensor_parallel == pytest.approx(0.75 * before.tensor_parallel, rel=0.1)
    config.pipeline.schedule = "zb_h1"
    split = step_time(config, 2, machine)
    assert split.tp_hidden == 0 and split.tensor_parallel > before.tensor_parallel and split.bubble < now.bubble


def test_a_ring_shares_the_ports_of_its_node(make: Make) -> None:
    config = make("70b", {"cluster.nodes": 8})
    machine = machine_of(config)
    assert machine is not None
    assert machine.link(8) == pytest.approx(0.8 * 450e9)  # inside the node
    assert machine.link(64, 1) == pytest.approx(0.8 * 50e9)
    assert machine.link(64, 4) == pytest.approx(0.8 * 200e9)
    assert machine.link(64, 8) == pytest.approx(0.8 * 400e9)


def test_llama_3_405b_as_published(make: Make) -> None:
    """Dubey et al. 2024, table 4, rows 1 and 2: MFU 43 % and 41 % with TP 8, PP 16, 16M tokens a step, no recompute.
    The interleaving isn't printed: 8 chunks, a layer each. Their FSDP reduce-scatters gradients in fp32 (3.3.2),
    which are the bytes of DeepSpeed's all-reduce in bf16."""
    for ranks, published in ((8192, 0.43), (16384, 0.41)):
        config = make("405b", {"parallel.pp": 16, "pipeline.chunks": 8, "parallel.sequence_parallel": True})
        config.pipeline.schedule, config.parallel.embedding_layers = "interleaved", 0.1
        config.trainer.global_batch_size, dp = 2048, ranks // 128
        config.precision.grad_dtype = "bf16"
        machine = machine_of(config)
        assert machine is not None
        planned = mfu(config, ranks, step_time(config, dp, machine).total, machine)
        assert planned == pytest.approx(published, rel=0.1)
