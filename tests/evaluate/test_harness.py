"""Tasks of lm-evaluation-harness on a checkpoint, offline, against log-probabilities worked out the long way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt3d import evaluate, export
from gpt3d.generation import Sampling
from gpt3d.harness import Answers, _adapter
from gpt3d.inference import TrainedModel, open_model
from tests.generation.test_generate import LENGTH, checkpoint

CHOICES = [("the sea is", " blue", " loud"), ("a rose ", "is red", "é"), ("I am", " here", " not here, but there")]
LONG = "To be, or not to be, that is the question: whether 'tis nobler, and so on"  # longer than the model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("harness"), "llama", tp=2, pp=2)


@pytest.fixture(scope="module")
def model(source: Path) -> TrainedModel:
    return open_model(source, "fp32", 1, "cpu")


def one_by_one(model: TrainedModel, ids: list[int], count: int) -> tuple[float, bool]:
    """Of the last `count` ids: log-probability and whether each is the likeliest, a forward for each."""
    total, greedy = 0.0, True
    for at in range(len(ids) - count, len(ids)):
        logits = model.logits(torch.tensor([ids[max(0, at - LENGTH) : at]]), every_id=True)[0, -1]
        assert len(logits) == model.config.model.vocab_size
        total += float(torch.log_softmax(logits.double(), -1)[ids[at]])
        greedy = greedy and int(logits.argmax()) == ids[at]
    return total, greedy


def expected(model: TrainedModel, context: str, continuation: str) -> tuple[float, bool]:
    before = list(context.encode()) or [model.tokenizer.eod]
    spaces = len(context) - len(context.rstrip())  # counted with the continuation
    added = len(continuation.encode()) + spaces
    return one_by_one(model, before + list(continuation.encode()), added)


def test_log_probabilities_of_continuations(model: TrainedModel) -> None:
    pairs = [(context, text) for context, *texts in CHOICES for text in texts] + [("", "on its own")]
    greedy = [i for (i,) in model.generate([list(b"ab")], 3, Sampling(temperature=0)) if i is not None]
    if greedy and max(greedy) < 128:
        pairs.append(("ab", bytes(greedy).decode()))
    for pair, (got, likeliest) in zip(pairs, Answers(model).loglikelihood(pairs), strict=True):
        want = expected(model, *pair)
        assert got == pytest.approx(want[0], rel=1e-5, abs=1e-4), pair
        assert likeliest == want[1], pair


def test_a_long_text_counts_each_token_once(model: TrainedModel) -> None:
    """Windows of the model's length; the last is a full one, too."""
    ids = [model.tokenizer.eod, *LONG.encode()]
    assert LENGTH < len(LONG) < 2 * LENGTH
    first = one_by_one_window(model, ids[: LENGTH + 1], LENGTH)
    rest = one_by_one_window(model, ids[-(LENGTH + 1) :], len(LONG) - LENGTH)
    assert Answers(model).rolling(LONG) == pytest.approx(first + rest, rel=1e-5)
    assert Answers(model).rolling("") == 0


def one_by_one_window(model: TrainedModel, ids: list[int], count: int) -> float:
    """The same for one window, whose beginning all its tokens see."""
    return sum(one_by_one(model, ids[:stop], 1)[0] for stop in range(len(ids) - count + 1, len(ids) + 1))


def test_text_ends_before_a_stop(model: TrainedModel) -> None:
    answers, options = Answers(model), {"max_gen_toks": 12, "do_sample": False}
    whole = answers.generate_until("ab", options)
    assert len(whole) > 2
    for until in (whole[2], [whole[1:3], "never"]):
        stop = until if isinstance(until, str) else until[0]
        assert answers.generate_until("ab", {**options, "until": until}) == whole[: whole.index(stop)]
    assert answers.generate_until("x" * 100, {"max_gen_toks": 500}) is not None, "a long context loses its beginning"


def write_tasks(root: Path) -> None:
    lines = [{"q": q, "a": a, "b": b, "text": LONG} for q, a, b in CHOICES]
    (root / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    head = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {root / 'data.jsonl'}\ntest_split: test\n"
    choice = 'doc_to_text: "{{q}}"\ndoc_to_choice: "{{[a, b]}}"\ndoc_to_target: 0\ntarget_delimiter: ""\n'
    bodies = {
        "gpt3d_choice": "output_type: multiple_choice\n" + choice,
        "gpt3d_rolling": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list:\n  - metric: bits_per_byte\n",
        "gpt3d_until": 'output_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\n'
        'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 4\nmetric_list:\n  - metric: exact_match\n',
    }
    for name, body in bodies.items():
        (root / f"{name}.yaml").write_text(f"task: {name}\n{head}{body}")


def test_local_tasks_through_the_command(
    source: Path,
    model: TrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'gpt3d[eval]'")
    write_tasks(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    asked: list[Any] = [str(source), "--device", "cpu", "--dtype", "fp32", "--json", str(tmp_path / "out.json")]
    names = "gpt3d_choice,gpt3d_rolling,gpt3d_until"
    assert evaluate.main([*asked, "--tasks", names, "--task-dir", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    right = [expected(model, q, a)[0] > expected(model, q, b)[0] for q, a, b in CHOICES]
    assert results["gpt3d_choice"]["acc,none"] == pytest.approx(sum(right) / len(right))
    nats = -Answers(model).rolling(LONG)
    assert results["gpt3d_rolling"]["bits_per_byte,none"] == pytest.approx(nats / 0.693147 / len(LONG), rel=1e-4)
    assert results["gpt3d_until"]["exact_match,none"] == 0
    assert "gpt3d_choice" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_the_harness_says_the_same_of_the_exported_folder(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lm_eval --model hf --model_args pretrained=FOLDER` against our own answers: each log-probability, each text."""
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'gpt3d[eval]'")
    pytest.importorskip("accelerate", reason="lm_eval's hf models need it: pip install accelerate")
    from lm_eval.tasks import TaskManager

    source = checkpoint(tmp_path, family, tp=2, pp=2)
    export.export(source, tmp_path / "hf", "fp32")
    write_tasks(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def asked(model: Any, **arguments: Any) -> dict[str, Any]:
        tasks = ["gpt3d_choice", "gpt3d_rolling", "gpt3d_until"]
        found = lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, bootstrap_iters=0, **arguments)
        return {task: [sample["filtered_resps"] for sample in found["samples"][task]] for task in tasks}

    theirs = asked("hf", model_args=f"pretrained={tmp_path / 'hf'},dtype=float32", device="cpu")
    ours = asked(_adapter(open_model(source, "fp32", 1, "cpu")))
    assert len(ours["gpt3d_choice"]) == 3
    for own, other in zip(ours["gpt3d_choice"], theirs["gpt3d_choice"], strict=True):
        for (score, greedy), (want, want_greedy) in zip(own, other, strict=True):
            assert float(score) == pytest.approx(float(want), rel=1e-5, abs=1e-4)
            assert str(greedy) == str(want_greedy)
    for (own,), (other,) in zip(ours["gpt3d_rolling"], theirs["gpt3d_rolling"], strict=True):
        assert float(own) == pytest.approx(float(other), rel=1e-5)
    assert ours["gpt3d_until"] == theirs["gpt3d_until"]


@pytest.mark.slow  # the harness looks through its own thousands of tasks
def test_an_unknown_task_is_told(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'gpt3d[eval]'")
    asked = [str(source), "--device", "cpu", "--tasks", "nothing_like_it", "--task-dir", str(tmp_path)]
    assert evaluate.main(asked) == 1
    assert "no task is called nothing_like_it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.num_layers=1", "precision.dtype=bf16"], "model.num_layers=1: only data.KEY=VALUE"),
        (["data.seq_len"], "data.seq_len: only data.KEY=VALUE"),
        (["--tasks", "x", "data.seq_len=8"], "--tasks brings its own text"),
        (["--limit", "3"], "are for --tasks"),
        (["--batches", "-1"], "--batches=-1: use at least 0"),
        (["--json", "no/such/file"], "--json=no/such/file: there is no folder no/such"),
    ],
)
def test_nothing_asked_for_is_passed_over(
    source: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main([str(source), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_bytes_of_characters_that_windows_cut(source: Path, tmp_path: Path) -> None:
    """Every label of the held-out text is decoded in order, so a character across two windows has its own bytes."""
    text = "äöü€ " * 30
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "held.txt").write_text(text)
    out = tmp_path / "out.json"
    data = [f"data.paths=[{tmp_path / 'a.txt'}]", f"data.validation_paths=[{tmp_path / 'held.txt'}]"]
    options = ["data.source=files", f"data.cache_dir={tmp_path}", "--batches", "0", "--json", str(out)]
    assert evaluate.main([str(source), "--device", "cpu", *data, *options]) == 0
    got = json.loads(out.read_text())
    size = len(text.encode())
    assert got["tokens"] == size  # of size + 1 ids, the end of document among them, all but the first are labels
    bits = got["loss"] * got["tokens"] / 0.6931471805599453
    assert got["bits_per_byte"] == pytest.approx(bits / (size + 1), rel=0.01)
    assert evaluate.main([str(source), "--device", "cpu", *data, *options, f"data.seq_len={LENGTH + 1}"]) == 1
