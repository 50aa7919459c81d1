"""What this machine, or the launcher's world, offers to a run."""

from __future__ import annotations

import os

from gpt3d.config.arithmetic import World
from gpt3d.config.schema import RunConfig
from gpt3d.launch import environment
from gpt3d.parallel import device


def this_machine(config: RunConfig, joined: environment.World | None = None) -> World:
    """Ranks (if a launcher started them), GPUs, device and memory, as the config rules want to know them."""
    wanted = config.cluster.device
    kind = wanted if wanted == "cuda" else device.kind(wanted)  # asked for but missing: the rules count 0 GPUs
    return World(
        ranks=joined.size if joined else None,
        ranks_per_node=joined.local_size if joined else None,
        gpus=(device.count("cuda") or 0) if kind == "cuda" else 0,
        device=kind,
        host_memory_gb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
    )
