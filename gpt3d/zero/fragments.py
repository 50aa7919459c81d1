"""Who owns which numbers: the optimizer's state on this rank as flat fragments of parameters, to read and to write.

The tensors are views into the engine's own memory, so saving copies nothing and loading writes in place; after writing,
`adopt` carries the new weights to where forward reads them. Use of what DeepSpeed does not document is marked
`private:` and guarded by the resume tests of every stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gpt3d.parallel.placement import Placement, placement_of
from gpt3d.zero.engine import Engine

KINDS = ("weights", "exp_avg", "exp_avg_sq")  # fp32 master weights and Adam's first and second moments


@dataclass(frozen=True)
class Fragment:
    """Elements start..start+n of one local parameter, row by row: for each of KINDS an fp32 tensor [n].

    `copy` of `copies`: which of the data-parallel ranks that hold this very fragment this one is.
    """

    placement: Placement
    start: int
    tensors: dict[str, Tensor]
    copy: int = 0
    copies: int = 1


class OptimizerState(Protocol):
    """The state of an engine between two steps. All ranks call the same methods in the same order."""

    def fragments(self) -> Iterator[Fragment]:
        """What this rank holds; Adam's moments are made if no step has been taken yet."""

    @property
    def steps(self) -> int:
        """Updates that Adam has made, skipped steps not counted: its bias correction depends on it."""

    def adopt(self, steps: int) -> None:
        """After the fragments were written: set Adam's step count and give forward the new weights. Collective."""

    @property
    def scaler(self) -> Any:
        """The loss scaler: anything with a scale and a count of good steps, see `read_scaler`."""


def optimizer_state(engine: Engine) -> OptimizerState:
    """The view that fits the engine."""
    from gpt3d.zero.replicated import ReplicatedEngine

    if isinstance(engine, ReplicatedEngine):
        return ReplicatedState(engine)
    stage: int = engine.stage  # type: ignore[attr-defined]
    return ShardedState(engine) if stage == 3 else PartitionedState(engine)


class ReplicatedState:
    """Stage 0: every data-parallel rank holds all of it."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.scaler = engine, engine.scaler

    def fragments(self) -> Iterator[Fragment]:
        dp = self.engine.layout.dp
        for p, master in self.engine.masters.items():
            state = _adam_state(self.engine.optimizer, master)
            tensors = {"weights": master.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            yield Fragment(placement_of(p), 0, {k: t.view(-1) for k, t in tensors.items()}, dp.rank, dp.size)

    @property
    def steps(self) -> int:
        return _adam_steps(self.engine.optimizer)

    def adopt(self, steps: int) -> None:
        _set_adam_steps(self.engine.optimizer, self.engine.masters.values(), steps)
        for p, master in self.engine.masters.items():
            if master is not p:
                p.data.copy_(master.data)


class PartitionedState:
    """Stages 1 and 2: the parameters of a group are one flat buffer, cut evenly over the data-parallel ranks."""

    def __init__(self, engine: Any) -> None:
        self.module, self.optimizer = engine.module, engine.optimizer
        self.scaler = getattr(engine.optimizer, "loss_scaler", None)

    def fragments(self) -> Iterator[Fragment]:
        flats = self._flats()
        for p in self.module.parameters():
            mapping: Any = p._hp_mapping  # private: None where this rank's part of the buffer holds nothing of p
            if mapping is None:
                continue
            flat, address = flats[mapping.param_group_index], mapping.hp_fragment_address
            # not mapping.get_hp_fragment("exp_avg"): DeepSpeed links the moments of the first group only
            state = _adam_state(self.optimizer.optimizer, flat)
            tensors = {"weights": flat.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            held = {k: t.narrow(0, address.start, address.numel) for k, t in tensors.items()}
            yield Fragment(placement_of(p), mapping.lp_fragment_address.start, held)

    def _flats(self) -> list[Tensor]:
        """private: this rank's fp32 part of each group's buffer; the name depends on the optimizer class."""
        names = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        return next(getattr(self.optimizer, name) for name in names if hasattr(self.optimizer, name))

    @property
    def steps(self) -> int:
        return _adam_steps(self.optimizer.optimizer)

    def adopt(self, steps: int) -> None:
        _set_adam_steps(self.optimizer.optimizer, self._flats(), steps)
        self.optimizer.update_lp_params()  # private


class ShardedState:
    """Stage 3: every parameter is cut evenly over the data-parallel ranks, the last shard ending in padding."""

    def __init__(self, engine: Any) -> None:
        self.module, self.optimizer, self.dp = engine.module, engine.optimizer, engine.layout.dp
        self.scaler = engine.optimizer.loss_scaler

    def fragments(self) -> Iterator[Fragment]:
        optimizer = self.optimizer
        parameter: Any
        for parameter in self.module.parameters():
            # private: which group's flat buffer holds this rank's shard of p, and where
            group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            shard = parameter.partition_numel()
            held = min(shard, parameter.ds_numel - self.dp.rank * shard)
            if held <= 0:
                continue
            flat = optimizer.fp32_partitioned_groups_flat[group]
            state = _adam_state(optimizer.optimizer, flat)
            tensors = {"weights": flat.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            views = {k: t.narrow(0, offset, held) for k, t in tensors.items()}
            yield Fragment(placement_of(parameter), self.dp.rank * shard, views)

    @property
    def steps(self) -> int:
        return _adam_steps(self.optimizer.optimizer)

    def adopt(self, steps: int) -> None:
        optimizer = self.optimizer
        _set_adam_steps(optimizer.optimizer, optimizer.fp32_partitioned_groups_flat, steps)
        # private, as at the end of its own step: shards to low precision, then the parameters that stay gathered
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def _adam_state(optimizer: torch.optim.Optimizer, master: Tensor) -> dict[str, Any]:
    """Adam makes its state at the first step; this is that state before any. DeepSpeed's counts steps in an int."""
    state: dict[str, Any] = optimizer.state[master]
    if "exp_avg" not in state:
        fused = optimizer.param_groups[0].get("fused")  # absent: DeepSpeed's
        device = master.device if fused else "cpu"
        state["step"] = 0 if fused is None else torch.zeros((), dtype=torch.float32, device=device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master.data), torch.zeros_like(master.data)
    return state


def _adam_steps(optimizer: torch.optim.Optimizer) -> int:
    counts = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    if len(counts) > 1:
        raise RuntimeError(f"the parameters of this rank have had different numbers of updates: {sorted(counts)}")
    return counts.pop() if counts else 0


def _set_adam_steps(optimizer: torch.optim.Optimizer, masters: Any, steps: int) -> None:
    for master in masters:
        state = _adam_state(optimizer, master)
        state["step"] = steps if isinstance(state["step"], int) else state["step"].fill_(steps)


def read_scaler(scaler: Any) -> dict[str, float]:
    """Scale and good steps since the last overflow, of our own scaler or DeepSpeed's; empty without dynamic scaling."""
    if not getattr(scaler, "dynamic", False):
        return {}
    if hasattr(scaler, "good_steps"):
        return {"scale": scaler.scale, "good_steps": scaler.good_steps}
    return {"scale": scaler.cur_scale, "good_steps": scaler.cur_iter - scaler.last_overflow_iter - 1}


def write_scaler(scaler: Any, state: dict[str, float]) -> None:
    """The inverse of `read_scaler`; without dynamic scaling on either side nothing happens."""
    if not state or not getattr(scaler, "dynamic", False):
        return
    if hasattr(scaler, "good_steps"):
        scaler.scale, scaler.good_steps = state["scale"], int(state["good_steps"])
    else:
        scaler.cur_scale = state["scale"]
        scaler.cur_iter = scaler.last_overflow_iter + 1 + int(state["good_steps"])
