"""The data pipeline against Hugging Face `datasets`, in CPU seconds, best of three: `python benchmarks/data.py`.

1. Loader: samples of 2048 tokens in random order, from our token file and from an Arrow dataset read row by row.
2. Opening a file of 100 million tokens; sample order of a corpus of 10^6 and of 10^12 samples.
3. Preparation with GPT-2's vocabulary: ours, and `datasets.map` with `tokenizers`, on the same documents.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import datasets
import numpy as np

from gpt3d.config.schema import DataConfig, ModelConfig, RunConfig, TokenizerConfig
from gpt3d.data import TokenDataset, prepare
from gpt3d.data.order import SampleIndex
from gpt3d.data.token_file import TokenFile, TokenFileWriter
from gpt3d.data.vocabulary import gpt2_json

SEQ_LEN = 2048


def cpu_seconds(function: Callable[[], object]) -> float:
    """User and system time of the call, child processes included."""

    def used() -> float:
        usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    begin = used()
    function()
    return used() - begin


def best_of(times: int, *functions: Callable[[], object]) -> list[float]:
    """Smallest CPU seconds of each function, called in turn so that a busy machine disturbs all alike."""
    measured = [[cpu_seconds(function) for function in functions] for _ in range(times)]
    return [min(column) for column in zip(*measured, strict=True)]


def loader(folder: Path, tokens: int = 100_000_000, reads: int = 20_000) -> None:
    rng = np.random.default_rng(0)
    writer = TokenFileWriter(folder / "t", np.dtype("<u2"))
    for _ in range(100):
        writer.add(rng.integers(0, 50_000, tokens // 100))
    writer.close()
    begin = time.perf_counter()
    file = TokenFile(folder / "t")
    dataset = TokenDataset(file, SEQ_LEN, seed=0)
    dataset.sample(0)
    print(f"open {tokens:,} tokens and read the first sample: {1000 * (time.perf_counter() - begin):.2f} ms")

    rows = min(10_000, tokens // SEQ_LEN)
    columns = {"input_ids": list(file.read(0, rows * SEQ_LEN).astype(np.int32).reshape(rows, SEQ_LEN))}
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(folder / "arrow"))
    arrow = datasets.load_from_disk(str(folder / "arrow")).with_format("numpy")
    order = rng.permutation(rows)[: reads // 10].tolist()

    def ours() -> None:
        for k in range(0, reads, 64):
            dataset.samples(np.arange(k, k + 64))

    def theirs() -> None:
        for i in order:
            arrow[i]["input_ids"]

    fastest = best_of(3, ours, theirs)
    per_second = (reads / fastest[0], len(order) / fastest[1])
    print(
        f"loader, sequences of {SEQ_LEN} a CPU second: ours {per_second[0]:,.0f}, Arrow rows {per_second[1]:,.0f}; ",
        end="",
    )
    print(f"{per_second[0] / per_second[1]:.1f} times")


def order_start(samples: int) -> None:
    begin = time.perf_counter()
    SampleIndex(samples * SEQ_LEN + 1, SEQ_LEN, seed=0).starts(np.arange(samples - 64, samples))
    print(f"sample order of {samples:.0e} samples, built and read: {1000 * (time.perf_counter() - begin):.2f} ms")


def preparation(folder: Path, megabytes: int = 20) -> None:
    documents, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text = path.read_bytes().decode("utf-8", "replace")
        documents.append(text)
        size += len(text.encode())
        if size > megabytes * 1_000_000:
            break
    source = folder / "corpus.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    config = RunConfig(
        model=ModelConfig(vocab_size=50_257),
        data=DataConfig(
            source="files", paths=[str(source)], cache_dir=str(folder / "cache"), workers=1, seq_len=SEQ_LEN
        ),
        tokenizer=TokenizerConfig(kind="gpt2"),
    )
    import tokenizers

    reference = tokenizers.Tokenizer.from_str(gpt2_json())
    rows = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(folder / "hf"))

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [encoding.ids for encoding in reference.encode_batch_fast(batch["text"])]}

    def prepare_anew() -> None:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        prepare(config)

    def map_anew() -> None:
        rows.map(encode, batched=True, remove_columns=["text"], load_from_cache_file=False)

    ours, theirs = best_of(3, prepare_anew, map_anew)
    mb = size / 1e6
    print(f"preparation, MB a CPU second ({mb:.1f} MB of code): ours {mb / ours:.2f}, ", end="")
    print(f"datasets.map + tokenizers {mb / theirs:.2f}; {theirs / ours:.1f} times")


def main() -> None:
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        loader(Path(folder))
        order_start(10**6)
        order_start(10**12)
        preparation(Path(folder))


if __name__ == "__main__":
    main()
