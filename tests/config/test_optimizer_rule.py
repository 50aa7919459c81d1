"""DeepSpeed's CPU optimizer is for offloaded states only."""

from __future__ import annotations

from gpt3d.config.arithmetic import World
from gpt3d.config.load import compose
from gpt3d.config.rules import check


def test_cpu_adamw_needs_offload() -> None:
    world = World(device="cpu")
    (problem,) = check(compose(["optimizer=cpu_adamw", "parallel=dp2"]), world)
    assert problem.key == "optimizer.name" and "offload_optimizer" in str(problem)
    assert not check(compose(["optimizer=cpu_adamw", "parallel=dp2", "zero=2", "zero.offload_optimizer=cpu"]), world)
