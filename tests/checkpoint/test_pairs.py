"""Every layout reads what every other wrote, bit for bit; each number is written once, by ranks that share the work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt3d.checkpoint.pieces import rectangles
from gpt3d.verification.cases import FAMILIES, Case
from tests.checkpoint import simulated

LAYOUTS = [
    Case(zero=0),
    Case(dp=3, zero=1),
    Case(dp=2, zero=3),
    Case(tp=2, dp=2, zero=2),
    Case(tp=2, pp=2, zero=0),
    Case(tp=2, pp=2, dp=2, zero=3),
    Case(tp=4, zero=1),  # two ranks hold the same key/value head
    Case(tp=4, dp=2, zero=3),
    Case(pp=4, zero=1),
    Case(pp=2, dp=3, zero=3),
    Case(pp=2, schedule="interleaved", chunks=2, dp=2, zero=0),
    Case(tp=4, pp=2, dp=2, zero=1),
    Case(pp=2, layers=(3, 1), dp=5, zero=2),
]


def with_family(case: Case, family: str) -> Case:
    return Case(**{**case.__dict__, "family": family})


@pytest.mark.parametrize(
    ("family", "saved"),
    [
        *[("llama", case) for case in LAYOUTS],
        *[(family, case) for family in ("gpt", "one_kv_head_bias") for case in LAYOUTS[3::4]],
    ],
    ids=str,
)
def test_every_layout_loads_it(family: str, saved: Case, tmp_path: Path) -> None:
    saved = with_family(saved, family)
    written = simulated.save(saved, tmp_path)
    total = 12 * simulated_numbers(family)
    assert sum(written) == total
    for layout in LAYOUTS if family == "llama" else LAYOUTS[::4]:
        case = with_family(layout, family)
        for state, right in zip(simulated.load(case, tmp_path), simulated.answers(case), strict=True):
            for fragment, want in zip(state.pieces, right, strict=True):
                for kind, values in fragment.tensors.items():
                    same = torch.equal(values.view(torch.int32), want[kind].view(torch.int32))
                    assert same, (case, fragment.placement.name, kind)


def simulated_numbers(family: str) -> int:
    from gpt3d.model.flops import parameter_count

    return parameter_count(FAMILIES[family])


@pytest.mark.parametrize("zero", range(4))
def test_writing_is_shared_evenly(zero: int, tmp_path: Path) -> None:
    written = simulated.save(Case(tp=2, dp=3, zero=zero, family="gpt"), tmp_path)
    assert max(written) < 1.1 * sum(written) / len(written)


@settings(max_examples=300)
@given(st.data())
def test_rectangles_cover_a_range_once(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    total = torch.Size(shape).numel()
    start = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, total - start))
    box = torch.zeros(shape)
    found = list(rectangles(start, count, shape))
    for at, offsets, sizes in found:
        view = box[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        assert view.is_contiguous() and view.storage_offset() == at
        view += 1
    want = torch.zeros(total)
    want[start : start + count] = 1
    assert torch.equal(box.flatten(), want)
    assert len(found) <= 2 * len(shape) - 1
