"""Initial values and slices follow from (seed, canonical name) alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt3d.parallel import placement
from gpt3d.parallel.placement import Constant, Normal, Placement, even_range, new_parameter, placement_of

CPU = torch.device("cpu")


def values(place: Placement, seed: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return new_parameter(place, Normal(0.02, seed), CPU, dtype).detach()


@given(
    st.integers(1, 7), st.integers(1, 7), st.integers(0, 1), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.data()
)
@settings(max_examples=80)
def test_every_slice_equals_the_slice_of_the_whole(
    rows: int, columns: int, dim: int, parts: int, fused: int, data: st.DataObject
) -> None:
    """Tiles of 4 x 4, so that slices begin and end inside tiles and span several."""
    shape = [rows, columns]
    shape[dim] = fused * parts * shape[dim]
    each = shape[dim] // fused
    index = data.draw(st.integers(0, parts - 1))
    ranges = tuple((i * each + a, i * each + b) for i in range(fused) for a, b in even_range(each, parts, index))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "TILE", 4)
        whole = values(Placement("w", tuple(shape)))
        part = Placement("w", tuple(shape), dim, ranges)
        assert torch.equal(values(part), part.take(whole))
        assert part.take(whole).shape == part.local_shape


def test_slices_inside_the_real_tile_size() -> None:
    whole = values(Placement("w", (1500, 1100)))
    part = Placement("w", (1500, 1100), 0, ((700, 1200), (1400, 1500)))
    assert torch.equal(values(part), part.take(whole))


def test_tiles_differ_and_look_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "TILE", 64)
    whole = values(Placement("w", (256, 256)))
    tiles = [t for row in whole.split(64, 0) for t in row.split(64, 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(tiles) for b in tiles[:i])
    assert abs(whole.mean()) < 3 * 0.02 / 256 and abs(whole.std() / 0.02 - 1) < 0.02


def test_name_and_seed_decide() -> None:
    base = values(Placement("layers.0.w", (8, 8)))
    assert torch.equal(base, values(Placement("layers.0.w", (8, 8))))
    assert not torch.equal(base, values(Placement("layers.2.w", (8, 8))))
    assert not torch.equal(base, values(Placement("layers.0.w", (8, 8)), seed=4))


def test_low_precision_is_the_rounded_fp32_value() -> None:
    place = Placement("w", (33, 17))
    assert torch.equal(values(place, dtype=torch.bfloat16), values(place).bfloat16())


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    values(Placement("w", (8, 8)))
    assert torch.equal(before, torch.get_rng_state())


def test_roles_follow_from_the_record() -> None:
    matrix, vector = Placement("w", (4, 4)), Placement("b", (4,), copy=1)
    assert matrix.decays and matrix.counted and not vector.decays and not vector.counted
    constant = new_parameter(vector, Constant(1.0), CPU, torch.float32)
    assert placement_of(constant) is vector and bool((constant == 1).all())


def test_meta_device_has_shapes_and_no_memory() -> None:
    part = Placement("w", (10**6, 10**5), 0, even_range(10**6, 8, 3))
    parameter = new_parameter(part, Normal(0.02, 1), torch.device("meta"), torch.bfloat16)
    assert parameter.shape == (125_000, 100_000) and parameter.is_meta
