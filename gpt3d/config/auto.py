"""Keys that the planner may choose: `parallel=auto`, `pipeline=auto`, `zero=auto`, `recompute=auto`, micro batch -1."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from gpt3d.config.schema import RunConfig

# Key -> the value that leaves it to the planner. No rank ever sees one: they are replaced before anything is checked.
AUTO: dict[str, Any] = {
    "parallel.tp": -1,
    "parallel.pp": -1,
    "pipeline.schedule": "auto",
    "trainer.micro_batch_size": -1,
    "recompute": "auto",
    "zero.stage": -1,
}


def auto_keys(config: RunConfig) -> list[str]:
    """The keys of this configuration that are left to the planner."""
    return [key for key, auto in AUTO.items() if attrgetter(key)(config) == auto]
