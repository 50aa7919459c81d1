"""GPUs by name: dense bf16 peak and memory. A GPU that isn't here has no peak, and MFU is then "n/a"."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Vendor's figures: dense (no sparsity) bf16 tensor-core peak in TFLOP/s (10^12), memory in GB of 2^30 bytes,
    its bandwidth and that of its link to the other GPUs of the node (NVLink, else PCIe 4.0), per direction, in GB/s
    (10^9)."""

    name: str
    bf16_tflops: float
    memory_gb: float
    memory_gb_per_s: float
    link_gb_per_s: float = 32


# (words that must all be in the device's name, figures). More words come first: the first match counts.
# Sources: the NVIDIA data sheet of each product; where it prints "with sparsity", half of that.
_TABLE: tuple[tuple[tuple[str, ...], Gpu], ...] = (
    (("a100", "40gb"), Gpu("A100 40GB", 312.0, 40, 1555, 300)),
    (("a100",), Gpu("A100 80GB", 312.0, 80, 2039, 300)),
    (("a800",), Gpu("A800 80GB", 312.0, 80, 2039, 200)),
    (("a30",), Gpu("A30", 165.0, 24, 933)),
    (("h100", "nvl"), Gpu("H100 NVL", 835.5, 94, 3900, 300)),  # 1,671 with sparsity
    (("h100", "pcie"), Gpu("H100 PCIe", 756.5, 80, 2000)),  # 1,513 with sparsity
    (("h100",), Gpu("H100 SXM", 989.0, 80, 3350, 450)),  # 1,979 with sparsity
    (("h200", "nvl"), Gpu("H200 NVL", 835.5, 141, 4800, 450)),  # 1,671 with sparsity
    (("h200",), Gpu("H200 SXM", 989.0, 141, 4800, 450)),  # 1,979 with sparsity
    (("gb200",), Gpu("GB200", 2500.0, 186, 8000, 900)),  # GB200 NVL72: 5,000 with sparsity
    (("b200",), Gpu("B200", 2250.0, 180, 8000, 900)),  # HGX B200: 36 PFLOP/s with sparsity in 8 GPUs
    (("l40s",), Gpu("L40S", 362.0, 48, 864)),
    (("l4",), Gpu("L4", 121.0, 24, 300)),  # 242 with sparsity
)


def lookup(device_name: str) -> Gpu | None:
    """Figures of a device by the name its driver gives ("NVIDIA H100 80GB HBM3"); None if unknown or a MIG slice."""
    words = device_name.lower().replace("-", " ").replace("_", " ").split()
    if "mig" in words:
        return None
    return next((gpu for needed, gpu in _TABLE if all(word in words for word in needed)), None)


def known_gpus() -> list[Gpu]:
    """Every GPU of the table."""
    return [gpu for _, gpu in _TABLE]


def peak_tflops(device_name: str | None, dtype: str, configured: float | None = None) -> float | None:
    """Dense peak of one GPU in TFLOP/s for this compute type: `cluster.peak_tflops` first, then the table.

    None for fp32, whose matrix products may or may not use TF32, and for devices we don't know: MFU is then "n/a".
    """
    if dtype not in ("bf16", "fp16"):
        return None
    if configured is not None:
        return configured
    gpu = lookup(device_name) if device_name else None
    return gpu.bf16_tflops if gpu else None
