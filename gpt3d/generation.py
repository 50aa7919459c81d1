"""How the next token is chosen, and text from a model in training, in whatever layout it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpt3d.data.tokenizer import Tokenizer
from gpt3d.parallel.random import derive

if TYPE_CHECKING:
    from gpt3d.learner import Learner


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 takes the likeliest token. `top_k` 0 and `top_p` 1 leave all of them in the draw."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0  # nucleus sampling (Holtzman et al. 2020): the fewest likeliest tokens that hold this much
    seed: int = 0


def streams(seed: int, rows: int) -> list[torch.Generator]:
    """A stream of random numbers for each row of a batch: what one row draws says nothing of its neighbours."""
    return [torch.Generator().manual_seed(derive(seed, row)) for row in range(rows)]


def draw(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """One id for each row of `logits` [b, V] (fp32, CPU), each by its own stream."""
    if sampling.temperature == 0:
        ids: list[int] = logits.argmax(-1).tolist()
        return ids
    # from the likeliest, in fp64: a temperature near 0 leaves that one, instead of infinities
    logits = (logits - logits.amax(-1, keepdim=True)).double() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = torch.softmax(logits, dim=-1).float()
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # held by the likelier ones; the likeliest always stays
        probabilities = probabilities.scatter(-1, order, ordered.masked_fill(before >= sampling.top_p, 0.0))
    pairs = zip(probabilities, generators, strict=True)
    return [int(torch.multinomial(row, 1, generator=generator)) for row, generator in pairs]


def generate(
    learner: Learner, tokenizer: Tokenizer, prompt: str, tokens: int, *, temperature: float = 0.8, seed: int = 0
) -> str:
    """`prompt` continued by `tokens` sampled tokens. Every rank calls it and gets the same text.

    An empty prompt starts after an end-of-document token. Ids without a text (vocabulary larger than the tokenizer) are
    never drawn. The whole window is run again for each token, since a pipeline in training has no cache.
    """
    generators, sampling = [torch.Generator().manual_seed(seed)], Sampling(temperature, seed=seed)
    given = [int(i) for i in tokenizer.encode(prompt)]
    ids = given or [tokenizer.eod]
    for _ in range(tokens):
        logits = learner.next_token_logits(ids[-learner.seq_len :])[: tokenizer.vocab_size]
        ids += draw(logits[None], sampling, generators)
    return tokenizer.decode(ids if given else ids[1:])
