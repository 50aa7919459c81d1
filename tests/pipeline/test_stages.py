"""Each layer lives on exactly one stage, and the fullest stage is as empty as it can be."""

from itertools import product

import pytest

from gpt3d.pipeline.stages import split_layers, stage_table


def counts(*arguments: object, **keywords: object) -> list[int]:
    return [len(layers) for layers in split_layers(*arguments, **keywords)]  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [(0, 0), (0.5, 2), (3, 0), (0, 7.5)])
def test_each_layer_once_and_the_best_possible_maximum(weights: tuple[float, float]) -> None:
    for num_layers, stages in product(range(1, 10), range(1, 5)):
        if num_layers < stages:
            continue
        split = split_layers(num_layers, stages, *weights)
        assert [layer for layers in split for layer in layers] == list(range(num_layers))

        def fullest(sizes: list[int]) -> float:
            load: list[float] = list(sizes)
            load[0] += weights[0]
            load[-1] += weights[1]
            return max(load)

        every = (s for s in product(range(1, num_layers + 1), repeat=stages) if sum(s) == num_layers)
        assert fullest([len(layers) for layers in split]) == min(fullest(list(s)) for s in every)


def test_examples() -> None:
    assert counts(12, 4) == [3, 3, 3, 3]
    assert counts(10, 4) == [2, 3, 3, 2]  # the ends hold the embedding and the head
    assert counts(7, 2) == [4, 3]
    assert counts(6, 2, head_weight=2) == [4, 2]
    assert counts(5, 3, by_hand=[3, 2, 0]) == [3, 2, 0]


@pytest.mark.parametrize(
    ("num_layers", "stages", "by_hand", "words"),
    [
        (3, 4, None, r"num_layers=3 .* at most 3 stages"),
        (4, 2, [2, 1], r"layers_per_stage=\[2, 1\] adds up to 3 .* for example \[2, 2\]"),
        (4, 2, [4], "1 entries for 2 stages"),
        (4, 3, [2, 0, 2], "without a layer"),
        (4, 2, [5, -1], "none below 0"),
    ],
)
def test_what_cannot_be_placed_is_refused(num_layers: int, stages: int, by_hand: list[int] | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split_layers(num_layers, stages, by_hand=by_hand)


def test_negative_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=">= 0"):
        split_layers(4, 2, head_weight=-1)


def test_table_shows_chunks_on_their_ranks() -> None:
    table = stage_table(split_layers(5, 4), 2, parameters=[1000, 200, 200, 3000], tied_embeddings=True)
    assert table.splitlines() == [
        "stage  rank  chunk  layers   also                                      parameters",
        "0      0     0      0-0 (1)  embedding                                 1,000",
        "1      1     0      1-2 (2)  -                                         200",
        "2      0     1      3-3 (1)  -                                         200",
        "3      1     1      4-4 (1)  final norm, head (tied to the embedding)  3,000",
    ]
    assert "none" in stage_table(split_layers(2, 2, by_hand=[2, 0]), 2)
