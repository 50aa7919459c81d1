"""The order: a bijection each epoch, well mixed, pinned across versions, and constant in memory."""

import time
import tracemalloc

import numpy as np
import pytest

from gpt3d.data.order import Permutation, SampleIndex, derive_keys


@pytest.mark.parametrize("n", [*range(1, 130), 4095, 4096, 4097, 65535, 65537])
def test_permutation_is_a_bijection(n: int):
    assert np.array_equal(np.sort(Permutation(n, 0, 1)(np.arange(n))), np.arange(n))


def test_permutation_is_well_mixed():
    """Pairs (i, p(i)) fill a 50 x 50 grid evenly: chi-square near 2401 (sigma 69); neighbours are unrelated."""
    n = 100_003
    image = Permutation(n, 7)(np.arange(n))
    cells = np.bincount((np.arange(n) * 50 // n) * 50 + image * 50 // n, minlength=2500)
    chi_square = ((cells - n / 2500) ** 2 / (n / 2500)).sum()
    assert 2401 - 5 * 69 < chi_square < 2401 + 5 * 69
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.02


def test_golden_order():
    """These numbers may only change together with ORDER_VERSION: a resumed run relies on them."""
    assert derive_keys(2, "order", 0, 0).tolist() == GOLDEN_KEYS
    index = SampleIndex(tokens=10_001, seq_len=10, seed=1234)
    assert index.starts(np.arange(8)).tolist() == GOLDEN_FIRST_EPOCH
    assert index.starts(np.arange(1000, 1008)).tolist() == GOLDEN_SECOND_EPOCH
    assert SampleIndex(10**15, 4096, seed=3).starts(np.arange(3)).tolist() == GOLDEN_HUGE


GOLDEN_KEYS = [10899173703800561845, 1994134731982931296]
GOLDEN_FIRST_EPOCH = [6730, 7570, 430, 5620, 6320, 2590, 710, 7150]
GOLDEN_SECOND_EPOCH = [1953, 393, 3043, 8164, 5964, 8374, 893, 7734]
GOLDEN_HUGE = [443306982838272, 47479617277952, 441034474037248]


def test_first_epoch_uses_each_label_once_and_counts_the_rest():
    index = SampleIndex(tokens=1_237, seq_len=10, seed=5)
    starts = np.sort(index.starts(np.arange(index.samples_per_epoch)))
    assert np.array_equal(starts, np.arange(0, 1230, 10))
    assert (index.samples_per_epoch, index.remainder) == (123, 6)


def test_later_epochs_differ_in_order_and_phase():
    index = SampleIndex(tokens=1_001, seq_len=10, seed=5)
    epochs = [index.starts(np.arange(e * 100, (e + 1) * 100)) for e in range(4)]
    for epoch, starts in enumerate(epochs):
        assert len(set(starts.tolist())) == 100
        assert len({int(s) % 10 for s in starts}) <= 2, f"one phase in epoch {epoch}, two where the ring closes"
    assert len({tuple(starts.tolist()) for starts in epochs}) == 4
    assert len({tuple(np.sort(starts).tolist()) for starts in epochs}) == 4


def test_seeds_and_streams_differ():
    orders = {
        tuple(SampleIndex(10_001, 10, seed, stream).starts(np.arange(20)).tolist())
        for seed in (0, 1)
        for stream in (0, 1)
    }
    assert len(orders) == 4


def test_one_lookup_spans_epochs():
    index = SampleIndex(tokens=101, seq_len=10, seed=0)
    together = index.starts(np.arange(35))
    assert together.tolist() == [int(index.starts(np.array([k]))[0]) for k in range(35)]


@pytest.mark.parametrize("samples", [10**6, 10**12])
def test_start_up_does_not_grow_with_the_corpus(samples: int):
    tracemalloc.start()
    begin = time.process_time()
    SampleIndex(samples * 2048 + 1, 2048, seed=0).starts(np.arange(samples - 64, samples + 64))
    seconds, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 18
    assert seconds < 0.5
