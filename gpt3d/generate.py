"""Text from a trained model: `python -m gpt3d.generate RUN "prompt" ["prompt" ...]`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from gpt3d.checkpoint import settings
from gpt3d.checkpoint.blocks import CorruptCheckpoint
from gpt3d.checkpoint.planner import CheckpointError
from gpt3d.config.ending import exit_code
from gpt3d.data.errors import DataError
from gpt3d.generation import Sampling
from gpt3d.inference import PromptTooLong, TrainedModel, open_model, saved_config
from gpt3d.launch import RankFailed, run_ranks
from gpt3d.parallel import device

ANSWERED = (CheckpointError, CorruptCheckpoint, DataError, PromptTooLong, RankFailed, device.DeviceError, OSError)
DTYPES = ("fp32", "bf16", "fp16")
MAX_TOKENS = 128


@dataclass(frozen=True)
class Request:
    """What is asked of the model at `source`, on each of its ranks."""

    source: Path
    prompts: tuple[str, ...]
    tokens: int | None  # None: MAX_TOKENS, or as many as fit
    sampling: Sampling
    tp: int
    dtype: str | None
    device: str


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit code."""
    given = _parser().parse_intermixed_args(arguments)
    problems = _problems(given)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    return exit_code(lambda: _generate(given), ANSWERED)


def _generate(given: argparse.Namespace) -> None:
    prompts = _prompts(given)
    source = settings.named(given.run, "RUN")[0]
    sampling = Sampling(given.temperature, given.top_k, given.top_p, given.seed)
    kind = device.kind(given.device)
    saved_config(source, given.dtype, given.tp, kind)  # complains before any rank starts
    request = Request(source, prompts, given.tokens, sampling, given.tp, given.dtype, kind)
    if given.tp == 1:
        answer(request)
    else:
        run_ranks(answer, request, nprocs=given.tp, device=kind)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpt3d.generate",
        description="Continue texts with a trained model, from a checkpoint of any layout.",
    )
    parser.add_argument("run", type=Path, help="a run's folder (its newest checkpoint) or a step-* folder")
    parser.add_argument("prompts", nargs="*", help="texts to continue, as one batch; without any: a line of input each")
    parser.add_argument("--tokens", type=int, help="most tokens to add to each (default 128, or what fits)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from so many likeliest tokens only (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest that hold this much (1: all)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed, prompts and model give the same text")
    parser.add_argument("--tp", type=int, default=1, help="ranks of this machine to cut the model over (default 1)")
    parser.add_argument("--dtype", choices=DTYPES, help="number format; default: that of the training")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    return parser


def _problems(given: argparse.Namespace) -> list[str]:
    rules = {
        "--tokens": (given.tokens, given.tokens is None or given.tokens >= 1, "at least 1"),
        "--temperature": (given.temperature, given.temperature >= 0, "0 or more"),
        "--top-k": (given.top_k, given.top_k >= 0, "0 (all) or more"),
        "--top-p": (given.top_p, 0 < given.top_p <= 1, "above 0, at most 1 (all)"),
        "--seed": (given.seed, -(2**63) <= given.seed < 2**63, "an integer of 64 bits"),
        "--tp": (given.tp, given.tp >= 1, "at least 1"),
    }
    return [f"{name}={value}: use {wanted}" for name, (value, good, wanted) in rules.items() if not good]


def _prompts(given: argparse.Namespace) -> tuple[str, ...]:
    if given.prompts:
        return tuple(given.prompts)
    if sys.stdin.isatty():
        print("One prompt a line; end with Ctrl-D", file=sys.stderr)
    return tuple(line.rstrip("\n") for line in sys.stdin) or ("",)


def answer(request: Request) -> None:
    """On each rank: load, continue the prompts; rank 0 prints. One prompt streams, several are printed when done."""
    model = open_model(request.source, request.dtype, request.tp, request.device)
    texts = [Text(model, prompt) for prompt in request.prompts]
    speaks = model.layout.rank == 0
    streams = speaks and len(texts) == 1
    room = max(1, model.length - max(len(text.ids) for text in texts))
    answers = model.generate([text.ids for text in texts], request.tokens or min(MAX_TOKENS, room), request.sampling)
    if streams:
        print(texts[0].prompt, end="", flush=True)
    for ids in answers:
        for text, i in zip(texts, ids, strict=True):
            new = text.add(i)
            if streams:
                print(new, end="", flush=True)
    if streams:
        print(texts[0].rest())
    elif speaks:
        for number, text in enumerate(texts, 1):
            print(f"--- {number}\n{text.prompt}{text.whole()}")
    if request.tp > 1:
        device.destroy_process_group()


class Text:
    """A prompt and what the model adds. `add` gives what can be shown: never half a character."""

    def __init__(self, model: TrainedModel, prompt: str) -> None:
        self.prompt, self.tokenizer = prompt, model.tokenizer
        self.ids = [int(i) for i in model.tokenizer.encode(prompt)] or [model.tokenizer.eod]
        self.added: list[int] = []
        self.shown = 0

    def add(self, i: int | None) -> str:
        """The text that one more token (None: the text has ended) makes certain."""
        if i is not None:
            self.added.append(i)
        whole = self.whole()
        certain = whole.rstrip("\N{REPLACEMENT CHARACTER}")  # perhaps the first bytes of a character
        new, self.shown = certain[self.shown :], max(self.shown, len(certain))
        return new

    def whole(self) -> str:
        return self.tokenizer.decode(self.added)

    def rest(self) -> str:
        """What was held back, now that nothing follows."""
        return self.whole()[self.shown :]


if __name__ == "__main__":
    sys.exit(main())
