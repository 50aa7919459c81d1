"""Runs a schedule: this rank's list of actions, over its model chunks, with the messages that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gpt3d.parallel.layout import Layout
from gpt3d.pipeline.schedule import Action, Kind, receives_from, schedule, sends_to
from gpt3d.pipeline.transport import Receipt, Transport
from gpt3d.zero.engine import Engine


@dataclass(frozen=True)
class Microbatch:
    """Rows of one forward: tokens and labels [b, s] on the device (labels < 0 are ignored), and a seed for dropout.

    Without labels the last stage gives logits instead of a loss.
    """

    tokens: Tensor
    labels: Tensor | None
    seed: int


class Executor:
    """One rank's part of the pipeline.

    At most the microbatches in flight are held: of each only the stage's input and the edge of its output in the
    autograd graph, since the output's own storage is not needed once it is sent.
    """

    def __init__(self, layout: Layout, engine: Engine, transport: Transport, kind: str, chunks: int) -> None:
        self.layout, self.engine, self.transport = layout, engine, transport
        self.kind, self.chunks = kind, chunks
        self.stages, self.rank = layout.sizes.pp, layout.at.pp

    def train(self, microbatches: Sequence[Microbatch], loss_factor: float) -> Tensor:
        """Forward and backward of one step. Returns the summed loss in nats (fp32 scalar; 0 off the last stage).

        Gradients are those of `loss_factor` times the summed loss.
        """
        actions = schedule(self.kind, self.stages, self.chunks, len(microbatches), self.rank)
        seed_grad = torch.tensor(loss_factor * self.engine.loss_scale, dtype=torch.float32, device=self.layout.device)
        return self._run(actions, microbatches, seed_grad)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Summed loss in nats of any number of microbatches, forward only (fp32 scalar; 0 off the last stage)."""
        forwards = [a for a in schedule("gpipe", self.stages, self.chunks, max(1, len(microbatches)), self.rank)]
        actions = [a for a in forwards if a.kind is Kind.FORWARD and a.microbatch < len(microbatches)]
        return self._run(actions, microbatches, None)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor | None:
        """Logits [s, b, V/t] for tokens [b, s] on the last stage, None on the others."""
        out = None
        for action in schedule("gpipe", self.stages, self.chunks, 1, self.rank):
            if action.kind is Kind.FORWARD:
                message = self._post_receive([action], 0)
                out = self._forward(action, Microbatch(tokens, None, 0), message, False)[1]
        self.transport.flush()
        return out if self.rank == self.stages - 1 else None

    def _run(self, actions: list[Action], microbatches: Sequence[Microbatch], seed_grad: Tensor | None) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=self.layout.device)
        held: dict[tuple[int, int], tuple[Tensor, Any]] = {}
        last_backward = max((i for i, a in enumerate(actions) if a.kind is Kind.BACKWARD), default=-1)
        arriving = self._post_receive(actions, 0)
        for i, action in enumerate(actions):
            # The next receive is posted before this action computes, so that the message travels meanwhile.
            message, arriving = arriving, self._post_receive(actions, i + 1)
            key = (action.chunk, action.microbatch)
            if action.kind is Kind.FORWARD:
                x, out = self._forward(action, microbatches[action.microbatch], message, seed_grad is not None)
                if self._is_last(action):
                    loss += out.detach()
                if seed_grad is not None:
                    held[key] = (x, get_gradient_edge(out))
            else:
                x, edge = held.pop(key)
                assert seed_grad is not None
                grad = message.wait() if message is not None else seed_grad
                self.engine.backward(edge, grad, last=i == last_backward)
                if sends_to(action, self.rank, self.stages, self.chunks) is not None:
                    assert self.transport.send_gradient is not None and x.grad is not None
                    self.transport.send_gradient.send(x.grad)
        self.transport.flush()
        return loss

    def _forward(
        self, action: Action, microbatch: Microbatch, message: Receipt | None, training: bool
    ) -> tuple[Tensor, Tensor]:
        """Run one chunk and send its output on; returns the chunk's input and output."""
        x = message.wait().requires_grad_(training) if message is not None else microbatch.tokens
        labels = microbatch.labels if self._is_last(action) else None
        out = self.engine.forward(action.chunk, x, microbatch.seed, labels)
        if not self._is_last(action):
            assert self.transport.send_activation is not None
            self.transport.send_activation.send(out.detach())
        return x, out

    def _is_last(self, action: Action) -> bool:
        """Whether the action runs the model's last stage, where the loss is."""
        return self.rank == self.stages - 1 and action.chunk == self.chunks - 1

    def _post_receive(self, actions: list[Action], i: int) -> Receipt | None:
        """Start receiving what action `i` needs from a neighbour, if anything."""
        if i >= len(actions) or receives_from(actions[i], self.rank, self.stages, self.chunks) is None:
            return None
        forward = actions[i].kind is Kind.FORWARD
        channel = self.transport.receive_activation if forward else self.transport.receive_gradient
        assert channel is not None
        return channel.receive(self.transport.shape, self.transport.dtype)
