"""Our model as EleutherAI's lm-evaluation-harness wants it: three questions about texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gpt3d.generation import Sampling
from gpt3d.inference import TrainedModel

BATCH = 8  # texts in one forward


class HarnessError(RuntimeError):
    """The harness is not installed, or does not know a task; the message says what to do."""

    show_traceback = False


def evaluate_tasks(model: TrainedModel, tasks: list[str], folder: Path | None, limit: int | None) -> dict[str, Any]:
    """The harness's result for these tasks, `folder` holding task files (YAML) beside its own.

    TP ranks call it alike; the harness gives the result to the first alone, the others get an empty one.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise HarnessError("--tasks needs lm-evaluation-harness: pip install 'gpt3d[eval]'") from None
    if folder is not None and not folder.is_dir():
        raise HarnessError(f"--task-dir={folder} is no folder")
    manager = TaskManager(include_path=str(folder) if folder else None, include_defaults=folder is None)
    if any(task not in manager.all_tasks for task in tasks) and folder is not None:
        manager = TaskManager(include_path=str(folder))  # reads the harness's thousands of files: half a minute
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise HarnessError(f"--tasks: no task is called {', '.join(unknown)}; lm_eval --tasks list shows all")
    results: dict[str, Any] | None = lm_eval.simple_evaluate(
        model=_adapter(model), tasks=tasks, limit=limit, task_manager=manager, bootstrap_iters=0
    )
    return {"results": results["results"], "samples": results["n-samples"]} if results else {}


def _adapter(model: TrainedModel) -> Any:
    from lm_eval.api.model import LM

    class Adapter(LM):
        """The harness's calls, answered by `Answers`."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return answers.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return [answers.rolling(request.args[0]) for request in requests]

        def generate_until(self, requests: list[Any]) -> list[str]:
            return [answers.generate_until(*request.args) for request in requests]

    answers = Answers(model)
    return Adapter()


class Answers:
    """What the harness asks, in its terms."""

    def __init__(self, model: TrainedModel) -> None:
        self.model, self.tokenizer = model, model.tokenizer

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """For each (context, continuation): log-probability [nats] of the continuation, and whether greedy gives it.

        Longer texts than the model has positions lose their beginning, as in the harness's own models.
        """
        texts = []
        for context, continuation in pairs:
            # Spaces before the border belong to the continuation, as in the harness: tokens begin with their space.
            bare = context.rstrip()
            continuation = context[len(bare) :] + continuation
            before = self._ids(bare) or [self.tokenizer.eod]
            whole = self._ids(bare + continuation) if bare else before + self._ids(continuation)
            texts.append((whole, len(whole) - len(before)))
        return list(self._scored(texts))

    def rolling(self, text: str) -> float:
        """Log-probability [nats] of all of `text`, each token counted once, in windows of the model's length.

        The last window begins earlier, to be a full one, and only its new tokens count: as in the harness.
        """
        ids, step = [self.tokenizer.eod, *self._ids(text)], self.model.length
        stops = [min(first + step, len(ids) - 1) for first in range(0, len(ids) - 1, step)]
        counts = [stop - first for first, stop in zip(range(0, len(ids) - 1, step), stops, strict=True)]
        windows = [(ids[max(0, stop - step) : stop + 1], n) for stop, n in zip(stops, counts, strict=True)]
        return sum(score for score, _ in self._scored(windows))

    def generate_until(self, context: str, options: dict[str, Any]) -> str:
        """Text after `context` up to one of the `until` strings."""
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        tokens = min(int(options.get("max_gen_toks", 256)), self.model.length - 1)
        temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
        prompt = (self._ids(context) or [self.tokenizer.eod])[-(self.model.length - tokens) :]
        ids: list[int] = []
        for (new,) in self.model.generate([prompt], tokens, Sampling(temperature)):
            ids += [new] if new is not None else []
            text = self.tokenizer.decode(ids)
            if found := [text.index(stop) for stop in until if stop in text]:
                return text[: min(found)]
        return self.tokenizer.decode(ids)

    def _ids(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer.encode(text)]

    def _scored(self, texts: Sequence[tuple[list[int], int]]) -> Iterator[tuple[float, bool]]:
        """Of each (ids, n): log-probability of the last n ids after those before, and whether each is the likeliest."""
        for first in range(0, len(texts), BATCH):
            cut = [(ids[-(self.model.length + 1) :], n) for ids, n in texts[first : first + BATCH]]
            tokens = torch.zeros((len(cut), max(len(ids) for ids, _ in cut) - 1), dtype=torch.long)
            for row, (ids, _) in zip(tokens, cut, strict=True):
                row[: len(ids) - 1] = torch.tensor(ids[:-1])
            logits = self.model.logits(tokens, every_id=True).cpu()
            for row, (ids, n) in enumerate(cut):
                n = min(n, len(ids) - 1)
                if n < 1:  # an empty continuation, or one that merged into the last token before it
                    yield 0.0, True
                    continue
                own, wanted = logits[row, len(ids) - 1 - n : len(ids) - 1], torch.tensor(ids[-n:])
                score = F.log_softmax(own, -1).gather(-1, wanted[:, None]).sum()
                yield float(score), bool((own.argmax(-1) == wanted).all())
