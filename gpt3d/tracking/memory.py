"""Memory in use over all ranks, as metrics."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gpt3d.parallel.collectives import all_reduce
from gpt3d.parallel.device import Device, host_memory_stats
from gpt3d.parallel.layout import Layout
from gpt3d.tracking.metrics import Metrics

NAMES = ("memory_gb", "memory_now_gb", "host_memory_gb", "host_memory_now_gb")


def memory_metrics(device: Device, layout: Layout) -> Metrics:
    """The highest of all ranks, and the peak of each pipeline stage. Collective, one all-reduce."""
    own, host, stages = device.memory_stats(), host_memory_stats(), layout.pp.size
    values = [own.peak, own.allocated, host.peak, host.allocated, *[0] * stages]
    values[len(NAMES) + layout.at.pp] = own.peak
    bytes_used = torch.tensor(values, dtype=torch.float64, device=layout.device)
    highest = (all_reduce(bytes_used, layout.world, dist.ReduceOp.MAX) / 2**30).tolist()
    names = [*NAMES, *(f"memory_gb_stage_{stage}" for stage in range(stages))]
    return dict(zip(names if stages > 1 else NAMES, highest, strict=stages > 1))
