"""From one command to N ranks: `joining()` tells whether a launcher did it already, else `start` does it here.

world = launch.joining()
if world is not None:
    launch.join_world(world, compose, rank_main)  # does not return
launch.start(rank_main, config, nprocs=4, device="cpu", run_dir=run_dir)
"""

from gpt3d.launch.environment import LaunchError, World
from gpt3d.launch.failure import RankFailed
from gpt3d.launch.join import join_world, joining
from gpt3d.launch.local import GRACE_SECONDS, preload, run_ranks, start

__all__ = [
    "GRACE_SECONDS", "LaunchError", "RankFailed", "World", "join_world", "joining", "preload", "run_ranks", "start",
]  # fmt: skip
