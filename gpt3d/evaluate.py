"""How good is a trained model: `python -m gpt3d.evaluate RUN [key=value ...] [--tasks NAME,...]`.

Loss and perplexity on held-out text, of the run itself or of the data that the overrides name; and tasks of
EleutherAI's lm-evaluation-harness.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt3d.checkpoint import settings
from gpt3d.checkpoint.blocks import CorruptCheckpoint
from gpt3d.checkpoint.planner import CheckpointError
from gpt3d.config.ending import exit_code
from gpt3d.config.load import to_typed
from gpt3d.config.schema import RunConfig
from gpt3d.data import build_data, prepare, validation_batches
from gpt3d.data.errors import DataError
from gpt3d.data.tokenizer import Tokenizer
from gpt3d.harness import HarnessError, evaluate_tasks
from gpt3d.inference import TrainedModel, open_model, saved_config
from gpt3d.launch import RankFailed, run_ranks
from gpt3d.parallel import device

ANSWERED = (CheckpointError, CorruptCheckpoint, DataError, HarnessError, RankFailed, device.DeviceError, OSError)


@dataclass(frozen=True)
class Score:
    """`loss`: nats a token, over `tokens` targets. `bits_per_byte`: of their text, comparable between tokenizers."""

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    unigram_entropy: float | None


@dataclass(frozen=True)
class Request:
    """What is asked of the model at `source`, on each of its ranks: `tasks`, or else the loss."""

    source: Path
    overrides: tuple[str, ...]
    batches: int | None
    tasks: tuple[str, ...]
    task_dir: Path | None
    limit: int | None
    tp: int
    dtype: str | None
    device: str


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit code."""
    given = _parser().parse_intermixed_args(arguments)
    if problems := _problems(given):
        print("\n".join(problems), file=sys.stderr)
        return 2
    return exit_code(lambda: _evaluate(given), ANSWERED)


def _evaluate(given: argparse.Namespace) -> None:
    source = settings.named(given.run, "RUN")[0]
    kind = device.kind(given.device)
    config = _with_overrides(saved_config(source, given.dtype, given.tp, kind), given.overrides)
    tasks = tuple(given.tasks.split(",")) if given.tasks else ()
    request = Request(
        source, tuple(given.overrides), given.batches, tasks, given.task_dir, given.limit,
        given.tp, given.dtype, kind,
    )  # fmt: skip
    if given.tp == 1:
        result = answer(request)
    else:
        if not tasks:
            prepare(config)  # once, and not by each rank
        result = run_ranks(answer, request, nprocs=given.tp, device=kind)[0]
    if given.json:
        given.json.write_text(json.dumps({"checkpoint": str(source), **result}, indent=2) + "\n")
    print(task_table(result) if tasks else _in_words(result, source))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpt3d.evaluate",
        description="Loss of a trained model on held-out text, and tasks of lm-evaluation-harness.",
        epilog="key=value: settings of the run to change first, such as data.source=files data.paths=[a.txt]",
    )
    parser.add_argument("run", type=Path, help="a run's folder (its newest checkpoint) or a step-* folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that differ, above all data.*")
    parser.add_argument("--batches", type=int, help="global batches to look at (default: trainer.eval_batches; 0: all)")
    parser.add_argument(
        "--tasks", help="names of lm-evaluation-harness, with commas; the held-out text is then left out"
    )
    parser.add_argument("--task-dir", type=Path, help="a folder with task files (YAML) of your own")
    parser.add_argument("--limit", type=int, help="questions of each task (default: all)")
    parser.add_argument("--json", type=Path, help="write the result there as well")
    parser.add_argument("--tp", type=int, default=1, help="ranks of this machine to cut the model over (default 1)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="number format; default: of the training")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    return parser


def answer(request: Request) -> dict[str, Any]:
    """On each rank: load, and find what is asked for; the same on all of them."""
    model = open_model(request.source, request.dtype, request.tp, request.device)
    if request.tasks:
        result = evaluate_tasks(model, list(request.tasks), request.task_dir, request.limit)
    else:
        begun = time.perf_counter()
        config = _with_overrides(model.config, request.overrides)
        result = asdict(evaluate(model, config, request.batches)) | {"seconds": time.perf_counter() - begun}
    if request.tp > 1:
        device.destroy_process_group()
    return result


def _problems(given: argparse.Namespace) -> list[str]:
    """What was asked for and would have no effect, or cannot be."""
    problems = [
        f"{override}: only data.KEY=VALUE and trainer.micro_batch_size=N can be changed; the rest is the model's own"
        for override in given.overrides
        if not override.startswith(("data.", "trainer.micro_batch_size=")) or "=" not in override
    ]
    for name, value, least in (("--batches", given.batches, 0), ("--limit", given.limit, 1), ("--tp", given.tp, 1)):
        if value is not None and value < least:
            problems.append(f"{name}={value}: use at least {least}")
    if given.tasks and (given.overrides or given.batches is not None):
        problems.append("--tasks brings its own text: leave out --batches and key=value")
    if not given.tasks and (given.task_dir or given.limit is not None):
        problems.append("--task-dir and --limit are for --tasks=NAME,...")
    if given.json and not given.json.absolute().parent.is_dir():
        problems.append(f"--json={given.json}: there is no folder {given.json.parent}")
    return problems


def _with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The run's settings with some changed. Raises DataError for what is no setting."""
    try:
        found = to_typed(OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(list(overrides))))
    except (OmegaConfBaseException, ValueError) as error:
        raise DataError(f"{' '.join(overrides)}: {str(error).splitlines()[0]}") from None
    if found.data.seq_len > config.model.max_seq_len:
        raise DataError(f"data.seq_len={found.data.seq_len}: the model has {config.model.max_seq_len} positions")
    return found


def evaluate(model: TrainedModel, config: RunConfig, batches: int | None = None) -> Score:
    """Loss on the held-out text of `config.data`: on as much of it as the trainer looks at, or `batches` (0: all)."""
    data, t = build_data(config), config.trainer
    if data.validation is None:
        raise DataError(f"data.validation_fraction={config.data.validation_fraction} holds no text out to evaluate on")
    limit = t.eval_batches if batches is None else batches or None
    loss, tokens, seen = 0.0, 0, list[np.ndarray]()
    for batch in validation_batches(data.validation, t.global_batch_size, t.micro_batch_size, 0, 1, limit=limit):
        for rows in batch:
            loss += model.loss(rows["tokens"], rows["labels"], rows.get("position_ids"))
            seen.append(rows["labels"][rows["labels"] >= 0].numpy())
            tokens += len(seen[-1])
    mean, size = loss / max(tokens, 1), _bytes(np.concatenate(seen), model.tokenizer)
    per_byte = loss / math.log(2) / size if size and config.data.source != "synthetic" else None
    return Score(mean, math.exp(mean), per_byte, tokens, data.unigram_entropy)


def _bytes(ids: np.ndarray, tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the text of `ids`, in order; windows may cut a character, so whole documents are decoded."""
    documents = np.split(ids, np.flatnonzero(ids == tokenizer.eod))
    return sum(len(tokenizer.decode(part[part != tokenizer.eod]).encode()) for part in documents)


def _in_words(found: dict[str, Any], source: Path) -> str:
    lines = [
        f"model       {source}",
        f"loss        {found['loss']:.4f} nats a token, over {found['tokens']:,} tokens of held-out text "
        f"({found['seconds']:.1f} s)",
        f"perplexity  {found['perplexity']:,.2f}",
    ]
    if found["bits_per_byte"] is not None:
        lines.append(f"bits/byte   {found['bits_per_byte']:.4f}")
    if found["unigram_entropy"] is not None:
        lines.append(f"unigram     {found['unigram_entropy']:.4f} nats a token: what word frequencies alone can give")
    return "\n".join(lines)


def task_table(results: dict[str, Any]) -> str:
    """A line for each task and measure."""
    rows = [
        (task, key.removesuffix(",none"), f"{value:.4f}")
        for task, measures in results["results"].items()
        for key, value in measures.items()
        if isinstance(value, float) and "stderr" not in key
    ]
    width = [max(len(row[i]) for row in [("task", "measure", ""), *rows]) for i in (0, 1)]
    return "\n".join(f"{a:<{width[0]}}  {b:<{width[1]}}  {c}" for a, b, c in [("task", "measure", "value"), *rows])


if __name__ == "__main__":
    sys.exit(main())
