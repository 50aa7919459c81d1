"""Counts what a step does, as it does it: FLOPs, bytes of collectives, and bytes of live storages by kind.

It sees every operation below autograd, so it counts the same on tensors without numbers (a dry run) and on real ones.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from gpt3d.planner.traffic import Call

c10d, aten = torch.ops.c10d, torch.ops.aten

# Collectives that our code uses -> name, place of the process group, place of the tensor whose size counts: the whole
# buffer, of which each of n ranks holds or brings 1/n in an all-gather or a reduce-scatter.
COLLECTIVES: dict[Any, tuple[str, int, int]] = {
    c10d.allreduce_.default: ("all-reduce", 1, 0),
    c10d._allgather_base_.default: ("all-gather", 2, 0),
    c10d._reduce_scatter_base_.default: ("reduce-scatter", 2, 1),
    c10d.send.default: ("send", 1, 0),
    c10d.recv_.default: ("receive", 1, 0),
}


class Product(NamedTuple):
    """Which matrix products: the module whose weight it is (or the attention core), and the pass."""

    module: str
    step: str  # forward, recompute, backward


class Tracker(TorchDispatchMode):
    """While active, counts; memory only of `device` ("meta" in a dry run).

    `phase` is "forward", "backward" or anything else, and names what operations belong to.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.flops: Counter[Product] = Counter()
        self.calls: Counter[Call] = Counter()
        self.bytes: Counter[Call] = Counter()
        self.live: Counter[str] = Counter()  # bytes by kind
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.peak_phase = self.phase = ""
        self.groups: dict[str, str] = {}  # process-group name -> axis
        self.logits: tuple[int, int] = (0, 0)  # number of elements and last dim by which logits are known
        self._storages: dict[int, tuple[Any, int, str]] = {}  # storage -> weak reference, bytes, kind
        self._weights: dict[int, str] = {}  # storage of a weight -> module
        self._alike: defaultdict[tuple[int, ...], deque[str]] = defaultdict(deque)  # shape of a weight -> modules
        self._last = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for x in tree_iter(out):
            if isinstance(x, Tensor):
                self._track(x)
        if func in COLLECTIVES:
            self._collective(func, args)
        elif func._overloadpacket in flop_registry:
            self._product(func, args, kwargs, out)
        elif func is aten.cat.default:
            self._joined(args[0], out)
        return out

    # Memory

    def _track(self, x: Tensor) -> None:
        if x.device.type != self.device:
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()
        kind = "logits" if (x.numel(), x.shape[-1] if x.dim() else 0) == self.logits else "work"
        self._storages[key] = weakref.ref(storage, lambda _: self._freed(key)), size, kind
        self.live[kind] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak, self.peak_phase = self.total, dict(self.live), self.phase

    def _freed(self, key: int) -> None:
        _, size, kind = self._storages.pop(key)
        self._weights.pop(key, None)  # another storage may come to lie there
        self.live[kind] -= size
        self.total -= size

    def tag(self, x: Tensor, kind: str, only: Iterable[str] = ()) -> None:
        """From now on the storage of `x` counts as `kind`; `only`: if it now is one of these."""
        key = x.untyped_storage()._cdata
        if key not in self._storages:
            self._track(x)
        if key not in self._storages:
            return
        reference, size, before = self._storages[key]
        if before == kind or (only and before not in only):
            return
        self._storages[key] = reference, size, kind
        self.live[before] -= size
        self.live[kind] += size

    def saved(self, x: Tensor) -> Tensor:
        """A hook for tensors that autograd saves."""
        self.tag(x, "activations", only=("work", "messages"))
        return x

    def rename(self, before: str, after: str) -> None:
        """All storages of kind `before` are of kind `after`."""
        for key, (reference, size, kind) in self._storages.items():
            if kind == before:
                self._storages[key] = reference, size, after
        self.live[after] += self.live.pop(before, 0)

    def forget_counts(self) -> None:
        """Begin to count FLOPs and collectives anew; memory goes on."""
        self.flops, self.calls, self.bytes = Counter(), Counter(), Counter()

    def start_peak(self) -> None:
        """Look for the peak from here on."""
        self.peak, self.at_peak, self.peak_phase = self.total, dict(self.live), self.phase

    # Collectives

    def _collective(self, func: Any, args: tuple[Any, ...]) -> None:
        kind, group_at, tensor_at = COLLECTIVES[func]
        group = dist.ProcessGroup.unbox(args[group_at]).group_name
        call = Call(self.groups.get(group, "other"), kind)
        tensors = [x for x in tree_iter(args[tensor_at]) if isinstance(x, Tensor)]
        self.calls[call] += 1
        self.bytes[call] += sum(x.numel() * x.element_size() for x in tensors)
        if kind in ("send", "receive"):
            for x in tensors:
                self.tag(x, "messages", only=("work",))

    # FLOPs

    def know(self, weight: Tensor, module: str) -> None:
        """Products with this weight, and those with a result of its shape, belong to `module`."""
        self._weights[weight.untyped_storage()._cdata] = module
        alike = self._alike[tuple(weight.shape)]
        if module not in alike:
            alike.append(module)

    def _joined(self, parts: Iterable[Tensor], out: Tensor) -> None:
        """A weight made of several parameters (queries beside copied keys and values) belongs to the first's module."""
        modules = [self._weights.get(part.untyped_storage()._cdata) for part in parts]
        if modules and modules[0] is not None and None not in modules:
            self.know(out, modules[0])

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        forward = "forward" if self.phase != "backward" else "recompute"
        if "attention" in str(func):
            self.flops[Product("attention core", "backward" if "backward" in str(func) else forward)] += flops
            return
        for x in args:
            module = self._weights.get(x.untyped_storage()._cdata) if isinstance(x, Tensor) else None
            if module is not None:  # y = x W^T has W transposed, dx = dy W has not
                self._last = module
                self.flops[Product(module, forward if x.stride(-1) != 1 else "backward")] += flops
                return
        self.flops[Product(self._gradient_of(tuple(out.shape)), "backward")] += flops

    def _gradient_of(self, shape: tuple[int, ...]) -> str:
        """The module whose weight gradient has this shape: the one at work, else each that could be in turn."""
        alike = self._alike.get(shape, deque(["other"]))
        if self._last in alike:
            return self._last
        alike.rotate(-1)
        return alike[-1]


def module_name(canonical: str) -> str:
    """layers.7.mlp.down.weight -> mlp.down: the same for every layer. A tied head multiplies with the embedding."""
    return "head" if canonical == "embedding.word.weight" else re.sub(r"^layers\.\d+\.|\.weight$", "", canonical)


def by_module(flops: Mapping[Product, int]) -> dict[str, dict[str, int]]:
    """The same as module -> pass -> FLOPs."""
    table: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for product, count in flops.items():
        table[product.module][product.step] = count
    return dict(table)
