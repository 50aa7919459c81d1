"""One rank of a training run, however it was started."""

from __future__ import annotations

import os
from typing import Any

from gpt3d.config.load import to_typed


def train_rank(config: dict[str, Any]) -> dict[str, Any]:
    """Train with the resolved config on this rank of the world that the environment describes; returns the results."""
    from gpt3d.debug import make_deterministic
    from gpt3d.parallel import device
    from gpt3d.trainer import Trainer

    typed = to_typed(config)
    if typed.debug.deterministic:
        make_deterministic(typed.seed)
    selected = device.select(int(os.environ["LOCAL_RANK"]), typed.cluster.device)
    device.init_process_group(selected, typed.cluster.timeout_minutes)
    results = Trainer(typed, selected).run()
    device.destroy_process_group()
    return results
