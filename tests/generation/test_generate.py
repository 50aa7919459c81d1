"""Text from a checkpoint: with kept keys and values as without, alone as in a batch, on one rank as on two."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt3d import evaluate, generate, inference
from gpt3d.checkpoint import folder
from gpt3d.checkpoint.settings import plain
from gpt3d.config.schema import LrConfig, TokenizerConfig
from gpt3d.data.tokenizer import BytesTokenizer
from gpt3d.generation import Sampling, draw, streams
from gpt3d.inference import PromptTooLong, TrainedModel, open_model
from gpt3d.verification.cases import FAMILIES, Case
from tests.checkpoint import simulated

World = Callable[..., list[Any]]
VOCAB, LENGTH = 260, 40  # ids 257 to 259 have no text
PROMPTS = ("ab", "a longer prompt", "c")
GREEDY = Sampling(temperature=0)


def checkpoint(root: Path, family: str, **layout: Any) -> Path:
    """Random weights, saved in the layout."""
    name = f"text_{family}"
    FAMILIES[name] = dataclasses.replace(FAMILIES[family], vocab_size=VOCAB, max_seq_len=LENGTH)
    case = Case(family=name, **layout)
    config = case.config()
    config.tokenizer, config.lr = TokenizerConfig(kind="bytes"), LrConfig(schedule="constant")
    simulated.save(case, root / ".tmp-1")
    state = {"format": folder.FORMAT, "config": plain(config), "progress": {"step": 1}}
    folder.commit(root / ".tmp-1", root / folder.step_name(1), {folder.STATE: json.dumps(state)})
    return root / folder.step_name(1)


@pytest.fixture(params=["llama", "gpt", "one_kv_head_bias"], scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grouped queries with scaled rotary angles; learned positions; a single key/value head."""
    return checkpoint(tmp_path_factory.mktemp("text"), request.param, tp=2, pp=2, dp=2, zero=1)


def ids_of(model: TrainedModel, prompts: tuple[str, ...] = PROMPTS) -> list[list[int]]:
    return [[int(i) for i in model.tokenizer.encode(prompt)] for prompt in prompts]


def without_cache(model: TrainedModel, ids: list[int], tokens: int) -> list[int]:
    """Greedy, by running the whole text for each token."""
    ids = list(ids)
    for _ in range(tokens):
        ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids[-tokens:]


def test_kept_keys_and_values_change_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of three lengths, prompts in forwards of 4 tokens: each row as it would be alone and without a cache."""
    monkeypatch.setattr(inference, "PREFILL", 4)
    model = open_model(source, "fp32", 1, "cpu")
    steps = list(model.generate(ids_of(model), 12, GREEDY))
    for row, ids in enumerate(ids_of(model)):
        got, alone = [step[row] for step in steps], without_cache(model, ids, 12)
        if model.tokenizer.eod in alone:
            alone = alone[: alone.index(model.tokenizer.eod)]
        assert got[: len(alone)] == alone, f"row {row}"
        assert all(i is None for i in got[len(alone) :])
    tokens = torch.tensor(ids_of(model)[1])
    cache = inference.KeyValueCache(1, LENGTH)
    pieces = []
    for at, i in enumerate(tokens):
        cache.move_to(torch.tensor([[at]]), at + 1)
        pieces.append(model.logits(i.view(1, 1), cache)[0, 0])
    want = model.logits(tokens[None])[0]
    assert (torch.stack(pieces) - want).abs().max() < 1e-5 * want.abs().max()


def sampled(source: str, tp: int) -> list[list[int | None]]:
    model = open_model(Path(source), "fp32", tp, "cpu")
    return list(model.generate(ids_of(model), 8, Sampling(temperature=1.0, top_k=50, top_p=0.9, seed=3)))


def test_two_tensor_parallel_ranks_say_the_same(world: World, tmp_path: Path) -> None:
    path = str(checkpoint(tmp_path, "llama", pp=2, zero=3))
    first, second = world(sampled, path, 2, n=2, init=False)
    assert first == second == sampled(path, 1)


def test_the_draw_keeps_to_what_may_be_drawn() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.25, 0.15], [0.7, 0.1, 0.1, 0.1]])).repeat(500, 1)

    def drawn(sampling: Sampling) -> list[set[int]]:
        ids = draw(logits, sampling, streams(0, len(logits)))
        return [set(ids[0::2]), set(ids[1::2])]

    assert drawn(Sampling(temperature=0)) == [{1}, {0}]
    assert drawn(Sampling(temperature=1.0, top_k=2))[0] == {1, 2}
    assert drawn(Sampling(temperature=1.0, top_p=0.6)) == [{1, 2}, {0}]  # the likeliest stays, though it holds more
    assert drawn(Sampling(temperature=1.0)) == [{0, 1, 2, 3}] * 2
    for temperature in (1e-3, 1e-40, 1e-320):
        assert draw(logits[:2], Sampling(temperature=temperature), streams(0, 2)) == [1, 0]
    assert len({*draw(logits[:1].repeat(30, 1), Sampling(temperature=1.0), streams(5, 30))}) > 1


def test_a_row_draws_by_a_stream_of_its_own(source: Path) -> None:
    """Neighbours that differ, or end, leave the text of a row as it is."""
    model, sampling = open_model(source, "fp32", 1, "cpu"), Sampling(temperature=1.0, seed=3)
    found = []
    for prompts in (("ab",), ("ab", "c"), ("ab", "a longer prompt", "c")):
        found.append([step[0] for step in model.generate(ids_of(model, prompts), 8, sampling)][:8])
    shortest = min(map(len, found))
    assert found[0][:shortest] == found[1][:shortest] == found[2][:shortest]
    twins = list(model.generate(ids_of(model, ("ab", "ab")), 8, sampling))
    assert [a for a, _ in twins] != [b for _, b in twins]


def test_half_a_character_is_never_shown() -> None:
    class Model:
        tokenizer = BytesTokenizer()

    text = generate.Text(Model(), "x")  # type: ignore[arg-type]
    shown = [text.add(byte) for byte in "aé€".encode()]
    assert shown == ["a", "", "é", "", "", "€"]
    assert text.add(0xE2) == "" and text.rest() == "\N{REPLACEMENT CHARACTER}"


def test_the_command(source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [str(source), "--device", "cpu", "--tokens", "5"]
    assert generate.main([*asked, "ab"]) == 0
    one = capsys.readouterr().out
    assert one.startswith("ab")
    assert generate.main([*asked, "ab"]) == 0 and capsys.readouterr().out == one, "the same seed"
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\ncd\n"))
    assert generate.main([*asked, "--temperature", "0"]) == 0
    assert "--- 1\nab" in (both := capsys.readouterr().out) and "--- 2\ncd" in both
    assert generate.main([*asked, "--temperature", "0", "ab"]) == 0
    assert capsys.readouterr().out.strip() in both
    assert generate.main([str(source), "--device", "cpu", "ab"]) == 0, "without --tokens, as many as fit"
    assert capsys.readouterr().out.startswith("ab")


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--tokens", "0", "--top-p", "2"], "--tokens=0: use at least 1\n--top-p=2.0: use above 0", 2),
        (["--tokens", "39", "abc"], "3 tokens and 39 new ones are more than the 40 positions", 1),
        (["--tp", "3", "abc"], "parallel.tp=3", 2),
        (["--seed", str(2**63), "abc"], "use an integer of 64 bits", 2),
    ],
)
def test_mistakes_are_told(
    source: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str, code: int
) -> None:
    assert generate.main([str(source), "--device", "cpu", *arguments]) == code
    said = capsys.readouterr()
    assert message in said.err and not said.out
    assert generate.main([str(source.parent / "nothing"), "x"]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_too_long_is_refused_before_any_work(source: Path) -> None:
    model = open_model(source, "fp32", 1, "cpu")
    with pytest.raises(PromptTooLong):
        model.generate([[1] * 30], 11, GREEDY)


def test_evaluate_gives_the_loss_that_the_trainer_logs(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.checkpoint.test_training import train

    world(train, ["parallel=tp2", "data.document_masks=true", "trainer.steps=2"], str(tmp_path), n=2)
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    want = [line for line in logged if "validation_loss" in line][-1]
    assert evaluate.main([str(tmp_path), "--device", "cpu", "--json", str(tmp_path / "score.json")]) == 0
    got = json.loads((tmp_path / "score.json").read_text())
    assert got["loss"] == pytest.approx(want["validation_loss"], abs=2e-6)
    assert (got["tokens"], got["unigram_entropy"]) == (want["validation_tokens"], want["unigram_entropy"])
    assert 0 < got["bits_per_byte"] < got["loss"] / 0.6931
    assert f"{want['validation_loss']:.4f} nats" in capsys.readouterr().out
    cut = [str(tmp_path), "--device", "cpu", "--tp", "2", "--json", str(tmp_path / "cut.json")]
    assert evaluate.main(cut) == 0, "a model that one rank cannot hold"
    assert json.loads((tmp_path / "cut.json").read_text())["loss"] == pytest.approx(want["validation_loss"], abs=2e-6)
    assert evaluate.main([str(tmp_path), "--device", "cpu", "data.source=files", "--batches", "1"]) == 1
    assert "data.paths" in capsys.readouterr().err
    assert evaluate.main([str(tmp_path), "--device", "cpu", "data.sauce=files"]) == 1
    assert "sauce" in capsys.readouterr().err
