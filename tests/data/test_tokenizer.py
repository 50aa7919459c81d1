"""Tokenizers: exact round trips, special text is text, tiktoken equal to tokenizers."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt3d.config.schema import TokenizerConfig
from gpt3d.data.embedded import read_asset, shakespeare
from gpt3d.data.errors import DataError
from gpt3d.data.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer

KINDS = ["bytes", "shakespeare_bpe", "gpt2"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer(TokenizerConfig(kind=request.param))


def test_sizes():
    sizes = {kind: load_tokenizer(TokenizerConfig(kind=kind)) for kind in KINDS}
    assert {kind: (t.vocab_size, t.eod) for kind, t in sizes.items()} == {
        "bytes": (257, 256),
        "shakespeare_bpe": (2048, 2047),
        "gpt2": (50257, 50256),
    }
    assert sizes["shakespeare_bpe"].engine == sizes["gpt2"].engine == "tiktoken"
    assert sizes["gpt2"].encode("Hello world! \u20ac").tolist() == [15496, 995, 0, 10432]


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == 0 or ids.max() < tokenizer.eod


def test_text_that_looks_like_a_special_token_is_text(tokenizer: Tokenizer):
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eod not in ids.tolist() and len(ids) > 3
    assert tokenizer.decode(ids) == "a<|endoftext|>b"
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"


def test_tiktoken_equals_tokenizers_on_every_play():
    import tokenizers

    reference = tokenizers.Tokenizer.from_str(read_asset("shakespeare_bpe.json").decode())
    fast = load_tokenizer(TokenizerConfig(kind="shakespeare_bpe"))
    for play in shakespeare()[::6]:
        assert reference.encode(play).ids == fast.encode(play).tolist()


def test_other_pretokenization_falls_back_to_tokenizers():
    content = json.loads(read_asset("shakespeare_bpe.json"))
    content["pre_tokenizer"]["use_regex"] = False
    slow = JsonTokenizer(json.dumps(content), "whole_text")
    assert slow.engine == "tokenizers"
    assert slow.decode(slow.encode("of the <|endoftext|>")) == "of the <|endoftext|>"
    assert slow.eod not in slow.encode("of the <|endoftext|>").tolist()


def test_split_patterns_of_newer_models_run_on_tiktoken():
    """Llama 3 and Qwen cut words by a regular expression of their own before the byte level."""
    pattern = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    content = json.loads(read_asset("shakespeare_bpe.json"))
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    tokenizer = JsonTokenizer(json.dumps(content), "llama_like")
    assert tokenizer.engine == "tiktoken"
    text = shakespeare()[0][:5000]
    assert tokenizer.encode(text).tolist() == tokenizer._reference.encode(text, add_special_tokens=False).ids


def test_merges_out_of_id_order_stay_with_tokenizers():
    """tiktoken merges by id: with ids in another order than the merges it would give other ids."""
    content = json.loads(read_asset("shakespeare_bpe.json"))
    content["model"]["merges"].reverse()
    assert JsonTokenizer(json.dumps(content), "reversed").engine == "tokenizers"


def test_a_folder_as_hugging_face_saves_it(tmp_path: Path):
    content = json.loads(read_asset("shakespeare_bpe.json"))
    content["added_tokens"][0]["content"] = "</s>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"no token '<\|endoftext\|>'.*tokenizer\.eod_token.*</s>"):
        load_tokenizer(TokenizerConfig(kind="hf", path=str(tmp_path)))
    assert load_tokenizer(TokenizerConfig(kind="hf", path=str(tmp_path), eod_token="</s>")).eod == 2047
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(TokenizerConfig(kind="hf", path=str(path))).eod == 2047
    with pytest.raises(DataError, match=r"needs tokenizer\.path"):
        load_tokenizer(TokenizerConfig(kind="hf"))


def test_added_tokens_count_in_the_vocabulary_size():
    """huggingface/nanotron#313: the size without added tokens is too small for the ids that occur."""
    content = json.loads(read_asset("shakespeare_bpe.json"))
    content["added_tokens"].append(dict(content["added_tokens"][0], id=2048, content="<|later|>"))
    assert JsonTokenizer(json.dumps(content), "more").vocab_size == 2049


def test_errors(tokenizer: Tokenizer):
    with pytest.raises(DataError, match=r"lone surrogate.*character 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(DataError, match="cannot decode"):
        tokenizer.decode(np.array([tokenizer.vocab_size]))
    with pytest.raises(DataError, match="is not a tokenizer"):
        JsonTokenizer("{}", "empty")
    with pytest.raises(DataError, match="no token '</s>' to end a document"):
        JsonTokenizer(read_asset("shakespeare_bpe.json").decode(), "x", eod_token="</s>")
