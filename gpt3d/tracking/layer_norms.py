"""Gradient and activation norms of each layer in one step, equal in every layout. Costs nothing in other steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gpt3d.model.block import Block
from gpt3d.parallel.collectives import all_reduce
from gpt3d.parallel.layout import Layout
from gpt3d.parallel.placement import Placement
from gpt3d.tracking.metrics import Metrics


class LayerNorms:
    """Watches one step of `module`, this rank's part of a model of `num_layers` layers."""

    def __init__(self, module: nn.Module, num_layers: int, layout: Layout) -> None:
        self.layout, self.num_layers = layout, num_layers
        # Squares of gradients: layers, embedding, head; squares and numbers of activations: layers.
        self.sums = torch.zeros(3 * num_layers + 2, dtype=torch.float64)
        self.pending: list[tuple[int, Tensor]] = []  # on the device until `read`, so that the step does not wait
        blocks = (block for block in module.modules() if isinstance(block, Block))
        self.hooks = [block.register_forward_hook(self._activation) for block in blocks]

    def _activation(self, block: nn.Module, inputs: Any, output: Tensor) -> None:
        """A layer that recompute runs twice counts twice in squares and in numbers: the mean is the same."""
        assert isinstance(block, Block)
        at = self.num_layers + 2 + block.index
        self.pending.append((at, torch.linalg.vector_norm(output.detach(), dtype=torch.float32).square()))
        self.sums[at + self.num_layers] += output.numel()

    def gradients(self, held: Iterable[tuple[Placement, Tensor]], loss_scale: float) -> None:
        """The whole averaged gradient of each parameter of this rank; of the copies of a number one counts."""
        for place, gradient in held:
            if place.counted:
                norm = torch.linalg.vector_norm(gradient, dtype=torch.float32) / loss_scale
                self.pending.append((self._section(place.name), norm.square() / self.layout.dp.size))

    def _section(self, name: str) -> int:
        first, _, rest = name.partition(".")
        if first == "layers":
            return int(rest.split(".")[0])
        return self.num_layers + (0 if first == "embedding" else 1)

    def read(self) -> Metrics:
        """The norms of the step; null where nothing was seen (a batch without targets). Collective over the world."""
        for hook in self.hooks:
            hook.remove()
        for at, square in self.pending:
            self.sums[at] += square.item()
        total = all_reduce(self.sums.to(self.layout.device), self.layout.world).tolist()
        layers = self.num_layers
        squares, numbers = total[layers + 2 : 2 * layers + 2], total[2 * layers + 2 :]
        seen = any(numbers)
        names = [*(f"gradient_norm_layer_{i}" for i in range(layers)), "gradient_norm_embedding", "gradient_norm_head"]
        return {
            **{name: square**0.5 if seen else None for name, square in zip(names, total, strict=False)},
            **{
                f"activation_rms_layer_{i}": (square / number) ** 0.5 if number else None
                for i, (square, number) in enumerate(zip(squares, numbers, strict=True))
            },
        }
