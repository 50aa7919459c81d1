"""Runs a schedule: this rank's list of actions, over its model chunks, with the messages that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gpt3d.model.documents import Documents
from gpt3d.parallel.layout import Layout
from gpt3d.parallel.split_backward import WeightGradients
from gpt3d.pipeline.check import check
from gpt3d.pipeline.delivery import Arrived, arrivals
from gpt3d.pipeline.recorder import Recorder
from gpt3d.pipeline.schedule import Action, Kind, all_ranks, receives_from, sends_to
from gpt3d.pipeline.transport import Channel, Receipt, Transport
from gpt3d.zero.engine import Engine


@dataclass(frozen=True)
class Microbatch:
    """Rows of one forward: tokens and labels [b, s] on the device (labels < 0 are ignored), and a seed for dropout.

    Both come from one record, on every stage, so that outputs cannot meet the labels of other rows.
    """

    tokens: Tensor
    labels: Tensor
    seed: int
    documents: Documents | None = None  # attention stays within them


class InFlight(NamedTuple):
    """What is kept of a forward until its backward: the stage's input and the output's place in the autograd graph.

    The output's own storage is free once it is sent.
    """

    x: Tensor
    edge: Any


class Plan(NamedTuple):
    """What this rank does in a step, and at each action how many of its messages have arrived."""

    actions: list[Action]
    arrived: list[Arrived]


class Watch(Protocol):
    """Told of each action of this rank."""

    def begin(self, action: Action) -> None:
        """It starts now; its message is there."""

    def end(self) -> None:
        """It is over."""


class Executor:
    """One rank's part of the pipeline. It holds the microbatches in flight and nothing of the others."""

    def __init__(self, layout: Layout, engine: Engine, transport: Transport, kind: str, chunks: int) -> None:
        self.layout, self.engine, self.transport = layout, engine, transport
        self.kind, self.chunks = kind, chunks
        self.stages, self.rank = layout.sizes.pp, layout.at.pp
        self.recorder: Recorder | None = None
        self.watches: list[Watch] = []  # debugging aids
        self.in_flight: dict[tuple[int, int], InFlight] = {}  # by (chunk, microbatch)
        self.postponed: dict[tuple[int, int], WeightGradients] = {}  # the same, after the input gradient
        self._plans: dict[int, Plan] = {}

    def plan(self, microbatches: int) -> Plan:
        """This rank's schedule, after a proof that it fits those of the other ranks (ScheduleError)."""
        if microbatches not in self._plans:
            schedules = all_ranks(self.kind, self.stages, self.chunks, microbatches)
            check(schedules, self.stages, self.chunks, microbatches)
            self._plans[microbatches] = Plan(schedules[self.rank], arrivals(schedules, self.chunks)[self.rank])
        return self._plans[microbatches]

    def train(self, microbatches: Sequence[Microbatch], loss_factor: float) -> Tensor:
        """Forward and backward of one step. Returns the summed loss in nats (fp32 scalar; 0 off the last stage).

        Gradients are those of `loss_factor` times the summed loss.
        """
        seed_grad = torch.tensor(loss_factor * self.engine.loss_scale, dtype=torch.float32, device=self.layout.device)
        return self._run(self.plan(len(microbatches)), microbatches, seed_grad)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Summed loss in nats of any number of microbatches, forward only (fp32 scalar; 0 off the last stage)."""
        loss, window = torch.zeros((), dtype=torch.float32, device=self.layout.device), 2 * self.stages
        for first in range(0, len(microbatches), window):  # so that no stage runs away from a slower one
            part = microbatches[first : first + window]
            forwards = [Action(Kind.FORWARD, i, chunk) for chunk in range(self.chunks) for i in range(len(part))]
            loss += self._run(Plan(forwards, [Arrived(0, 0)] * len(forwards)), part, None)
        return loss

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor | None:
        """Logits [s, b, V/t] for tokens [b, s] on the last stage, None on the others."""
        out = tokens
        for chunk in range(self.chunks):
            action = Action(Kind.FORWARD, 0, chunk)
            receipt = self._post_receive([action], 0)
            out = self.engine.forward(chunk, tokens if receipt is None else receipt.wait(), 0)
            self._send(action, self.transport.send_activation, out)
        self.transport.flush()
        return out if self.rank == self.stages - 1 else None

    def _run(self, plan: Plan, microbatches: Sequence[Microbatch], seed_grad: Tensor | None) -> Tensor:
        actions = plan.actions
        loss = torch.zeros((), dtype=torch.float32, device=self.layout.device)
        whole = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)  # actions that bring gradients to the parameters
        last = max((i for i, action in enumerate(actions) if action.kind in whole), default=-1)
        arriving = self._post_receive(actions, 0)
        for i, action in enumerate(actions):
            # The next receive is posted before this action computes, so that the message travels meanwhile.
            receipt, arriving = arriving, self._post_receive(actions, i + 1)
            message = receipt.wait() if receipt is not None else None
            del receipt  # it would hold the message until the next action
            self.transport.release(plan.arrived[i])
            for watch in self._watching():
                watch.begin(action)
            if action.kind is Kind.FORWARD:
                self._forward(action, microbatches[action.microbatch], message, seed_grad is not None, loss)
            else:
                self._backward(action, seed_grad if message is None else message, last=i == last)
            for watch in self._watching():
                watch.end()
            del message
        self.transport.flush()
        return loss

    def _watching(self) -> list[Watch]:
        return self.watches if self.recorder is None else [*self.watches, self.recorder]

    def _forward(
        self, action: Action, microbatch: Microbatch, message: Tensor | None, training: bool, loss: Tensor
    ) -> None:
        """Run one chunk; send its output on, or add it to `loss` on the last stage."""
        x = message.requires_grad_(training) if message is not None else microbatch.tokens
        is_last = self.rank == self.stages - 1 and action.chunk == self.chunks - 1
        labels = microbatch.labels if is_last else None
        out = self.engine.forward(action.chunk, x, microbatch.seed, labels, microbatch.documents)
        if training:
            self.in_flight[action.chunk, action.microbatch] = InFlight(x, get_gradient_edge(out))
        if is_last:
            loss += out.detach()
        else:
            self._send(action, self.transport.send_activation, out.detach())

    def _backward(self, action: Action, grad: Tensor | None, last: bool) -> None:
        """Run one backward or half of one; send the input gradient on."""
        key = (action.chunk, action.microbatch)
        if action.kind is Kind.BACKWARD_WEIGHT:
            self.engine.backward_weight(self.postponed.pop(key), last)
            return
        x, edge = self.in_flight.pop(key)
        assert grad is not None
        if action.kind is Kind.BACKWARD_INPUT:
            dx, self.postponed[key] = self.engine.backward_input(edge, grad, x)
        else:
            self.engine.backward(edge, grad, last)
            dx = x.grad  # type: ignore[assignment]
        self._send(action, self.transport.send_gradient, dx)

    def _send(self, action: Action, channel: Channel | None, message: Tensor) -> None:
        if sends_to(action, self.rank, self.stages, self.chunks) is not None:
            assert channel is not None
            channel.send(message)

    def _post_receive(self, actions: Sequence[Action], i: int) -> Receipt | None:
        """Start receiving what action `i` needs from a neighbour, if anything."""
        if i >= len(actions) or receives_from(actions[i], self.rank, self.stages, self.chunks) is None:
            return None
        forward = actions[i].kind is Kind.FORWARD
        channel = self.transport.receive_activation if forward else self.transport.receive_gradient
        assert channel is not None
        return channel.receive(self.transport.shape, self.transport.dtype)
