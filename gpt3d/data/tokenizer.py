"""Text to token ids and back. Text that looks like a special token is text: only the pipeline itself writes `eod`."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpt3d.config.schema import TokenizerConfig
from gpt3d.data.embedded import read_asset
from gpt3d.data.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
# GPT-2's pre-tokenization, which ByteLevel(use_regex=True) of `tokenizers` applies.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


class Tokenizer(ABC):
    """`vocab_size` is the largest id that can occur + 1, added tokens included; `eod` ends each document."""

    name: str
    vocab_size: int
    eod: int
    fingerprint: str

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Ids [n] of `text`, without `eod`."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`; bytes that are no UTF-8 (a character cut in two) become U+FFFD."""

    @abstractmethod
    def to_json(self) -> str:
        """The `tokenizer.json` of the `tokenizers` library that gives the same ids."""

    def _check_ids(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        array = np.asarray(ids, np.int64)
        if array.size and (array.min() < 0 or array.max() >= self.vocab_size):
            raise DataError(
                f"tokenizer {self.name} has ids 0 to {self.vocab_size - 1:,}, cannot decode {array.min():,} to "
                f"{array.max():,}"
            )
        return array.tolist()


class BytesTokenizer(Tokenizer):
    """One id a UTF-8 byte, and 256 for the end of a document."""

    name = "bytes"
    vocab_size = 257
    eod = 256
    fingerprint = "bytes-1"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        parts = [bytes([i]) if i < 256 else END_OF_DOCUMENT.encode() for i in self._check_ids(ids)]
        return b"".join(parts).decode("utf-8", "replace")

    def to_json(self) -> str:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokenizer = Tokenizer(models.BPE(vocab=_byte_of_symbol(), merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True)])
        return tokenizer.to_str()


class BpeTokenizer(Tokenizer):
    """A `tokenizer.json`. Where tiktoken gives the same ids (checked on load) it does the work, 5 to 8 times faster."""

    def __init__(self, content: str, name: str, eod_token: str = END_OF_DOCUMENT) -> None:
        import tokenizers

        self.name, self._content = name, content
        try:
            self._reference = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{name} is not a tokenizer.json of the `tokenizers` library: {error}") from error
        self._reference.encode_special_tokens = True
        self._reference.no_truncation()
        self._reference.no_padding()
        vocabulary = self._reference.get_vocab(with_added_tokens=True)
        if eod_token not in vocabulary:
            raise DataError(f"{name} has no token {eod_token!r} to end a document; its added tokens: {self._added()}")
        self.eod = vocabulary[eod_token]
        self.vocab_size = max(vocabulary.values()) + 1
        self.fingerprint = hashlib.sha256(f"{self.eod}\n{content}".encode()).hexdigest()[:16]
        self._fast = _as_tiktoken(self._reference, self._added())

    @property
    def engine(self) -> str:
        """The library that encodes: `tiktoken` or `tokenizers`."""
        return "tiktoken" if self._fast is not None else "tokenizers"

    def encode(self, text: str) -> np.ndarray:
        _utf8(text)
        if self._fast is not None:
            return self._fast.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        return np.asarray(self._reference.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        checked = self._check_ids(ids)
        if self._fast is not None:
            return self._fast.decode(checked, errors="replace")
        return self._reference.decode(checked, skip_special_tokens=False)

    def to_json(self) -> str:
        return self._content

    def _added(self) -> list[str]:
        return [token.content for token in self._reference.get_added_tokens_decoder().values()]


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `tokenizer=` names."""
    if config.kind == "bytes":
        return BytesTokenizer()
    if config.kind == "shakespeare_bpe":
        return BpeTokenizer(read_asset("shakespeare_bpe.json").decode("utf-8"), name="shakespeare_bpe")
    raise DataError(f"tokenizer.kind={config.kind} is unknown; choose bytes or shakespeare_bpe")


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"text has a lone surrogate {text[error.start]!r} at character {error.start}: no UTF-8"
        ) from error


def _byte_of_symbol() -> dict[str, int]:
    """GPT-2 writes each byte as one printable character: itself where printable, else the next one from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


# Contractions, digits, several scripts, white space of all sorts, a special token's text, long runs.
_PROBE = (
    "Nay, answer me: stand, and unfold yourself.\n\n\tWho's there?  I'll  've  ''tis\r\n",
    " 1234567 3.14e-10 x==y; foo_bar(baz)[0]",
    f"{END_OF_DOCUMENT} <s> \x00\x7f\ufeff na\u00efve \u6f22\u5b57\u304b\u306a \u0645\u0631\u062d\u0628\u0627",
    "\U0001f600\u200d\U0001f525 \u00a0\u2003 e\u0301",
    " " * 40 + "a" * 200 + "\n" * 7 + "=" * 50 + " \n \n  Z'LL it'S",
)


def _as_tiktoken(reference: Any, added: list[str]) -> Any | None:
    """The same tokenizer for tiktoken, or None where it does not give the same ids on the probe texts."""
    import tiktoken

    vocabulary, symbols = reference.get_vocab(with_added_tokens=True), _byte_of_symbol()
    special = {token: vocabulary[token] for token in added}
    try:
        ranks = {bytes(symbols[c] for c in token): i for token, i in vocabulary.items() if token not in special}
        encoding = tiktoken.Encoding("gpt3d", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)
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
