"""Text from a model in training, in whatever layout it is: the whole window is run again for each token."""

from __future__ import annotations

import torch

from gpt3d.data.tokenizer import Tokenizer
from gpt3d.learner import Learner


def generate(
    learner: Learner, tokenizer: Tokenizer, prompt: str, tokens: int, *, temperature: float = 0.8, seed: int = 0
) -> str:
    """`prompt` continued by `tokens` sampled tokens. Every rank calls it and gets the same text.

    An empty prompt starts after an end-of-document token. Ids without a text (vocabulary larger than the tokenizer) are
    never drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    given = [int(i) for i in tokenizer.encode(prompt)]
    ids = given or [tokenizer.eod]
    for _ in range(tokens):
        logits = learner.next_token_logits(ids[-learner.seq_len :])[: tokenizer.vocab_size]
        probabilities = torch.softmax(logits / temperature, dim=-1)
        ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return tokenizer.decode(ids if given else ids[1:])
