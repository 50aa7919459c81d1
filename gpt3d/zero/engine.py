"""ZeRO over the data-parallel ranks: what the trainer and the pipeline see of it, and the choice of who does it.

An engine owns the gradients, the optimizer and its state. The pipeline calls `forward` and `backward` for each
microbatch in whatever order its schedule says; `step` reduces what is left, clips by the global norm, and updates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gpt3d.config.schema import RunConfig
from gpt3d.model.documents import Documents
from gpt3d.model.gpt import OnBuilt, keep_whole
from gpt3d.parallel.layout import Layout
from gpt3d.parallel.placement import Placement, placement_of
from gpt3d.parallel.split_backward import WeightGradients

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# Gets the whole averaged gradient of each parameter of this rank, one at a time, and the factor that is on them all.
OnGradients = Callable[[Iterator[tuple[Placement, Tensor]], float], None]


@dataclass(frozen=True)
class StepResult:
    """`grad_norm`: L2 over all axes before clipping, each parameter counted once.

    `skipped`: some gradient was not finite on some rank, so no rank updated anything; `grad_norm` is then inf.
    """

    grad_norm: float
    skipped: bool


class Engine(Protocol):
    """The contract between the trainer, the pipeline executor and a ZeRO implementation."""

    module: nn.Module
    on_gradients: OnGradients | None  # called in `step` when gradients are averaged, before they are clipped

    @property
    def loss_scale(self) -> float:
        """Factor that the loss must carry into backward (fp16); 1 otherwise."""

    def forward(
        self, chunk: int, x: Tensor, seed: int, labels: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor:
        """Run model chunk `chunk` of this rank."""

    def backward(self, output: Tensor | GradientEdge, grad: Tensor, last: bool) -> None:
        """Accumulate gradients of one microbatch; `last` marks this rank's last backward of the step."""

    def backward_input(self, output: GradientEdge, grad: Tensor, x: Tensor) -> tuple[Tensor, WeightGradients]:
        """First half of a split backward: the gradient of the input `x`, and the weight gradients for later."""

    def backward_weight(self, gradients: WeightGradients, last: bool) -> None:
        """Second half: accumulate them; `last` as in `backward`."""

    def step(self, lr: float) -> StepResult:
        """Reduce over DP (the average), clip, update with learning rate `lr`, clear gradients. Collective."""

    def held_weights(self) -> Iterator[tuple[Placement, Tensor]]:
        """Each parameter of this rank as forward uses it, under ZeRO-3 this rank's flat shard of it."""

    def master_weights(self) -> Iterator[tuple[Placement, Tensor]]:
        """Each parameter of this rank as updated by the optimizer: fp32, local shape. Collective over DP."""


class Chunks(nn.Module):
    """All model chunks of this rank under one root, because an engine wraps one module."""

    def __init__(self, chunks: list[nn.Module]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)

    def forward(
        self, chunk: int, x: Tensor, seed: int, labels: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor:
        return self.chunks[chunk](x, seed, labels, documents)


def sharder(config: RunConfig, layout: Layout) -> OnBuilt:
    """What to do with each part of the model once it is built: under ZeRO-3 a rank keeps its shard, never the whole."""
    if config.zero.stage < 3 or layout.dp.size == 1:
        return keep_whole
    from gpt3d.zero.deepspeed_engine import shard

    return functools.partial(shard, config, layout)


def new_engine(config: RunConfig, layout: Layout, chunks: list[nn.Module]) -> Engine:
    """Stage 0 is plain replication; stages 1 to 3 are DeepSpeed."""
    if config.zero.stage == 0:
        from gpt3d.zero.replicated import ReplicatedEngine

        return ReplicatedEngine(config, layout, Chunks(chunks))
    from gpt3d.zero.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(config, layout, Chunks(chunks))


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: matrices decay, norms and biases do not. Every stage has both, which DeepSpeed's norm relies on."""
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if placement_of(p).decays], "weight_decay": weight_decay},
        {"params": [p for p in parameters if not placement_of(p).decays], "weight_decay": 0.0},
    ]


def tied_parameters(module: nn.Module, config: RunConfig, layout: Layout) -> list[nn.Parameter]:
    """Word embeddings that have a second copy on another stage: their gradients must be summed over `layout.ends`."""
    if not config.model.tied_embeddings or layout.ends.size == 1:
        return []
    return [p for p in module.parameters() if placement_of(p).name == "embedding.word.weight"]
