"""Settings that need each other: the optimizer for offloaded states, the schedule for several chunks."""

from __future__ import annotations

import pytest

from gpt3d.config.arithmetic import World
from gpt3d.config.load import compose
from gpt3d.config.rules import check


def test_cpu_adamw_needs_offload() -> None:
    world = World(device="cpu")
    (problem,) = check(compose(["optimizer=cpu_adamw", "parallel=dp2"]), world)
    assert problem.key == "optimizer.name" and "offload_optimizer" in str(problem)
    assert not check(compose(["optimizer=cpu_adamw", "parallel=dp2", "zero=2", "zero.offload_optimizer=cpu"]), world)


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["pipeline=interleaved", "parallel=single"], "parallel.pp=2"),
        (["pipeline=interleaved", "pipeline.chunks=1", "parallel=pp2"], "pipeline.chunks=2"),
    ],
)
def test_interleaving_needs_stages_and_chunks(overrides: list[str], fix: str) -> None:
    (problem,) = check(compose(overrides), World(device="cpu"))
    assert problem.key == "pipeline.chunks" and fix in str(problem)
