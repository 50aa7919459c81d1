"""Packing and document masks: every label once, documents whole, boundaries exact."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt3d.data import IGNORE, Batches, DataError, TokenDataset
from gpt3d.data.dataset import PADDING
from gpt3d.data.masks import document_layout
from gpt3d.data.packing import PackedDataset, best_fit, cut
from gpt3d.data.token_file import TokenFile, TokenFileWriter

EOD = 9999


def token_file(folder: Path, lengths: list[int]) -> TokenFile:
    """Documents of increasing ids, so that every token is known by its id; the last of each is EOD."""
    writer, start = TokenFileWriter(folder / "t", np.dtype("<u2")), 0
    for length in lengths:
        writer.add(np.append(np.arange(start, start + length - 1), EOD))
        start += length
    writer.close()
    return TokenFile(folder / "t")


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=40), seq_len=st.integers(1, 20))
def test_pieces_cover_each_label_once(lengths: list[int], seq_len: int):
    starts, sizes = cut(np.array(lengths), seq_len)
    labels = [label for start, size in zip(starts, sizes, strict=True) for label in range(start + 1, start + size)]
    bounds = np.cumsum([0, *lengths])
    expected = [i for a, b in pairwise(bounds) for i in range(a + 1, b)]
    assert sorted(labels) == expected
    assert all(2 <= size <= seq_len + 1 for size in sizes)


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(2, 33), min_size=1, max_size=200))
def test_best_fit_fills_rows_within_their_capacity(sizes: list[int]):
    rows = best_fit(np.array(sizes), 33)
    filled = np.bincount(rows, weights=sizes)
    assert filled.max() <= 33 and filled.min() > 0
    lower = -(-sum(sizes) // 33)
    assert lower <= len(filled) <= 11 / 9 * lower + 4, "the bound known for decreasing fits"


def test_few_rows_and_little_padding_on_long_tailed_lengths():
    sizes = np.minimum(2049, np.random.default_rng(0).lognormal(6, 1.2, 20_000).astype(int) + 2)
    filled = np.bincount(best_fit(sizes, 2049), weights=sizes)
    assert 1 - filled.mean() / 2049 < 0.001


def test_packed_rows(tmp_path: Path):
    """trl#4554: the tail of a document longer than a row was never trained on."""
    lengths = [5, 40, 2, 17, 3, 9, 1, 16]
    file = token_file(tmp_path, lengths)
    data = PackedDataset(file, "digest", 16, 0, tmp_path / "cache", EOD)
    n = data.samples_per_epoch
    for epoch in range(2):
        rows = data.samples(np.arange(epoch * n, (epoch + 1) * n))
        pairs = [(int(a), int(b)) for row in rows for a, b in pairwise(row)]
        learned = sorted((a, b) for a, b in pairs if a not in (EOD, PADDING) and b != PADDING)
        bounds, tokens = np.cumsum([0, *lengths]), file.read(0, file.tokens).tolist()
        expected = [(tokens[i], tokens[i + 1]) for a, b in pairwise(bounds) for i in range(a, b - 1)]
        assert learned == sorted(expected), "each label of each document exactly once, end of document included"
    for row in data.samples(np.arange(n)):
        assert (np.diff((row == PADDING).astype(int)) >= 0).all(), "padding only at the end"
    assert not np.array_equal(data.samples(np.arange(n)), data.samples(np.arange(n, 2 * n)))
    assert f"{n} packed samples" in data.describe()


def test_packing_needs_documents_that_end(tmp_path: Path):
    with pytest.raises(DataError, match=r"best_fit needs documents that end with.*data\.packing=concat"):
        PackedDataset(token_file(tmp_path, [5, 5]), "digest", 4, 0, tmp_path / "cache", eod=3)


def test_document_layout():
    tokens = torch.tensor([[1, 9, 2, 3, 9, 4], [9, 9, 5, 6, 7, 8]])
    positions, cu_seqlens, longest = document_layout(tokens, eod=9)
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 2, 3]]
    assert cu_seqlens.tolist() == [0, 2, 5, 6, 7, 8, 12]
    assert (cu_seqlens.dtype, longest) == (torch.int32, 4)


def test_masks_in_the_loader(tmp_path: Path):
    """The label after an end of document is ignored, the end of document itself is learned (transformers#4122)."""
    file = token_file(tmp_path, [4, 7, 30, 2, 2, 60])
    plain = next(Batches(TokenDataset(file, 8, seed=0), 12, 4, 0, 1))
    masked = next(Batches(TokenDataset(file, 8, seed=0, mask_eod=EOD), 12, 4, 0, 1))
    assert "cu_seqlens" not in plain[0]
    for a, b in zip(plain, masked, strict=True):
        assert torch.equal(a["tokens"], b["tokens"])
        after = a["tokens"] == EOD
        assert torch.equal(b["labels"], a["labels"].masked_fill(after, IGNORE))
        assert (b["position_ids"][:, 1:][after[:, :-1]] == 0).all()
        assert b["cu_seqlens"][-1] == a["tokens"].numel()
    assert any((m["labels"] == EOD).any() for m in masked)


def test_masks_equal_running_each_document_alone(tmp_path: Path):
    """A small attention over the packed row, document by document as `cu_seqlens` says, against the documents alone."""
    torch.manual_seed(0)
    embedding, place = torch.randn(10_000, 8), torch.randn(64, 8)

    def attend(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = embedding[tokens] + place[positions]
        return torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)[0]

    file = token_file(tmp_path, [4, 7, 6, 2, 5])
    batch = next(Batches(PackedDataset(file, "d", 12, 0, tmp_path / "cache", EOD), 2, 2, 0, 1))
    tokens, positions = batch[0]["tokens"].flatten(), batch[0]["position_ids"].flatten()
    bounds = batch[0]["cu_seqlens"].tolist()
    packed = [attend(tokens[a:b], positions[a:b]) for a, b in pairwise(bounds)]
    alone = {}
    start = 0
    for length in file.document_lengths().tolist():
        ids = torch.from_numpy(file.read(start, length).astype(np.int64))
        alone[int(ids[0])] = attend(ids, torch.arange(length))
        start += length
    matched = [out for out, a in zip(packed, bounds, strict=False) if int(tokens[a]) in alone and int(tokens[a]) != 0]
    assert len(matched) >= 3
    for out, a in zip(packed, bounds, strict=False):
        if (first := int(tokens[a])) in alone and first != 0:
            assert torch.equal(out, alone[first][: len(out)])
