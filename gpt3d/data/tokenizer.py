"""Text to token ids and back. Text that looks like a special token is text: only the pipeline itself writes `eod`."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt3d.config.schema import TokenizerConfig
from gpt3d.data.embedded import read_asset
from gpt3d.data.errors import DataError
from gpt3d.data.vocabulary import END_OF_DOCUMENT, as_tiktoken, gpt2_json


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

    def _check_ids(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        array = np.asarray(ids, np.int64)
        if array.size and (array.min() < 0 or array.max() >= self.vocab_size):
            raise DataError(
                f"tokenizer {self.name} has ids 0 to {self.vocab_size - 1:,}, cannot decode {array.min():,} to "
                f"{array.max():,}"
            )
        return array


class BytesTokenizer(Tokenizer):
    """One id a UTF-8 byte, and 256 for the end of a document."""

    name = "bytes"
    vocab_size = 257
    eod = 256
    fingerprint = "bytes-1"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        array = self._check_ids(ids)
        documents = np.split(array, np.flatnonzero(array == self.eod))
        texts = [document[document != self.eod].astype(np.uint8).tobytes() for document in documents]
        return END_OF_DOCUMENT.encode().join(texts).decode("utf-8", "replace")


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json`. Where tiktoken gives the same ids (checked on load) it does the work, 5 to 8 times faster."""

    def __init__(self, content: str, name: str, eod_token: str | None = None) -> None:
        import tokenizers

        self.name, self.content = name, content
        try:
            self._reference = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{name} is not a tokenizer.json of the `tokenizers` library: {error}") from error
        self._reference.encode_special_tokens = True
        self._reference.no_truncation()
        self._reference.no_padding()
        vocabulary = self._reference.get_vocab(with_added_tokens=True)
        added = [token.content for token in self._reference.get_added_tokens_decoder().values()]
        self.eod_token = eod_token or END_OF_DOCUMENT
        if self.eod_token not in vocabulary:
            raise DataError(
                f"tokenizer {name} has no token {self.eod_token!r} to end a document; set tokenizer.eod_token to one "
                f"of its added tokens: {', '.join(added[:20]) or 'it has none'}"
            )
        self.eod = vocabulary[self.eod_token]
        self.vocab_size = max(vocabulary.values()) + 1
        self.fingerprint = hashlib.sha256(f"{self.eod}\n{content}".encode()).hexdigest()[:16]
        self._fast = as_tiktoken(self._reference, json.loads(content), {token: vocabulary[token] for token in added})

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonTokenizer, (self.content, self.name, self.eod_token)

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
        checked = self._check_ids(ids).tolist()
        if self._fast is not None:
            return self._fast.decode(checked, errors="replace")
        return self._reference.decode(checked, skip_special_tokens=False)


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `tokenizer=` names. One that is trained on the corpus: `gpt3d.data.build.open_tokenizer`."""
    if config.kind == "bytes":
        return BytesTokenizer()
    if config.kind == "shakespeare_bpe":
        return JsonTokenizer(read_asset("shakespeare_bpe.json").decode("utf-8"), name="shakespeare_bpe")
    if config.kind == "gpt2":
        return JsonTokenizer(gpt2_json(), name="gpt2")
    if config.kind == "hf":
        return _hugging_face(config)
    raise DataError(f"tokenizer.kind={config.kind} needs a corpus to be trained on")


def _hugging_face(config: TokenizerConfig) -> Tokenizer:
    """A tokenizer.json by its path, in a folder, or in a repository of the hub."""
    if config.path is None:
        raise DataError(
            "tokenizer.kind=hf needs tokenizer.path: a tokenizer.json, a folder with one, or a name on the hub"
        )
    path = Path(config.path).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    elif not path.is_file():
        path = _from_hub(config.path, "tokenizer.json", config.revision)
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"tokenizer.path={config.path}: cannot read {path}: {error}") from error
    return JsonTokenizer(content, Path(config.path).name.removesuffix(".json"), config.eod_token or _eos_token(path))


def _from_hub(name: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except Exception as error:  # the library raises many kinds
        raise DataError(
            f"tokenizer.path={name} is no file or folder here, and the hub does not give its {file}: "
            f"{type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


def _eos_token(path: Path) -> str | None:
    """The `eos_token` that tokenizer_config.json beside a tokenizer.json names, if there is one."""
    try:
        token = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError):
        return None
    return token.get("content") if isinstance(token, dict) else token


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"text has a lone surrogate {text[error.start]!r} at character {error.start}: no UTF-8"
        ) from error
