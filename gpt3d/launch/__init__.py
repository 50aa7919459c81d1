"""From one command to N ranks."""

from gpt3d.launch.failure import RankFailed
from gpt3d.launch.local import preload, run_ranks, start

__all__ = ["RankFailed", "preload", "run_ranks", "start"]
