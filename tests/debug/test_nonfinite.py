"""A NaN planted in one module, in several layouts: the run stops there and names it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt3d.config.load import compose
from gpt3d.launch import RankFailed

SMALL = [
    "data.seq_len=16", "trainer.steps=3", "trainer.global_batch_size=8", "trainer.micro_batch_size=2",
    "trainer.eval_batches=1", "tracking.log_interval=1", "lr.warmup_steps=2", "checkpoint=none", "debug=nan",
]  # fmt: skip
World = Callable[..., list[Any]]


@dataclasses.dataclass(frozen=True)
class Plant:
    """Where it goes wrong: a module by its canonical name, at its call number `call` on every rank that has it."""

    module: str
    backward: bool = False
    call: int = 0


class SpoilGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * float("nan")


def plant(root: torch.nn.Module, wanted: Plant) -> None:
    """Replace the module's forward by one that goes wrong inside."""
    from gpt3d.debug.nonfinite import canonical_name

    for chunk in root.chunks:  # type: ignore[union-attr]
        for path, module in chunk.named_modules():
            if canonical_name(path, module) == wanted.module:
                whole, calls = module.forward, iter(range(1000))

                def forward(x: Tensor, *rest: Any, whole: Any = whole, calls: Any = calls) -> Any:
                    if next(calls) != wanted.call:
                        return whole(x, *rest)
                    return whole(SpoilGradient.apply(x), *rest) if wanted.backward else whole(x, *rest) * float("nan")

                module.forward = forward  # type: ignore[method-assign]


def train(overrides: list[str], wanted: Plant | None, run_dir: str, spoiled_product: int = -1) -> float:
    """A run with a fault. `spoiled_product`: the number of the weight gradient that goes wrong, -1 for none."""
    from gpt3d.parallel import device, layers
    from gpt3d.trainer import Trainer

    trainer = Trainer(compose([*SMALL, *overrides, f"run_dir={run_dir}"]), device.select(0, "cpu"))
    if wanted is not None:
        plant(trainer.learner.engine.module, wanted)
    product, calls = layers._product, iter(range(100_000))
    layers._product = lambda *x: product(*x) * (float("nan") if next(calls) == spoiled_product else 1.0)
    return trainer.run()["validation_loss"]


FORWARD, BACKWARD = Plant("layers.2.mlp.down", call=5), Plant("layers.2.attention_norm", backward=True, call=2)
CASES = [
    (["parallel=single", "zero=0"], 1, FORWARD, r"step 2, forward of microbatch 1, rank 0 .*layers\.2\.mlp\.down gave"),
    (["parallel=pp2", "zero=1"], 2, FORWARD, r"step 2, forward of microbatch 1, rank 1 .*PP stage 1.*layers\.2\.mlp"),
    (["parallel=tp2_dp2", "zero=3"], 4, BACKWARD,
     r"step 2, backward of microbatch 0, .*layers\.2\.attention_norm gave .*NaN .*gradient of its input"),
    (["parallel=pp2", "zero=1"], 2, Plant("layers.0.mlp", backward=True),
     r"step 1, backward of microbatch 0, rank 0 .*layers\.0 gave .*from layers\.0\.mlp_norm"),
]  # fmt: skip
SLOW = [
    (["parallel=tp2", "zero=0"], 2, FORWARD, r"layers\.2\.mlp\.down gave .*TP sums over ranks 0, 1"),
    (["parallel=dp2", "zero=2"], 2, BACKWARD, r"backward of microbatch 0, .*layers\.2\.attention_norm gave"),
    (["parallel=dp2", "zero=3", "recompute=full"], 2, BACKWARD, r"backward.*layers\.2\.attention_norm gave"),
    (["parallel=single", "zero=0", "recompute=selective"], 1, Plant("layers.1.attention"), r"layers\.1\.attention"),
    (["parallel=pp2", "pipeline=interleaved", "zero=1"], 2, FORWARD, r"layers\.2\.mlp\.down gave"),
    (["parallel=pp2", "pipeline=zb_h1", "zero=1"], 2, BACKWARD, r"backward.*layers\.2\.attention_norm gave"),
    (["parallel=pp2", "pipeline=gpipe", "zero=3"], 2, BACKWARD, r"backward.*layers\.2\.attention_norm gave"),
    (["parallel=single", "zero=0"], 1, Plant("head", backward=True), r"backward.*gave .*gradient .*layers\.3"),
    (["parallel=single", "zero=0"], 1, Plant("embedding.word"), r"forward.*embedding\.word gave"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "n", "wanted", "message"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_the_first_bad_module_is_named(
    world: World, tmp_path: Path, overrides: list[str], n: int, wanted: Plant, message: str
) -> None:
    with pytest.raises(RankFailed, match=message) as failed:
        world(train, overrides, wanted, str(tmp_path), n=n, timeout=90)
    assert failed.value.error_type == "NonFiniteFound"


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb_h1", marks=pytest.mark.slow)])
def test_a_bad_weight_gradient_is_named(world: World, tmp_path: Path, schedule: str) -> None:
    """Activations and their gradients are sound, one product of the two is not; also where that is computed later."""
    layout = ["parallel=pp2", "zero=1", f"pipeline={schedule}"]
    with pytest.raises(RankFailed, match=r"gave .* NaN of .* in the gradient of its weight .*\.weight"):
        world(train, layout, None, str(tmp_path), spoiled_product=2, n=2, timeout=90)


def test_a_sound_run_is_left_alone(world: World, tmp_path: Path) -> None:
    """The hooks see every layout's tensors and change none: the same loss as without them."""
    layout = ["parallel=pp2", "zero=1", "recompute=full"]
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    seen = world(train, layout, None, str(tmp_path / "with"), n=2, timeout=90)
    plain = world(train, [*layout, "debug.find_nan=false"], None, str(tmp_path / "without"), n=2, timeout=90)
    assert seen == plain


def train_with_a_bad_weight(run_dir: str) -> None:
    from gpt3d.parallel import device
    from gpt3d.trainer import Trainer

    trainer = Trainer(compose([*SMALL, "parallel=tp2", "zero=0", f"run_dir={run_dir}"]), device.select(0, "cpu"))
    if trainer.layout.rank == 1:
        weights = dict(trainer.learner.engine.module.named_parameters())
        weights["chunks.0.layers.1.mlp.down.weight"].data[0, 3] = float("inf")
    trainer.run()


def test_of_tensor_parallel_peers_the_one_with_the_bad_weight_speaks(world: World, tmp_path: Path) -> None:
    found = r"rank 1 .*layers\.1\.mlp\.down gave .*layers\.1\.mlp\.down\.weight holds 1 infinite of"
    with pytest.raises(RankFailed, match=found):
        world(train_with_a_bad_weight, str(tmp_path), n=2, timeout=90)
