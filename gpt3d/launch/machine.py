"""What this machine, or the launcher's world, offers to a run."""

from __future__ import annotations

import os
import subprocess

from gpt3d.config.arithmetic import World
from gpt3d.config.schema import RunConfig
from gpt3d.launch import environment
from gpt3d.parallel import device


def this_machine(config: RunConfig, joined: environment.World | None = None) -> World:
    """Ranks (if a launcher started them), GPUs, device and memory, as the config rules want to know them."""
    wanted = config.cluster.device
    kind = wanted if wanted == "cuda" else device.kind(wanted)  # asked for but missing: the rules count 0 GPUs
    name, memory = _first_gpu() if kind == "cuda" else (None, None)
    return World(
        ranks=joined.size if joined else None,
        ranks_per_node=joined.local_size if joined else None,
        gpus=(device.count("cuda") or 0) if kind == "cuda" else 0,
        device=kind,
        host_memory_gb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        gpu_name=name,
        gpu_memory_gb=memory,
    )


def _first_gpu() -> tuple[str | None, float | None]:
    """Name and GB of the first GPU, asked of the driver's tool: through torch this process would hold GPU memory."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    if visible.startswith("MIG"):
        return None, None  # the tool would tell of the whole GPU
    if visible:
        query += ["-i", visible]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        name, _, mebibytes = answer.splitlines()[0].rpartition(",")
        return name.strip(), float(mebibytes) / 1024
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None, None
