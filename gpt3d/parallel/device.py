"""The one place that decides on which device a rank computes and over which backend it talks."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


class DeviceError(RuntimeError):
    """The device asked for is not there."""

    show_traceback = False


@dataclass(frozen=True)
class MemoryStats:
    """Bytes in use now and at the highest: of the CUDA allocator, or of the whole process on CPU."""

    allocated: int
    peak: int


@dataclass(frozen=True)
class Device:
    """Where this rank's tensors live (`torch_device`) and the process-group backend that moves them."""

    torch_device: torch.device
    backend: str

    @property
    def kind(self) -> str:
        """ "cuda" or "cpu"."""
        return self.torch_device.type

    def synchronize(self) -> None:
        """Wait until the device has done what was queued; nothing to wait for on CPU."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def memory_stats(self) -> MemoryStats:
        """Bytes allocated and their peak since the start of the process."""
        if self.kind == "cuda":
            return MemoryStats(
                torch.cuda.memory_allocated(self.torch_device), torch.cuda.max_memory_allocated(self.torch_device)
            )
        return host_memory_stats()


def kind(wanted: str = "auto") -> str:
    """ "cuda" or "cpu" for a wish of "auto", "cuda" or "cpu". Raises DeviceError when CUDA is wanted and missing."""
    if wanted not in ("auto", "cuda", "cpu"):
        raise DeviceError(f"cluster.device={wanted}: use auto, cuda or cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise DeviceError("cluster.device=cuda: torch finds no CUDA device here; use cluster.device=auto or cpu")
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def count(device_kind: str) -> int | None:
    """How many ranks this machine can hold: its CUDA devices; None on CPU, where ranks can share cores."""
    return torch.cuda.device_count() if device_kind == "cuda" else None


def select(local_rank: int, wanted: str = "auto") -> Device:
    """The device of the rank that is number `local_rank` on its machine; on CUDA it becomes the current device."""
    if kind(wanted) == "cpu":
        return Device(torch.device("cpu"), "gloo")
    present = torch.cuda.device_count()
    if present == 1 and "SLURM_LOCALID" in os.environ:  # srun --gpus-per-task=1: each task sees its own GPU alone
        local_rank = 0
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed takes its device from this
    if local_rank >= present:
        raise DeviceError(
            f"local rank {local_rank} has no GPU: this machine shows {present} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); start at most {present} ranks"
        )
    torch.cuda.set_device(local_rank)
    return Device(torch.device("cuda", local_rank), "nccl")


def init_process_group(device: Device, timeout_minutes: float = 10.0) -> None:
    """Join the world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe (set by gpt3d.launch or torchrun).

    Without `device_id`: NCCL then connects each group at its first use instead of splitting the world's communicator,
    which all ranks would have to do together for every group.
    """
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group(device.backend, init_method="env://", timeout=timeout)


def destroy_process_group() -> None:
    """Leave the world, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def host_memory_stats() -> MemoryStats:
    """Resident bytes of this process and their peak."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        kib = {
            name: int(rest.split()[0])
            for name, _, rest in (line.partition(":") for line in lines)
            if name in ("VmRSS", "VmHWM")
        }
        return MemoryStats(kib["VmRSS"] * 1024, kib["VmHWM"] * 1024)
    except (OSError, KeyError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return MemoryStats(peak, peak)
