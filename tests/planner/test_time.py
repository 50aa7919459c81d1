"""The time model: its parts add up, its closed forms follow the simulated schedule, more work takes longer."""

from __future__ import annotations

import pytest

from gpt3d.planner.time import machine_of, step_time
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
    assert base.total == pytest.approx(sum(vars(base).values())) and base.recompute == base.offload == 0
    config.recompute = "full"
    assert step_time(config, 2, machine).recompute == pytest.approx(base.compute / 3, rel=0.1)  # all but the head again
    config.recompute, config.zero.offload_optimizer = "none", "cpu"
    assert step_time(config, 2, machine).offload > 0
    config.trainer.global_batch_size = 128
    assert step_time(config, 2, machine).bubble == pytest.approx(base.bubble)
    assert step_time(config, 2, machine).compute == pytest.approx(2 * base.compute)
