"""The one place that decides on the device: what it chooses, and what it says when it cannot."""

from __future__ import annotations

import os

import pytest
import torch

from gpt3d.parallel import device


def test_cpu_by_wish_and_without_cuda(monkeypatch):
    assert device.select(3, "cpu") == device.Device(torch.device("cpu"), "gloo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.kind("auto") == "cpu" and device.count("cpu") is None
    with pytest.raises(device.DeviceError, match=r"cluster\.device=cuda.*use cluster\.device=auto or cpu"):
        device.select(0, "cuda")
    with pytest.raises(device.DeviceError, match="use auto, cuda or cpu"):
        device.kind("tpu")


def test_cuda_takes_the_local_device(monkeypatch):
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert device.select(1, "auto") == device.Device(torch.device("cuda", 1), "nccl")
    assert chosen == [1]
    with pytest.raises(device.DeviceError, match="local rank 2 has no GPU: this machine shows 2"):
        device.select(2, "cuda")


def test_a_slurm_task_may_see_its_own_gpu_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("SLURM_LOCALID", raising=False)
    with pytest.raises(device.DeviceError, match="this machine shows 1"):
        device.select(3, "cuda")
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert device.select(3, "cuda") == device.Device(torch.device("cuda", 0), "nccl")
    assert os.environ["LOCAL_RANK"] == "0"


def test_memory_of_the_process_follows_its_tensors():
    cpu = device.select(0, "cpu")
    before = cpu.memory_stats()
    held = torch.ones(50_000_000, dtype=torch.uint8)
    after = cpu.memory_stats()
    assert 45e6 < after.allocated - before.allocated < 70e6
    assert after.peak >= after.allocated - 1e6
    del held


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_memory_and_group():
    from gpt3d.launch import run_ranks

    allocated, total = run_ranks(cuda_body, nprocs=1, device="cuda", timeout=120)[0]
    assert allocated >= 2**20 and total == 1.0


def cuda_body() -> tuple[int, float]:
    import torch.distributed as dist

    mine = device.select(0, "cuda")
    device.init_process_group(mine, 1.0)
    tensor = torch.ones(2**18, device=mine.torch_device)
    dist.all_reduce(tensor)
    mine.synchronize()
    device.destroy_process_group()
    return mine.memory_stats().peak, tensor[0].item()
