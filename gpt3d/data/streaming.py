"""Training from a Hugging Face stream without preparing it, exactly resumable and independent of the DP degree.

The dataset's shards are dealt out to V virtual streams, V depending on the dataset alone. Each stream is text in order,
tokenized and cut into samples; sample k of the run is sample k // V of stream k % V. DP rank r takes the samples
k = r mod DP, so with DP dividing V it reads only its own streams; otherwise it shares some with other ranks.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpt3d.config.schema import DataConfig, SourceConfig
from gpt3d.data import hub
from gpt3d.data.cache import build_once, cache_root, recipe_key
from gpt3d.data.errors import DataError
from gpt3d.data.policy import Place, Policy
from gpt3d.data.split import document_hash
from gpt3d.data.token_file import TokenFile, TokenFileWriter, token_dtype
from gpt3d.data.tokenizer import Tokenizer
from gpt3d.data.worker import encode_long

log = logging.getLogger(__name__)


class StreamDataset:
    """Samples of this rank, in increasing order of k. A resume without `state_dict` reads from the beginning again."""

    interleaved = True  # this rank's samples are k = r mod DP, not a contiguous part of the batch

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, dp_rank: int, dp_size: int) -> None:
        rows = hub.load(data.hf, data.text_column)
        self.count = min(data.hf.streams, rows.num_shards)
        self.seq_len, self.mask_eod = data.seq_len, tokenizer.eod if data.document_masks else None
        step = math.gcd(self.count, dp_size)
        own = range(dp_rank % step, self.count, step)
        self.streams = {v: VirtualStream(rows, v, self.count, data, tokenizer) for v in own}
        self._shared = dp_size // step
        self.identity = recipe_key(
            {"hf": hub.identity(data.hf), "streams": self.count, "split": data.validation_fraction}
        )
        self.held_out = _held_out(data, tokenizer) if data.validation_fraction > 0 else None

    def samples(self, index: np.ndarray) -> np.ndarray:
        """Tokens [k, seq_len + 1] int64."""
        rows = []
        for k in np.asarray(index).tolist():
            if k % self.count not in self.streams:
                raise DataError(
                    f"sample {k} is in stream {k % self.count}, which belongs to another data-parallel rank"
                )
            rows.append(self.streams[k % self.count].sample(k // self.count))
        return np.stack(rows)

    def state_dict(self) -> dict[str, Any]:
        """State of this rank's streams by number, as JSON can hold it. To save, join those of all DP ranks."""
        return {str(v): stream.state_dict() for v, stream in self.streams.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved state; `state` has the streams of all DP ranks."""
        for v, stream in self.streams.items():
            if str(v) not in state:
                raise DataError(f"the saved data state lacks stream {v} of {self.count}: it was made by other settings")
            stream.load_state_dict(state[str(v)])

    def describe(self) -> str:
        """What is read, and how often."""
        every = (
            "" if self._shared == 1 else f", each read by {self._shared} DP ranks: {self.count} shards do not divide"
        )
        held_out = f"{self.held_out.tokens:,} tokens" if self.held_out else "nothing"
        return f"stream in {self.count} virtual streams{every}; held out: {held_out}"


class VirtualStream:
    """One stream: the text of its shards, again and again, as samples 0, 1, 2, ..."""

    def __init__(self, rows: Any, number: int, count: int, data: DataConfig, tokenizer: Tokenizer) -> None:
        self._rows, self._number, self._count = rows, number, count
        self._data, self._tokenizer = data, tokenizer
        self._next, self._epoch, self._carry = 0, 0, np.zeros(0, np.int64)
        self._open(None)

    def sample(self, j: int) -> np.ndarray:
        """Tokens [seq_len + 1] of sample j, which must not lie before the last one."""
        if j < self._next:
            raise DataError(f"stream {self._number} is at sample {self._next}, it cannot go back to {j}")
        if j - self._next > 1000:
            log.info("stream %d: reading %d samples again to get to where the run was", self._number, j - self._next)
        length = self._data.seq_len
        while True:
            while len(self._carry) < length + 1:
                self._carry = np.concatenate([self._carry, *self._document()])
            window, self._carry = self._carry[: length + 1], self._carry[length:]
            self._next += 1
            if self._next > j:
                return window

    def state_dict(self) -> dict[str, Any]:
        return {
            "next": self._next,
            "epoch": self._epoch,
            "carry": self._carry.tolist(),
            "rows": self._shard.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next, self._epoch = state["next"], state["epoch"]
        self._carry = np.array(state["carry"], np.int64)
        self._open(state["rows"])

    def _open(self, state: Any) -> None:
        # Always a fresh object: a dataset that was told a state would begin every epoch there.
        self._shard = self._rows.shard(self._count, self._number)
        if state is not None:
            self._shard.load_state_dict(state)
        self._documents = _texts(self._shard, self._data, self._data.validation_fraction, held_out=False)

    def _document(self) -> list[np.ndarray]:
        """Ids of the next document with its end."""
        text = next(self._documents, None)
        if text is None:
            self._epoch += 1
            self._open(None)
            text = next(self._documents, None)
            if text is None:
                raise DataError(f"{hub.describe(self._data.hf)}: stream {self._number} of {self._count} has no text")
        return [*encode_long(self._tokenizer, text), np.array([self._tokenizer.eod])]


def open_stream(data: DataConfig, tokenizer: Tokenizer, dp_rank: int, dp_size: int) -> StreamDataset:
    """The stream that `data.hf.streaming=true` asks for."""
    for key, value, default in (
        ("packing", data.packing, "concat"),
        ("deduplicate", data.deduplicate, False),
        ("shuffle_documents", data.shuffle_documents, False),
    ):
        if value != default:
            raise DataError(f"data.{key}={value} needs a prepared corpus: set data.hf.streaming=false")
    return StreamDataset(data, tokenizer, dp_rank, dp_size)


def _texts(rows: Any, config: SourceConfig, fraction: float, held_out: bool) -> Iterator[str]:
    """Documents of a stream that are held out, or those that are not: by the hash of the text."""
    policy, threshold = Policy(config.on_error, config.text_column), int(fraction * 2**64)
    for number, row in enumerate(rows, start=1):
        place = Place(hub.describe(config.hf), number, unit="row of the shard")
        text = policy.from_value(row[config.text_column], place)
        if text is not None and (document_hash(text) < threshold) == held_out:
            yield text


def _held_out(data: DataConfig, tokenizer: Tokenizer) -> TokenFile:
    """The first `data.hf.validation_tokens` tokens of held-out documents, collected once and cached."""
    recipe = {
        "hf": hub.identity(data.hf),
        "column": data.text_column,
        "fraction": data.validation_fraction,
        "tokenizer": tokenizer.fingerprint,
    }
    folder = cache_root(data.cache_dir) / f"stream-validation-{recipe_key(json.loads(json.dumps(recipe)))}"

    def build(target: Any) -> dict[str, Any]:
        writer = TokenFileWriter(target / "validation", token_dtype(tokenizer.vocab_size))
        for text in _texts(hub.load(data.hf, data.text_column), data, data.validation_fraction, held_out=True):
            writer.add(np.concatenate([*encode_long(tokenizer, text), [tokenizer.eod]]))
            if writer.tokens >= data.hf.validation_tokens:
                break
        if writer.tokens < 2:
            raise DataError(
                f"data.validation_fraction={data.validation_fraction} of {hub.describe(data.hf)} is no document: "
                "raise it, or set it to 0"
            )
        return {"tokens": writer.tokens, "checksum": writer.close()}

    build_once(folder, build)
    return TokenFile(folder / "validation")
