"""A stage of a GPT: some consecutive layers, the embedding if it is the first, the head if it is the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt3d.config.schema import ModelConfig
from gpt3d.model.attention import Rotary
from gpt3d.model.block import Block, hidden_dropout
from gpt3d.model.documents import Context
from gpt3d.model.norm import Norm
from gpt3d.model.rotary import rotary_table
from gpt3d.parallel.collectives import scatter_sequence
from gpt3d.parallel.layers import (
    ColumnLinearFunction,
    Factory,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from gpt3d.parallel.layout import Layout
from gpt3d.parallel.placement import Placement, even_range, placement_of
from gpt3d.parallel.random import derive

Part = TypeVar("Part", bound=nn.Module)
VOCABULARY = ("embedding.word.weight", "head.weight")  # rows beyond the vocabulary are padding
EMBEDDING_SITE = -1  # stands where a layer's number would, in the seed of a dropout mask


class Embedding(nn.Module):
    """Token embedding plus learned positions (GPT-3 family): tokens [b, s] -> [s, b, h] ([s/t, b, h] under SP)."""

    def __init__(self, make: Factory, model: ModelConfig) -> None:
        super().__init__()
        self.layout, self.dropout = make.layout, model.hidden_dropout
        self.word = VocabParallelEmbedding(
            make, "embedding.word", model.padded_vocab_size, model.hidden_size, model.init_std
        )
        clear_padding(self.word.weight, model.vocab_size)
        self.position: nn.Parameter | None = None
        if model.position == "learned":
            place = make.replicated("embedding.position.weight", (model.max_seq_len, model.hidden_size))
            self.position = make.normal(place, model.init_std)

    def forward(self, tokens: Tensor, seed: int, position_ids: Tensor | None = None) -> Tensor:
        x = self.word(tokens)
        if self.position is not None:
            at = self.position[: tokens.shape[1], None, :]
            position = at if position_ids is None else F.embedding(position_ids.t(), self.position)
            x = x + (scatter_sequence(position, self.layout.tp) if self.layout.sequence_parallel else position)
        p = self.dropout if self.training else 0.0
        return hidden_dropout(x, p, derive(seed, EMBEDDING_SITE), self.layout)


class Head(nn.Module):
    """Final norm, projection to the vocabulary (cut over TP), and the loss."""

    def __init__(self, make: Factory, model: ModelConfig, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.layout, self.vocab_size = make.layout, model.vocab_size
        self.norm = Norm(make, "final_norm", model)
        self.weight = self._new_weight(make, model) if tied is None else tied

    @staticmethod
    def _new_weight(make: Factory, model: ModelConfig) -> nn.Parameter:
        """An own matrix; or, when the embedding it is tied to lives on another stage, a second copy of that."""
        name = "embedding.word.weight" if model.tied_embeddings else "head.weight"
        tp, vocab = make.layout.tp, model.padded_vocab_size
        rows = even_range(vocab, tp.size, tp.rank)
        copy = 1 if model.tied_embeddings else 0
        weight = make.normal(Placement(name, (vocab, model.hidden_size), 0, rows, copy), model.init_std)
        clear_padding(weight, model.vocab_size)
        return weight

    def forward(self, x: Tensor, labels: Tensor | None) -> Tensor:
        logits = ColumnLinearFunction.apply(self.norm(x), self.weight, self.layout)
        if labels is None:
            return logits
        return vocab_parallel_cross_entropy(logits, labels.t(), self.layout, self.vocab_size).sum()


class OnBuilt(Protocol):
    """Called with each finished part of the model (embedding, one layer, head), which it returns: ZeRO-3 shards it."""

    def __call__(self, part: Part, /) -> Part: ...


def keep_whole(part: Part) -> Part:
    """Leave it as it is."""
    return part


class GPTStage(nn.Module):
    """Layers `layers` of the model. All of a run's stages together are the model, whatever the cut.

    forward(x, seed, labels): x is tokens [b, s] on the first stage, else activations [s, b, h] ([s/t, b, h] under SP);
    the last stage returns the summed loss in nats (fp32 scalar), or logits [s, b, V/t] without labels; the others
    return activations. `seed` names this microbatch for dropout. `context` tells who sees whom, if not a whole row.
    `on_built` sees each part as soon as it exists.
    """

    def __init__(
        self, model: ModelConfig, layout: Layout, layers: Sequence[int], *, first: bool, last: bool, seq_len: int,
        dtype: torch.dtype, seed: int, recompute: str = "none", on_built: OnBuilt = keep_whole,
    ) -> None:  # fmt: skip
        super().__init__()
        make = Factory(layout, dtype, seed)
        self.recompute = recompute
        self.embedding = on_built(Embedding(make, model)) if first else None
        self.layers = nn.ModuleDict({str(i): on_built(Block(make, i, model, recompute)) for i in layers})
        tied = self.embedding.word.weight if model.tied_embeddings and self.embedding is not None else None
        self.head = on_built(Head(make, model, tied)) if last else None
        self.rotary: Rotary | None = None
        if model.position == "rope":
            self.rotary = rotary_table(model, seq_len, layout.device, dtype)

    def forward(self, x: Tensor, seed: int, labels: Tensor | None = None, context: Context | None = None) -> Tensor:
        rotary, position_ids = self.rotary, None
        if context is not None:
            position_ids = context.position_ids
            if rotary is not None:
                rotary = (rotary[0][position_ids.t(), 0], rotary[1][position_ids.t(), 0])
        if self.embedding is not None:
            x = self.embedding(x, seed, position_ids)
        for block in self.layers.values():
            if self.recompute == "full" and self.training:
                x = checkpoint(block, x, rotary, seed, context, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rotary, seed, context)
        return x if self.head is None else self.head(x, labels)


@torch.no_grad()
def clear_padding(parameter: nn.Parameter, vocab_size: int) -> None:
    """Zero the rows that pad the vocabulary. They get no gradient and stay zero, so checkpoints can leave them out."""
    first = placement_of(parameter).ranges[0][0]
    parameter[max(0, vocab_size - first) :].zero_()
