"""What a GPU, its links and the software on it reach: every constant of the time model, with its source.

The constants have a physical meaning and hold for all models and layouts alike. Where no source is named they were set
on every second of the published A100 and H100 runs that `benchmarks/planner.py` reads; it judges them by the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpt3d.config.schema import RunConfig
from gpt3d.planner.hardware import lookup


@dataclass(frozen=True)
class Generation:
    """Shares of the dense peak. `gemm`: a matrix product of endless size; a dim (rows, columns or depth) of `gemm_half`
    reaches half of that, since tiles and waves are not filled. `attention`: the fused kernel's causal half."""

    gemm: float
    gemm_half: int
    attention: dict[str, float]


# Fused attention: FlashAttention reaches 25-40 % of an A100's peak, FlashAttention-2 50-73 % (Dao 2023, abstract), and
# that one 35 % of an H100's (Shah et al. 2024, abstract). torch's scaled_dot_product_attention is FlashAttention-2.
AMPERE = Generation(0.80, 230, {"flash1": 0.30, "flash2": 0.55})
# Under load the clocks of Hopper fall below the data sheet's, so that its products stay further from the peak.
HOPPER = Generation(0.67, 460, {"flash1": 0.17, "flash2": 0.35})
HOPPER_TFLOPS = 500  # peaks above this are Hopper's or later

PASSES = 12  # times that norms and residual sums of a layer move an activation of the hidden size
MEMORY = 0.73  # of the data sheet's memory bandwidth
LINK = 0.80  # of the data sheet's bandwidth per direction, for a ring over large buffers
HOP = 4e-6  # assumed: seconds a ring needs from node to node, whatever it carries
LATENCY = 12e-6  # assumed: seconds until a collective or message starts to move
EXPOSED = 0.12  # part of a pipeline message in the steady state that no compute hides
HIDDEN = 0.7  # part of the compute under which overlapped communication can hide
PCIE = 25e9  # PCIe 4.0 x16, 32 GB/s, less protocol: bytes/s between a GPU and its host, in one direction
HOST_ADAM = 20e9  # assumed: bytes/s of states that a GPU's share of its host can update


@dataclass(frozen=True)
class Software:
    """What the programs can do; the defaults are this one. Published runs of older ones are judged by what they had.

    `attention`: flash2 | flash1 | unfused (all scores written out). `overlaps_tp`: the backward of a column-parallel
    layer hides its collectives under its matrix products. `shares_ports`: a ring that has several ranks in a node uses
    the network ports of all of them.
    """

    attention: str = "flash2"
    overlaps_tp: bool = True
    shares_ports: bool = True


@dataclass(frozen=True)
class Machine:
    """Figures of one GPU, its links and its software: FLOP/s and bytes/s."""

    flops: float
    memory: float
    intra: float
    inter: float
    gpus_per_node: int
    gemm: float
    gemm_half: int
    attention: float  # 0: unfused
    software: Software

    def link(self, span: int, ranks_in_node: int = 1) -> float:
        """Bytes/s of a ring over ranks that span `span` consecutive GPUs, `ranks_in_node` of them in each node."""
        if span <= self.gpus_per_node:
            return LINK * self.intra
        ports = ranks_in_node if self.software.shares_ports else 1
        return LINK * min(self.intra, self.inter * ports)


def machine_of(config: RunConfig, software: Software = Software()) -> Machine | None:
    """The cluster's figures; None if one is not known."""
    cluster = config.cluster
    gpu = lookup(cluster.gpu) if cluster.gpu else None
    peak = cluster.peak_tflops or (gpu.bf16_tflops if gpu else None)
    intra = cluster.intra_node_gb_per_s or (gpu.link_gb_per_s if gpu else None)
    inter = cluster.inter_node_gb_per_s or (intra if cluster.nodes == 1 else None)  # one node has no network between
    count = cluster.gpus_per_node
    if gpu is None or peak is None or intra is None or inter is None or count is None:
        return None
    rate = peak * 1e12 / (2 if config.precision.dtype == "fp32" else 1)  # TF32 runs at half the bf16 rate
    kind = HOPPER if peak > HOPPER_TFLOPS else AMPERE
    attention = kind.attention.get(software.attention, 0.0)
    memory = gpu.memory_gb_per_s * 1e9
    return Machine(
        rate, memory, intra * 1e9, inter * 1e9, count, kind.gemm, kind.gemm_half, attention, software
    )  # fmt: skip
