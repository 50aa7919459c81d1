"""Figures of all ranks, as metrics of rank 0: memory, bytes sent, and the load of each machine."""

from __future__ import annotations

import contextlib
import math
import os

import torch
import torch.distributed as dist

from gpt3d.parallel.collectives import all_gather_first, all_reduce
from gpt3d.parallel.device import Device, host_memory_stats
from gpt3d.parallel.layout import Layout
from gpt3d.tracking.metrics import Metrics

MEMORY = ("memory_gb", "memory_now_gb", "host_memory_gb", "host_memory_now_gb")
SENT = ("tp_bytes", "pp_bytes", "dp_bytes")
NODE = ("node_cpu", "node_memory", "node_gpu", "node_gpu_watts")


def rank_metrics(device: Device, layout: Layout, sent: tuple[float, ...]) -> Metrics:
    """The highest of all ranks: memory, of each pipeline stage too, and `sent`. Collective, one all-reduce."""
    own, host, stages = device.memory_stats(), host_memory_stats(), layout.pp.size
    memory = [own.peak, own.allocated, host.peak, host.allocated]
    table = torch.zeros(1 + stages, len(MEMORY) + len(SENT), dtype=torch.float64)
    table[0] = torch.tensor([*memory, *sent])
    table[1 + layout.at.pp, : len(MEMORY)] = torch.tensor(memory)
    table[:, : len(MEMORY)] /= 2**30
    rows = all_reduce(table.to(layout.device), layout.world, dist.ReduceOp.MAX).tolist()
    metrics: Metrics = dict(zip((*MEMORY, *SENT), rows[0], strict=True))
    if stages > 1:
        for stage, row in enumerate(rows[1:]):
            metrics |= {f"{name}_stage_{stage}": value for name, value in zip(MEMORY, row, strict=False)}
    return metrics


def node_metrics(device: Device, layout: Layout) -> Metrics:
    """Load of every machine; a GPU's figures are the mean over the ranks there. Collective, one all-gather."""
    here = layout.rank // int(os.environ.get("LOCAL_WORLD_SIZE", layout.world.size))
    own = torch.tensor([[here, *_load(device)]], dtype=torch.float64, device=layout.device)
    by_node: dict[int, list[list[float]]] = {}
    for node, *values in all_gather_first(own, layout.world).tolist():
        by_node.setdefault(int(node), []).append(values)
    return {
        f"{name}_{node}": None if math.isnan(mean := sum(column) / len(column)) else mean
        for node, ranks in by_node.items()
        for name, column in zip(NODE, zip(*ranks, strict=True), strict=True)
    }


def _load(device: Device) -> list[float]:
    """Runnable processes per CPU, host memory in use, GPU time in use, watts; nan where the machine does not say."""
    load, memory, gpu, watts = (math.nan,) * 4
    with contextlib.suppress(OSError):
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
    with contextlib.suppress(OSError, KeyError, ValueError), open("/proc/meminfo") as file:
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in file)}
        memory = 1 - kib["MemAvailable"] / kib["MemTotal"]
    if device.kind == "cuda":
        with contextlib.suppress(Exception):  # NVML's Python package may be missing, or forbidden in a container
            gpu = torch.cuda.utilization(device.torch_device) / 100
            watts = torch.cuda.power_draw(device.torch_device) / 1000
    return [load, memory, gpu, watts]
