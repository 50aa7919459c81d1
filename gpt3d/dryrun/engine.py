"""Engines on tensors without numbers: ZeRO stage 0 as it is, and what DeepSpeed's stages leave to the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gpt3d.config.schema import RunConfig
from gpt3d.dryrun.collecting import Collecting
from gpt3d.parallel.layout import Layout
from gpt3d.parallel.split_backward import WeightGradients
from gpt3d.zero.fragments import optimizer_state
from gpt3d.zero.replicated import ReplicatedEngine


class _InPlaceAdamW(torch.optim.AdamW):
    """torch's fused kernel on CUDA: the update allocates nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class MetaEngine(ReplicatedEngine):
    """As in a step after the first: Adam's moments are there. `fused`: the optimizer is one kernel, as on CUDA."""

    def __init__(self, config: RunConfig, layout: Layout, module: nn.Module, fused: bool) -> None:
        super().__init__(config, layout, module)
        if fused:
            self.optimizer = _InPlaceAdamW(self.optimizer.param_groups)
        for _ in optimizer_state(self).fragments():
            pass  # making the moments is what it is called for

    def _grad_norm(self) -> Tensor:
        super()._grad_norm()
        return torch.zeros(())  # the step wants a number

    def optimizer_tensors(self) -> list[Tensor]:
        """Masters that are not the parameters themselves, and the moments."""
        moments = [x for state in self.optimizer.state.values() for x in state.values()]
        return moments + [master for p, master in self.masters.items() if master is not p]


class ForwardBackwardEngine(MetaEngine):
    """Under ZeRO 1 to 3: gradients leave each parameter as soon as they are there, and the update is DeepSpeed's."""

    def __init__(self, config: RunConfig, layout: Layout, module: nn.Module, fused: bool) -> None:
        super().__init__(config, layout, module, fused)
        self.collecting, self.last = Collecting(config, layout, module), False
        for p in module.parameters():
            p.grad_dtype = p.dtype
            p.register_post_accumulate_grad_hook(lambda p: self.collecting.take(p, self.last))

    def backward(self, output: Tensor | GradientEdge, grad: Tensor, last: bool) -> None:
        self.last = last
        super().backward(output, grad, last)
        self.collecting.end()

    def backward_weight(self, gradients: WeightGradients, last: bool) -> None:
        self.last = last
        super().backward_weight(gradients, last)
        self.collecting.end()
