"""A trained model to ask: loaded from a checkpoint of any layout onto one device, or cut over TP ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gpt3d.checkpoint.folder import read_state
from gpt3d.checkpoint.initial import read_weights
from gpt3d.config.arithmetic import World
from gpt3d.config.load import to_typed
from gpt3d.config.problems import ConfigError
from gpt3d.config.rules import check, memory
from gpt3d.config.schema import ParallelConfig, PipelineConfig, PrecisionConfig, RunConfig, ZeroConfig
from gpt3d.data.build import open_tokenizer
from gpt3d.data.tokenizer import Tokenizer
from gpt3d.generation import Sampling, draw, streams
from gpt3d.model.build import build_chunks
from gpt3d.model.cache import KeyValueCache
from gpt3d.model.documents import Documents
from gpt3d.parallel import device
from gpt3d.parallel.collectives import all_gather_last
from gpt3d.parallel.layout import Layout, Sizes, create_layout, single_process_layout

PREFILL = 512  # tokens of a prompt in one forward: bounds the logits that are made and dropped


class PromptTooLong(ValueError):
    """Prompt and answer do not fit into the positions of the model; the message says by how much."""

    show_traceback = False


def saved_config(source: Path, dtype: str | None = None, tp: int = 1, kind: str = "cpu") -> RunConfig:
    """The configuration of a checkpoint folder, to be run on `tp` ranks without any other parallelism.

    Raises ConfigError where the model cannot be cut so, or the device does not know the number format.
    """
    config = to_typed(read_state(source)["config"])
    config = dataclasses.replace(
        config,
        parallel=ParallelConfig(tp=tp),
        pipeline=PipelineConfig(),
        zero=ZeroConfig(stage=0),
        recompute="none",
        precision=PrecisionConfig(dtype=dtype or config.precision.dtype),
    )
    if problems := check(config, World(ranks=tp, device=kind), leave_out=[memory]):
        raise ConfigError(problems)
    return config


class TrainedModel:
    """The model of `config` with the weights of the checkpoint `source`. TP ranks make it and call it alike.

    `length`: the most tokens of a text (default: all positions that the model was made for, model.max_seq_len).
    """

    def __init__(self, config: RunConfig, source: Path, layout: Layout, length: int | None = None) -> None:
        self.config, self.layout = config, layout
        self.length = length or config.model.max_seq_len
        cut = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=self.length))
        (self.stage,) = build_chunks(cut, layout)
        self.stage.eval().requires_grad_(False)
        read_weights(source, self.stage.parameters(), config.model)
        self.tokenizer: Tokenizer = open_tokenizer(config)
        self.vocab_size = min(config.model.vocab_size, self.tokenizer.vocab_size)  # the others have no text

    @torch.no_grad()
    def logits(self, tokens: Tensor, cache: KeyValueCache | None = None, *, every_id: bool = False) -> Tensor:
        """Logits [b, s, V] (fp32) of the token after each of `tokens` [b, s]: of ids that have a text, or of all.

        All are what the loss normalises over: `every_id` gives log-probabilities as training and an export see them.
        """
        local = self.stage(tokens.to(self.layout.device), 0, None, cache)
        whole = all_gather_last(local, self.layout.tp)
        ids = self.config.model.vocab_size if every_id else self.vocab_size
        return whole[..., :ids].transpose(0, 1).float()

    @torch.no_grad()
    def loss(self, tokens: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> float:
        """Summed loss [nats] of the labels [b, s] >= 0; texts that share a row are told apart by `position_ids`."""
        at = self.layout.device
        documents = None if position_ids is None else Documents.of(position_ids, at)
        return float(self.stage(tokens.to(at), 0, labels.to(at), documents))

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, sampling: Sampling) -> Iterator[list[int | None]]:
        """Continue each prompt (ids, at least one); yields the next id of each, None from its end of document on.

        At most `tokens` times. Raises PromptTooLong before any work.
        """
        lengths = [len(prompt) for prompt in prompts]
        if max(lengths) + tokens > self.length:
            raise PromptTooLong(
                f"a prompt of {max(lengths):,} tokens and {tokens:,} new ones are more than the {self.length:,} "
                "positions of this model"
            )
        return self._continue(prompts, tokens, sampling)

    def _continue(
        self, prompts: Sequence[Sequence[int]], tokens: int, sampling: Sampling
    ) -> Iterator[list[int | None]]:
        lengths = [len(prompt) for prompt in prompts]
        cache = KeyValueCache(len(prompts), max(lengths) + tokens)
        generators = streams(sampling.seed, len(prompts))
        next_logits = self._prefill(prompts, cache)
        ended = [False] * len(prompts)
        for _ in range(tokens):
            ids = draw(next_logits.cpu(), sampling, generators)
            ended = [done or i == self.tokenizer.eod for done, i in zip(ended, ids, strict=True)]
            yield [None if done else i for done, i in zip(ended, ids, strict=True)]
            if all(ended):
                return
            cache.move_to(self._at([[n] for n in lengths]), max(lengths) + 1)
            lengths = [n + 1 for n in lengths]
            next_logits = self.logits(torch.tensor(ids)[:, None], cache)[:, 0]

    def _prefill(self, prompts: Sequence[Sequence[int]], cache: KeyValueCache) -> Tensor:
        """Fill the cache; the logits [b, V] after the last token of each prompt."""
        longest = max(len(prompt) for prompt in prompts)
        tokens = torch.zeros((len(prompts), longest), dtype=torch.long)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        after = torch.zeros((len(prompts), self.vocab_size))
        for first in range(0, longest, PREFILL):
            part = tokens[:, first : first + PREFILL]
            stop = first + part.shape[1]
            cache.move_to(self._at([list(range(first, stop))] * len(prompts)), stop)
            logits = self.logits(part, cache)
            for row, prompt in enumerate(prompts):
                if first < len(prompt) <= stop:
                    after[row] = logits[row, len(prompt) - 1 - first].cpu()
        return after

    def _at(self, positions: list[list[int]]) -> Tensor:
        return torch.tensor(positions, device=self.layout.device)


def open_model(source: Path, dtype: str | None, tp: int, kind: str, length: int | None = None) -> TrainedModel:
    """On each of `tp` ranks (tp 1: in this process): the model at `source`, on the device `kind` auto, cpu or cuda."""
    config = saved_config(source, dtype, tp, kind)
    selected = device.select(int(os.environ.get("LOCAL_RANK", 0)), kind)
    if tp == 1:
        layout = single_process_layout(selected.torch_device)
    else:
        device.init_process_group(selected, config.cluster.timeout_minutes)
        layout = create_layout(Sizes(tp=tp), selected.torch_device, num_kv_heads=config.model.num_kv_heads)
    return TrainedModel(config, source, layout, length)
