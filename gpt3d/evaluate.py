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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt3d.checkpoint import settings
from gpt3d.checkpoint.blocks import CorruptCheckpoint
from gpt3d.checkpoint.planner import CheckpointError
from gpt3d.config.load import to_typed
from gpt3d.config.problems import ConfigError
from gpt3d.config.schema import RunConfig
from gpt3d.data import build_data, validation_batches
from gpt3d.data.errors import DataError
from gpt3d.harness import HarnessError, evaluate_tasks
from gpt3d.inference import TrainedModel, open_model
from gpt3d.parallel import device


@dataclass(frozen=True)
class Score:
    """`loss`: nats a token, over `tokens` targets. `bits_per_byte`: of their text, comparable between tokenizers."""

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    unigram_entropy: float | None


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit code."""
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
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="number format; default: of the training")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    given = parser.parse_intermixed_args(arguments)
    try:
        source = settings.named(given.run, "RUN")[0]
        model = open_model(source, given.dtype, 1, device.kind(given.device))
        if given.tasks:
            result: dict[str, Any] = evaluate_tasks(model, given.tasks.split(","), given.task_dir, given.limit)
            print(task_table(result))
        else:
            config = _with_overrides(model.config, given.overrides)
            begun = time.perf_counter()
            score = evaluate(model, config, given.batches)
            result = asdict(score)
            print(_in_words(score, source, time.perf_counter() - begun))
        if given.json:
            given.json.write_text(json.dumps({"checkpoint": str(source), **result}, indent=2) + "\n")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (CheckpointError, CorruptCheckpoint, DataError, HarnessError, device.DeviceError, OSError) as error:
        print(f"gpt3d: {error}", file=sys.stderr)
        return 1
    return 0


def _with_overrides(config: RunConfig, overrides: list[str]) -> RunConfig:
    """The run's settings with some changed. Raises DataError for what is no setting."""
    try:
        return to_typed(OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(overrides)))
    except (OmegaConfBaseException, ValueError) as error:
        raise DataError(f"{' '.join(overrides)}: {str(error).splitlines()[0]}") from None


def evaluate(model: TrainedModel, config: RunConfig, batches: int | None = None) -> Score:
    """Loss on the held-out text of `config.data`: on as much of it as the trainer looks at, or `batches` (0: all)."""
    data, t = build_data(config), config.trainer
    if data.validation is None:
        raise DataError(f"data.validation_fraction={config.data.validation_fraction} holds no text out to evaluate on")
    limit = t.eval_batches if batches is None else batches or None
    loss, tokens, size = 0.0, 0, 0
    for batch in validation_batches(data.validation, t.global_batch_size, t.micro_batch_size, 0, 1, limit=limit):
        for rows in batch:
            loss += model.loss(rows["tokens"], rows["labels"], rows.get("position_ids"))
            for labels in rows["labels"]:
                ids = labels[labels >= 0]
                tokens += len(ids)
                size += len(model.tokenizer.decode(ids[ids != model.tokenizer.eod].numpy()).encode())
    mean = loss / max(tokens, 1)
    per_byte = loss / math.log(2) / size if size and config.data.source != "synthetic" else None
    return Score(mean, math.exp(mean), per_byte, tokens, data.unigram_entropy)


def _in_words(score: Score, source: Path, seconds: float) -> str:
    lines = [
        f"model       {source}",
        f"loss        {score.loss:.4f} nats a token, over {score.tokens:,} tokens of held-out text ({seconds:.1f} s)",
        f"perplexity  {score.perplexity:,.2f}",
    ]
    if score.bits_per_byte is not None:
        lines.append(f"bits/byte   {score.bits_per_byte:.4f}")
    if score.unigram_entropy is not None:
        lines.append(f"unigram     {score.unigram_entropy:.4f} nats a token: what word frequencies alone can give")
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
