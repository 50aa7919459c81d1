"""Batches: the same global batches in every layout, exact resume, nothing lost in validation."""

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt3d.data import IGNORE, Batches, DataError, SyntheticDataset, TokenDataset, ValidationSet, validation_batches
from gpt3d.data.loader import MicroBatch
from gpt3d.data.token_file import TokenFile, TokenFileWriter

SEQ_LEN = 8


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    writer = TokenFileWriter(tmp_path / "t", np.dtype("<u2"))
    writer.add(np.arange(1003))
    writer.close()
    return TokenFile(tmp_path / "t")


@pytest.fixture
def dataset(file: TokenFile) -> TokenDataset:
    return TokenDataset(file, SEQ_LEN, seed=1)


def global_rows(dataset: TokenDataset, batch: int, micro: int, dp: int, steps: int, start: int = 0) -> list[list[int]]:
    """Token rows of `steps` steps in the order (step, DP rank, microbatch, row)."""
    ranks = [Batches(dataset, batch, micro, rank, dp, start) for rank in range(dp)]
    rows: list[list[int]] = []
    for _ in range(steps):
        for rank in ranks:
            for micro_batch in next(rank):
                rows += micro_batch["tokens"].tolist()
    return rows


@pytest.mark.parametrize(("dp", "micro"), [(1, 1), (1, 12), (2, 1), (2, 3), (3, 2), (4, 1), (4, 3), (6, 2), (12, 1)])
def test_every_layout_sees_the_same_global_batches(dataset: TokenDataset, dp: int, micro: int):
    assert global_rows(dataset, 12, micro, dp, steps=12) == dataset.samples(np.arange(144))[:, :-1].tolist()


def test_labels_are_the_next_tokens_and_index_is_global(dataset: TokenDataset):
    batch = next(Batches(dataset, 12, 2, dp_rank=1, dp_size=3, start=24))
    assert [micro["index"] for micro in batch] == [28, 30]
    for micro in batch:
        assert micro["tokens"].shape == micro["labels"].shape == (2, SEQ_LEN)
        assert micro["tokens"].dtype == micro["labels"].dtype == torch.int64
        assert micro["tokens"].is_contiguous() and micro["labels"].is_contiguous()
        assert torch.equal(micro["tokens"][:, 1:], micro["labels"][:, :-1])
        last = dataset.samples(np.arange(micro["index"], micro["index"] + 2))[:, -1]
        assert micro["labels"][:, -1].tolist() == last.tolist()


def test_two_resumes_with_other_dp_and_batch_are_exact(dataset: TokenDataset):
    """huggingface/datasets#8308: only the second resume was wrong. 480 samples are almost four epochs here."""
    straight = global_rows(dataset, 12, 1, 1, steps=60)
    parts = global_rows(dataset, 12, 2, 2, steps=10)
    parts += global_rows(dataset, 24, 2, 4, steps=10, start=120)
    parts += global_rows(dataset, 60, 5, 3, steps=6, start=360)
    assert parts == straight


def test_state_is_consumed_samples(dataset: TokenDataset):
    batches = Batches(dataset, 12, 2, 0, 2, start=36)
    assert batches.consumed_samples == 36
    next(batches)
    assert batches.consumed_samples == 48  # what was handed out, however far the thread is ahead
    time.sleep(0.05)
    assert batches.consumed_samples == 48
    assert batches.wait_seconds >= 0


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_validation_counts_each_label_once(file: TokenFile, dp: int):
    validation = ValidationSet(file, SEQ_LEN)
    labels: list[int] = []
    steps = set()
    for rank in range(dp):
        batches = list(validation_batches(validation, 4, 1, rank, dp))
        steps.add((len(batches), len(batches[0])))
        labels += [int(x) for b in batches for m in b for x in m["labels"].flatten() if x != IGNORE]
    assert steps == {(32, 4 // dp)}, "every rank takes part in every microbatch"
    assert sorted(labels) == list(range(1, 1003))


def test_validation_is_the_same_on_every_layout(file: TokenFile):
    def rows(micro: int, dp: int) -> list[list[int]]:
        ranks = [validation_batches(ValidationSet(file, SEQ_LEN), 8, micro, rank, dp, limit=3) for rank in range(dp)]
        return [row for step in zip(*ranks, strict=True) for rank in step for m in rank for row in m["labels"].tolist()]

    assert rows(1, 1) == rows(2, 2) == rows(2, 4) == rows(8, 1)
    assert len(rows(1, 1)) == 24


def test_synthetic_is_a_function_of_seed_and_index():
    data = SyntheticDataset(vocab_size=100, seq_len=16, seed=3)
    block = data.samples(np.arange(50))
    assert block[17].tolist() == data.samples(np.array([17]))[0].tolist()
    assert block.min() >= 0 and block.max() < 100 and len(np.unique(block)) == 100
    assert not np.array_equal(block, SyntheticDataset(100, 16, seed=4).samples(np.arange(50)))


def test_a_corpus_shorter_than_a_sequence_is_refused(file: TokenFile):
    """karpathy/nanochat#371: too little data made the loader spin for ever."""
    assert TokenDataset(file, 1002, seed=0).index.samples_per_epoch == 1
    with pytest.raises(DataError, match=r"1,003 tokens.*data.seq_len=1003 needs 1,004.*data.seq_len=1002 or less"):
        TokenDataset(file, 1003, seed=0)


def test_ring_wraps_in_later_epochs(file: TokenFile):
    """Windows of later epochs may pass the end: they go on at the beginning, in order."""
    data = TokenDataset(file, SEQ_LEN, seed=1)
    rows = data.samples(np.arange(125, 500))
    wrapped = rows[(np.diff(rows) < 0).any(axis=1)]
    assert len(wrapped)
    assert all(((np.diff(row) % 1003) == 1).all() for row in rows)


@pytest.mark.parametrize(("batch", "micro", "rank", "dp"), [(10, 3, 0, 1), (8, 2, 0, 3), (8, 1, 2, 2), (8, 1, -1, 2)])
def test_bad_sizes_are_refused(dataset: TokenDataset, batch: int, micro: int, rank: int, dp: int):
    """huggingface/datasets#8438: a rank outside the range got all rows without an error."""
    with pytest.raises(DataError):
        Batches(dataset, batch, micro, rank, dp)


def test_an_error_in_the_thread_reaches_the_caller():
    class Broken:
        seq_len, mask_eod, interleaved = SEQ_LEN, None, False

        def samples(self, index: np.ndarray) -> np.ndarray:
            if index[0] >= 2:
                raise DataError("disk gone")
            return np.zeros((len(index), SEQ_LEN + 1), np.int64)

    batches = Batches(Broken(), 2, 2, 0, 1)
    next(batches)
    with pytest.raises(DataError, match="disk gone"):
        next(batches)
    with pytest.raises(DataError, match="closed"):
        next(batches)


def test_dropping_the_batches_ends_the_thread(dataset: TokenDataset):
    def running() -> int:
        return sum(thread.name == "gpt3d-data" for thread in threading.enumerate())

    gc.collect()
    before = running()
    batches = Batches(dataset, 4, 1, 0, 1)
    next(batches)
    assert running() == before + 1
    del batches
    gc.collect()
    assert running() == before


def test_microbatch_is_a_plain_dict(dataset: TokenDataset):
    micro: MicroBatch = next(Batches(dataset, 4, 2, 0, 1))[0]
    assert set(micro) == {"tokens", "labels", "index"}
