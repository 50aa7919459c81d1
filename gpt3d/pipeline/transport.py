"""Sending activations up and gradients down the pipeline.

Each ordered pair of neighbours has one communicator for activations and one for gradients. A channel so carries
messages in one direction only, in the order in which `pipeline.check` proved that both ends use it; no send ever queues
behind a receive, so neighbours cannot wait for each other in a cycle, on NCCL's ordered streams either.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpt3d.parallel.layout import Layout, new_group
from gpt3d.pipeline.delivery import Arrived


@dataclass
class Channel:
    """One direction between this rank and `peer`."""

    peer: int
    handle: Any
    device: torch.device
    pending: deque[tuple[Any, Tensor]] = field(default_factory=deque)
    finished: int = 0  # sends that are over, since the last flush
    sent: int = 0  # bytes, since the start

    def send(self, message: Tensor) -> None:
        """Start sending; the message is kept until it has left, as far as that is known."""
        while self.pending and self.pending[0][0].is_completed():
            self._finish_first()
        message = message.contiguous()
        self.sent += message.numel() * message.element_size()
        self.pending.append((dist.isend(message, self.peer, group=self.handle), message))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Receipt:
        """Start receiving the next message."""
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        return Receipt(dist.irecv(buffer, self.peer, group=self.handle), buffer)

    def release(self, count: int) -> None:
        """Let go of the first `count` messages since the last flush, which the receiver is known to have."""
        while self.finished < count and self.pending:
            self._finish_first()

    def flush(self) -> None:
        """Wait until everything sent has left."""
        while self.pending:
            self._finish_first()
        self.finished = 0

    def _finish_first(self) -> None:
        self.pending.popleft()[0].wait()
        self.finished += 1


@dataclass
class Receipt:
    """A message on its way."""

    work: Any
    buffer: Tensor

    def wait(self) -> Tensor:
        """The message, once it is there (on CUDA: once the current stream may use it)."""
        self.work.wait()
        return self.buffer


@dataclass
class Loopback(Channel):
    """A rank's channel to itself: a pipeline of one rank with several chunks."""

    waiting: deque[Tensor] = field(default_factory=deque)

    def send(self, message: Tensor) -> None:
        self.waiting.append(message)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Receipt:
        return _LoopbackReceipt(self.waiting)


class _LoopbackReceipt(Receipt):
    def __init__(self, waiting: deque[Tensor]) -> None:
        self.waiting = waiting

    def wait(self) -> Tensor:
        return self.waiting.popleft()


@dataclass
class Transport:
    """The channels of this rank. Shapes are agreed once, for all messages of a run."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    send_activation: Channel | None = None
    receive_activation: Channel | None = None
    send_gradient: Channel | None = None
    receive_gradient: Channel | None = None
    links: list[tuple[Channel, Channel]] = field(default_factory=list)  # up and down; in an order without cycles

    def meet(self) -> None:
        """Use each channel once. All ranks call it before the first step.

        NCCL connects two ranks at their first message and holds up the host until both are there: a receive that is
        posted ahead would wait so for what its own rank has yet to send.
        """
        for up, down in self.links:
            token = torch.zeros(1, device=up.device)
            if up is self.send_activation:
                dist.send(token, up.peer, group=up.handle)
                dist.recv(token, down.peer, group=down.handle)
            else:
                dist.recv(token, up.peer, group=up.handle)
                dist.send(token, down.peer, group=down.handle)

    def release(self, arrived: Arrived) -> None:
        """Let go of what has arrived since the last flush."""
        for channel, count in ((self.send_activation, arrived.activations), (self.send_gradient, arrived.gradients)):
            if channel is not None:
                channel.release(count)

    @property
    def sent(self) -> int:
        """Bytes sent to other ranks since the start."""
        channels = (self.send_activation, self.send_gradient)
        return sum(channel.sent for channel in channels if channel is not None)

    def flush(self) -> None:
        """Wait until everything sent has left."""
        for channel in (self.send_activation, self.send_gradient):
            if channel is not None:
                channel.flush()


def connect(layout: Layout, shape: tuple[int, ...], dtype: torch.dtype, *, ring: bool) -> Transport:
    """Open the channels to the neighbouring stages; `ring`: also from the last to the first (interleaved chunks)."""
    transport = Transport(shape, dtype)
    ranks, here = layout.pp.ranks, layout.pp.rank
    count = len(ranks)
    if count == 1:
        if ring:
            to_self, back = (Loopback(layout.rank, None, layout.device) for _ in range(2))
            transport.send_activation = transport.receive_activation = to_self
            transport.send_gradient = transport.receive_gradient = back
        return transport
    edges = range(count if ring else count - 1)
    # Links without a common rank are made together: the even ones, the odd ones, the one that closes an odd ring.
    kinds = [2 if lower % 2 == 0 and lower == count - 1 else lower % 2 for lower in edges]
    for kind in range(max(kinds) + 1):
        mine = [lower for lower in edges if kinds[lower] == kind and here in (lower, (lower + 1) % count)]
        lower = mine[0] if mine else here
        upper = (lower + 1) % count if mine else here
        pair = tuple(sorted({ranks[lower], ranks[upper]}))
        up, down = new_group(pair), new_group(pair)
        if not mine:
            continue
        peer = ranks[upper if here == lower else lower]
        if here == lower:
            transport.send_activation = Channel(peer, up, layout.device)
            transport.receive_gradient = Channel(peer, down, layout.device)
            transport.links.append((transport.send_activation, transport.receive_gradient))
        if here == upper:
            transport.receive_activation = Channel(peer, up, layout.device)
            transport.send_gradient = Channel(peer, down, layout.device)
            transport.links.append((transport.receive_activation, transport.send_gradient))
    return transport
