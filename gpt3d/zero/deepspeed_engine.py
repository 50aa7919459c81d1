"""ZeRO stages 1 to 3, with offload: DeepSpeed's optimizers under our own schedule.

DeepSpeed expects to own the order of forward and backward. All that is needed to let our schedules own it is in this
file: every use of something that DeepSpeed does not document is marked `private:` and guarded by a parity test. The
version is pinned exactly for that reason.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_local_grad,
    safe_set_full_grad,
    safe_set_local_grad,
)
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gpt3d.config.schema import RunConfig
from gpt3d.model.documents import Documents
from gpt3d.model.gpt import Part
from gpt3d.parallel.layout import Layout
from gpt3d.parallel.placement import Placement, placement_of
from gpt3d.parallel.split_backward import WeightGradients, backward_input
from gpt3d.zero.ds_config import derive_ds_config
from gpt3d.zero.engine import DTYPES, OnGradients, StepResult, parameter_groups, tied_parameters
from gpt3d.zero.sent import count_sent


class DeepSpeedEngine:
    """See `Engine` for the contract."""

    def __init__(self, config: RunConfig, layout: Layout, module: nn.Module) -> None:
        self.layout, self.stage = layout, config.zero.stage
        self.tied = tied_parameters(module, config, layout)
        self.module = module
        self.on_gradients: OnGradients | None = None
        mark_counted(module)
        self.engine: Any = deepspeed.initialize(
            model=module,
            optimizer=_new_optimizer(config, layout, module),
            config=derive_ds_config(config),
            mpu=_ModelParallelUnit(layout),
            dist_init_required=False,
        )[0]
        count_sent(layout.dp)
        self.optimizer: Any = self.engine.optimizer
        if config.precision.dtype == "fp16":
            # private: at the lowest scale it would raise; how many skipped steps are too many is the trainer's decision
            self.optimizer.loss_scaler.raise_error_at_min_scale = False
        self.modules = [m for m in module.modules() if hasattr(m, "ds_grads_remaining")]  # none before stage 3
        if self.stage == 3 and layout.sizes.pp > 1:
            # private: the hook compares the order of forwards over the whole world, but stages run different ones, and
            # it broadcasts while neighbours wait in receive. Without it parameters are gathered on demand, not ahead.
            self.optimizer.parameter_offload.fwd_pre_hook.remove()

    @property
    def loss_scale(self) -> float:
        return float(self.optimizer.cur_scale) if hasattr(self.optimizer, "cur_scale") else 1.0

    def forward(
        self, chunk: int, x: Tensor, seed: int, labels: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor:
        # Not through the engine: it would begin the reduction at any backward from the output, a split one too.
        return self.module(chunk, x, seed, labels, documents)

    def backward(self, output: Tensor | GradientEdge, grad: Tensor, last: bool) -> None:
        self._expect_module_backward()
        with self._accumulation(last):
            torch.autograd.backward(output, grad)

    def backward_input(self, output: GradientEdge, grad: Tensor, x: Tensor) -> tuple[Tensor, WeightGradients]:
        self._expect_module_backward()
        return backward_input(output, grad, x, list(self.module.parameters()))

    def backward_weight(self, gradients: WeightGradients, last: bool) -> None:
        released = [p for p in self.module.parameters() if self.stage == 3 and not p.numel()]
        # Autograd compares a gradient with the parameter's shape, so released parameters must be there.
        with self._accumulation(last), deepspeed.zero.GatheredParameters(released, enabled=bool(released)):
            gradients.deliver()

    def _expect_module_backward(self) -> None:
        for m in self.modules:
            # private: F F B B would leave it negative and keep parameters gathered
            m.ds_grads_remaining = 1  # type: ignore[assignment]

    @contextlib.contextmanager
    def _accumulation(self, last: bool) -> Iterator[None]:
        """Around a backward pass that brings gradients to the parameters: what DeepSpeed does before and after it."""
        self.engine.set_gradient_accumulation_boundary(last)
        if hasattr(self.optimizer, "clear_backward_seen_flag"):
            # private: only engine.forward resets this, but in a pipeline two backwards can follow each other
            self.optimizer.clear_backward_seen_flag()
        self.engine._manual_backward_expected = True  # private: the caller has applied loss_scale itself
        self.engine._backward_prologue()  # private
        yield
        if self.optimizer._backward_active_depth:  # private: the optimizer's own hooks have not run the epilogue
            self.engine._backward_post_hook()

    def step(self, lr: float) -> StepResult:
        self._sum_tied_gradients()
        if self.on_gradients is not None:
            whole = ((placement_of(p), safe_get_full_grad(p)) for p in self.module.parameters())
            self.on_gradients(whole, self.loss_scale)
        self.engine.set_gradient_accumulation_boundary(True)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        if self.stage == 3:
            # private: only the first backward of a step overwrites this buffer, and only where it passed
            self.optimizer.grad_partitions_flat_buffer.zero_()
        if self.optimizer.overflow:
            self._forget_gradients()
            return StepResult(math.inf, True)
        return StepResult(float(self.engine.get_global_grad_norm()), False)

    def _forget_gradients(self) -> None:
        """After a skipped step: with an offloaded optimizer stages 1 and 2 would add the next gradients to the bad."""
        kept = getattr(self.optimizer, "averaged_gradients", None)  # private
        if self.stage < 3 and kept is not None:
            kept.update(dict.fromkeys(kept))

    def _sum_tied_gradients(self) -> None:
        """Add the gradients of the two copies of the tied embedding, wherever this optimizer keeps them."""
        group = self.layout.ends.handle
        for p in self.tied:
            if isinstance(self.optimizer, BF16_Optimizer):
                self.layout.ends.count(p._hp_grad, passes=2)  # type: ignore[attr-defined]
                dist.all_reduce(p._hp_grad, group=group)  # type: ignore[attr-defined]  # private
            elif self.stage == 3:
                grad = safe_get_local_grad(p).clone()
                self.layout.ends.count(grad, passes=2)
                dist.all_reduce(grad, group=group)
                safe_set_local_grad(p, grad)
            else:
                grad = safe_get_full_grad(p).clone()
                self.layout.ends.count(grad, passes=2)
                dist.all_reduce(grad, group=group)
                safe_set_full_grad(p, grad)
                self._renew_cached_norm(p)

    def _renew_cached_norm(self, p: nn.Parameter) -> None:
        """private: with the optimizer offloaded, stages 1 and 2 keep each gradient's norm from when it was reduced."""
        optimizer = self.optimizer
        key = optimizer.get_param_id(p)
        if key in getattr(optimizer, "norm_for_param_grads", ()):
            group, _, start, length = optimizer.grad_position[key]
            part = optimizer.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, start, length)
            optimizer.norm_for_param_grads[key] = part.norm(2)
            optimizer.update_offload_overflow_tracker(part)

    def held_weights(self) -> Iterator[tuple[Placement, Tensor]]:
        for p in self.module.parameters():
            if self.stage < 3:
                yield placement_of(p), p.detach()
            else:  # private; the last shard ends in padding that nobody initialises
                shard: Tensor = p.ds_tensor  # type: ignore[attr-defined]
                total: int = p.ds_numel  # type: ignore[attr-defined]
                held = min(shard.numel(), max(0, total - self.layout.dp.rank * shard.numel()))
                yield placement_of(p), shard.detach().flatten()[:held]

    def master_weights(self) -> Iterator[tuple[Placement, Tensor]]:
        for p in self.module.parameters():
            yield placement_of(p), safe_get_full_fp32_param(p).detach().view(placement_of(p).local_shape)


def _new_optimizer(config: RunConfig, layout: Layout, module: nn.Module) -> torch.optim.Optimizer:
    """AdamW: torch's, or DeepSpeed's vectorised one for states in host memory."""
    o, groups = config.optimizer, parameter_groups(module, config.optimizer.weight_decay)
    betas = (o.beta1, o.beta2)
    if o.name == "cpu_adamw":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=o.lr, betas=betas, eps=o.eps, adamw_mode=True)
    fused = layout.device.type == "cuda" and config.zero.offload_optimizer == "none"
    return torch.optim.AdamW(groups, lr=o.lr, betas=betas, eps=o.eps, fused=fused)


def shard(config: RunConfig, layout: Layout, part: Part) -> Part:
    """Cut the parameters of `part` over DP in place (ZeRO-3), so that at most one part of a model is ever whole."""
    offloaded = config.zero.offload_param == "cpu"
    deepspeed.zero.Init(
        module=part,
        data_parallel_group=layout.dp.handle,
        mem_efficient_linear=False,
        remote_device="cpu" if offloaded else None,
        pin_memory=config.zero.pin_memory and offloaded,
        dtype=DTYPES[config.precision.dtype],
    )
    return part


def mark_counted(module: nn.Module) -> None:
    """Tell every DeepSpeed optimizer which copy counts in the gradient norm; each of them looks at another flag."""
    for p in module.parameters():
        counted = placement_of(p).counted
        p.model_parallel = counted  # type: ignore[attr-defined]
        p.ds_pipe_replicated = not counted  # type: ignore[attr-defined]


class _ModelParallelUnit:
    """The group questions that DeepSpeed asks (Megatron's `mpu`), answered by the layout."""

    def __init__(self, layout: Layout) -> None:
        axes = {
            "data_parallel": layout.dp,
            "model_parallel": layout.model,
            "tensor_model_parallel": layout.tp,
            "pipeline_model_parallel": layout.pp,
        }
        self.get_data_parallel_group_ranks = lambda: list(layout.dp.ranks)
        for name, group in axes.items():
            handle = (
                group.handle
                if group.handle is not None
                else dist.new_group([layout.rank], use_local_synchronization=True)
            )
            setattr(self, f"get_{name}_group", lambda handle=handle: handle)
            setattr(self, f"get_{name}_rank", lambda group=group: group.rank)
            setattr(self, f"get_{name}_world_size", lambda group=group: group.size)
