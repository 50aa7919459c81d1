"""Memory that DeepSpeed takes while gradients come, under ZeRO 1 to 3, and gives back: on tensors without numbers.

As its stage_1_and_2.py and stage3.py do: gradients wait in a bucket; a full one is reduced from copies; the rank's part
of the gradients goes into a buffer, which after the first backward is beside the sum. BF16_Optimizer takes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpt3d.config.schema import RunConfig
from gpt3d.parallel.layout import Layout
from gpt3d.planner.partition import has_bf16_optimizer, has_own_type
from gpt3d.zero.engine import DTYPES, parameter_groups


class Collecting:
    """Told of each gradient and of the end of each backward; holds what DeepSpeed would."""

    def __init__(self, config: RunConfig, layout: Layout, module: nn.Module) -> None:
        self.stage, self.size, self.own_type = config.zero.stage, config.zero.reduce_bucket_size, has_own_type(config)
        self.grad_dtype = DTYPES[config.precision.grad_dtype]
        self.buckets = 0 if self.stage == 3 else 2 if config.zero.overlap_comm else 1  # stage 3 has one all the time
        contiguous = config.zero.contiguous_gradients and config.zero.offload_optimizer == "none"
        self.own = _own(module, layout) if self.own_type and contiguous else set()
        self.idle = has_bf16_optimizer(config)
        self.summed = False  # whether the first backward is over
        self.waiting: list[tuple[nn.Parameter, Tensor | None]] = []
        self.held: list[Tensor] = []
        self.part: Tensor | None = None
        self.beyond: Tensor | None = None
        self.parameters, self.copies = sum(p.numel() for p in module.parameters()), layout.dp.size

    def take(self, p: nn.Parameter, last: bool) -> None:
        """The gradient of `p` is there; `last`: in the last backward of a step."""
        grad, p.grad = p.grad, None
        if self.idle or grad is None:
            return
        if not self.held:
            self.held = [p.new_empty(self.size, dtype=self._bucket_dtype(p)) for _ in range(self.buckets)]
        if self.stage == 1 and not last:
            return
        if sum(other.numel() for other, _ in self.waiting) + p.numel() > self.size:
            self._reduce()
        self.waiting.append((p, grad if p.numel() > self.size else None))

    def end(self) -> None:
        """A backward is over."""
        self._reduce()
        if self.stage == 2 and self.own and not self.summed:
            # The sum holds whole parameters; what is not beyond the rank's share is counted as gradients.
            p, share = next(iter(self.own)), -(-self.parameters // self.copies)
            self.beyond = p.new_empty(max(0, sum(p.numel() for p in self.own) - share))
        self.held, self.part, self.summed = [], None, True

    def _bucket_dtype(self, p: nn.Parameter) -> torch.dtype:
        return p.dtype if self.stage == 2 else self.grad_dtype

    def _reduce(self) -> None:
        """The bucket's copies come and go; the first of the rank's own parameters makes it take the buffer."""
        if not self.waiting:
            return
        p, count, joined = self.waiting[0][0], sum(p.numel() for p, _ in self.waiting), None
        if len(self.waiting) > 1:
            joined = p.new_empty(count, dtype=self._bucket_dtype(p))
        if self.grad_dtype != p.dtype and (self.stage == 2 or joined is None):
            p.new_empty(count, dtype=self.grad_dtype)
        del joined
        beside = self.stage == 1 or self.summed  # else it is what becomes the sum
        if beside and self.part is None and any(p in self.own for p, _ in self.waiting):
            self.part = p.new_empty(sum(p.numel() for p in self.own))
        self.waiting = []


def _own(module: nn.Module, layout: Layout) -> set[nn.Parameter]:
    """Parameters with an element of this rank's part: each group is one flat buffer, cut evenly."""
    own: set[nn.Parameter] = set()
    for group in parameter_groups(module, 0.0):
        parameters: list[nn.Parameter] = group["params"]  # type: ignore[assignment]
        cut = -(-sum(p.numel() for p in parameters) // layout.dp.size)
        first, position = layout.dp.rank * cut, 0
        for p in parameters:
            if position < first + cut and position + p.numel() > first:
                own.add(p)
            position += p.numel()
    return own
