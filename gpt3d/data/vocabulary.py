"""Byte-level BPE vocabularies: GPT-2's from its merges, one trained on a corpus, and any of them for tiktoken."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from gpt3d.data.embedded import gpt2_merges

END_OF_DOCUMENT = "<|endoftext|>"
# GPT-2's pre-tokenization, which ByteLevel(use_regex=True) of `tokenizers` applies.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# Contractions, digits, several scripts, white space of all sorts, a special token's text, long runs.
_PROBE = (
    "Nay, answer me: stand, and unfold yourself.\n\n\tWho's there?  I'll  've  ''tis\r\n",
    " 1234567 3.14e-10 x==y; foo_bar(baz)[0]",
    f"{END_OF_DOCUMENT} <s> \x00\x7f\ufeff na\u00efve \u6f22\u5b57\u304b\u306a \u0645\u0631\u062d\u0628\u0627",
    "\U0001f600\u200d\U0001f525 \u00a0\u2003 e\u0301",
    " " * 40 + "a" * 200 + "\n" * 7 + "=" * 50 + " \n \n  Z'LL it'S",
)


def byte_symbols() -> list[str]:
    """GPT-2's printable character for each of its first 256 ids: printable bytes first, the others from U+0100 on."""
    return list(byte_of_symbol())


def gpt2_json() -> str:
    """GPT-2's tokenizer.json: 256 bytes, 50,000 merges in order, the end of text: 50,257 ids."""
    merges = [tuple(merge.split(" ")) for merge in gpt2_merges()]
    tokens = byte_symbols() + [left + right for left, right in merges]
    return _byte_level_json({token: i for i, token in enumerate(tokens)}, merges, END_OF_DOCUMENT)


def trained_json(texts: Iterable[str], vocab_size: int) -> str:
    """A byte-level BPE of `vocab_size` ids, the end of text included, trained on `texts`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=byte_symbols(), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return _byte_level_json(model["vocab"], [tuple(merge) for merge in model["merges"]], END_OF_DOCUMENT)


def _byte_level_json(vocabulary: dict[str, int], merges: list[tuple[str, ...]], special: str) -> str:
    """A tokenizer.json with GPT-2's pre-tokenization, `special` as its only added token."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [{"id": len(vocabulary), "content": special, "special": True} | flags],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [list(merge) for merge in merges]},
    }
    return json.dumps(content, ensure_ascii=False)


def as_tiktoken(reference: Any, content: dict[str, Any], special: dict[str, int]) -> Any | None:
    """The same tokenizer for tiktoken, or None where it is of another kind or gives other ids on the probe texts."""
    import tiktoken

    pattern = _split_pattern(content)
    if pattern is None or content["model"].get("type") != "BPE" or not _ids_in_merge_order(content["model"]):
        return None
    symbols = byte_of_symbol()
    try:
        vocabulary = content["model"]["vocab"].items()
        ranks = {bytes(map(symbols.__getitem__, token)): i for token, i in vocabulary if token not in special}
        encoding = tiktoken.Encoding("gpt3d", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        for text in _PROBE:
            fast = encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=()).tolist()
            if fast != reference.encode(text, add_special_tokens=False).ids:
                return None
    except (
        BaseException
    ) as error:  # KeyError: no byte-level vocabulary; tiktoken's Rust core panics with a BaseException
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return None
    return encoding


def _split_pattern(content: dict[str, Any]) -> str | None:
    """The regular expression that cuts text into words, if bytes are all that follows."""
    if content.get("normalizer") is not None:
        return None
    step = content.get("pre_tokenizer") or {}
    if step.get("type") == "ByteLevel" and step.get("use_regex", True) and not step.get("add_prefix_space"):
        return GPT2_PATTERN
    steps = step.get("pretokenizers", []) if step.get("type") == "Sequence" else []
    match steps:
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
        ]:
            return pattern
    return None


def _ids_in_merge_order(model: dict[str, Any]) -> bool:
    """tiktoken merges by id, `tokenizers` by the list of merges: only with ids in that order are they one algorithm."""
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    ids = [model["vocab"].get(left + right, -1) for left, right in pairs]
    return all(a <= b for a, b in pairwise(ids))


def byte_of_symbol() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
