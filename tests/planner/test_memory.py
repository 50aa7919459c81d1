"""The memory plan against published figures, against what layers really save, and against itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gpt3d.config.schema import ModelConfig
from gpt3d.model.gpt import GPTStage
from gpt3d.parallel.layout import single_process_layout
from gpt3d.pipeline.check import check
from gpt3d.pipeline.schedule import all_ranks
from gpt3d.planner.activations import most_activations
from gpt3d.planner.memory import (
    GB,
    host_by_node,
    layer_activations,
    memory_by_stage,
    pairs_in_flight,
    stage_memory,
    state_bytes,
)
from gpt3d.planner.need import PARTS
from tests.planner.conftest import Make

# Korthikanti et al. 2022, figure 1, GiB on the first stage: layers, hidden, heads, pp, chunks, micro, batch, then
# weights, gradients and optimizer; activations of the baseline; activations with SP and selective recompute.
FIGURE_1 = {
    "22B": (48, 6144, 64, 1, 1, 4, 4, 45.56, 59.25, 9.56),
    "175B": (96, 12288, 96, 8, 3, 1, 64, 45.56, 66.84, 12.35),
    "530B": (105, 20480, 128, 35, 3, 1, 280, 31.64, 114.02, 23.08),
    "1T": (128, 25600, 160, 64, 1, 1, 512, 32.96, 131.25, 26.56),
}


@pytest.mark.parametrize("name", FIGURE_1)
def test_korthikanti_figure_1(make: Make, name: str) -> None:
    layers, hidden, heads, pp, chunks, micro, batch, state, baseline, selective = FIGURE_1[name]
    config = make("175b", {"parallel.pp": pp, "pipeline.chunks": chunks, "zero.stage": 0, "data.seq_len": 2048})
    config.pipeline.schedule = "interleaved" if chunks > 1 else "1f1b"
    config.trainer.micro_batch_size, config.trainer.global_batch_size = micro, batch
    # The figure counts layers only: a vocabulary of 8 rows and no learned positions leave nothing else.
    config.model = dataclasses.replace(
        config.model, num_layers=layers, hidden_size=hidden, num_heads=heads, num_kv_heads=heads,
        head_dim=hidden // heads, ffn_hidden_size=4 * hidden, vocab_size=8, vocab_multiple=8, position="learned",
        max_seq_len=1, hidden_dropout=0.1, attention_dropout=0.1,
    )  # fmt: skip
    config.parallel.sequence_parallel, config.recompute = False, "none"
    memory = stage_memory(config, 1, 0, flash=False)
    assert memory.state / GB == pytest.approx(state, rel=0.01)
    assert most_activations(config, 1, 0, flash=False) / GB == pytest.approx(baseline, rel=0.01)
    config.parallel.sequence_parallel, config.recompute = True, "selective"
    assert most_activations(config, 1, 0, flash=False) / GB == pytest.approx(selective, rel=0.01)


# dtype, gradients -> bytes a parameter at DP 2 under ZeRO 0 to 3, the highest in a step: as tests/zero/test_memory.py
# measures DeepSpeed's stages and ours.
MEASURED = {
    ("bf16", "bf16"): (16, 10, 9, 8),
    ("bf16", "fp32"): (18, 12, 10, 9),
    ("fp32", "fp32"): (16, 14, 12, 10),
}


@pytest.mark.parametrize("kind", MEASURED)
def test_state_is_what_deepspeed_keeps(kind: tuple[str, str]) -> None:
    kinds = [state_bytes(*kind, stage) for stage in range(4)]
    assert tuple(kind.whole + kind.divided / 2 for kind in kinds) == MEASURED[kind]


def test_70b_on_one_gpu(make: Make) -> None:
    config = make("70b", {"precision.grad_dtype": "bf16", "zero.stage": 0, "parallel.tp": 1, "parallel.pp": 1})
    assert [m.state for m in memory_by_stage(config, 1)] == [16 * 70_553_706_496]


def small(name: str) -> ModelConfig:
    shape = dict(
        num_layers=3, hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=64, ffn_hidden_size=1024, vocab_size=512,
        vocab_multiple=8, max_seq_len=128,
    )  # fmt: skip
    if name == "gpt":
        kind = dict(position="learned", norm="layernorm", activation="gelu", bias=True, tied_embeddings=True)
    else:
        kind = dict(position="rope", norm="rmsnorm", activation="swiglu", bias=False, tied_embeddings=False)
        shape |= dict(num_kv_heads=2, ffn_hidden_size=896)
    return ModelConfig(name=name, **shape, **kind)  # type: ignore[arg-type]


def saved_by(model: ModelConfig, layers: int, dtype: torch.dtype, recompute: str, last: bool = False) -> int:
    """Bytes of all storages that a forward of these layers saves for its backward."""
    stage = GPTStage(
        model, single_process_layout(), range(layers), first=False, last=last, seq_len=128, dtype=dtype, seed=0,
        recompute=recompute,
    )  # fmt: skip
    kept = {}
    known = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    known |= {table.untyped_storage().data_ptr() for table in stage.rotary or ()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(128, 2, model.hidden_size, dtype=dtype, requires_grad=True)
    labels = torch.zeros((2, 128), dtype=torch.long) if last else None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = stage(x, 1, labels)
    assert out is not None
    return sum(kept.values())


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_activations_are_what_a_layer_saves(name: str, dtype: torch.dtype, recompute: str) -> None:
    model = small(name)
    real = saved_by(model, 3, dtype, recompute) - saved_by(model, 2, dtype, recompute)
    planned = layer_activations(model, 2, 128, recompute=recompute, element=dtype.itemsize, on_cpu=True)
    assert planned == pytest.approx(real, rel=0.03)  # statistics of norms and of the softmax are left out


@pytest.mark.parametrize("kind, chunks", [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved", 2)])
def test_in_flight_is_counted_on_the_schedule(kind: str, chunks: int) -> None:
    """Whatever the length of the step: the planner unrolls a short one."""
    for pp in (1, 2, 4, 5):
        for microbatches in (pp, 2 * pp, 9 * pp):
            real = check(all_ranks(kind, pp, chunks, microbatches), pp, chunks).in_flight
            assert pairs_in_flight(kind, pp, chunks, microbatches) == real, (pp, microbatches)


def test_zb_h1_holds_more_on_later_stages(make: Make) -> None:
    """They wait with weight gradients, for which they keep inputs and output gradients of the matrices."""
    config = make("70b", {"trainer.global_batch_size": 64})
    one = [m.activations for m in memory_by_stage(config, 1)]
    config.pipeline.schedule = "zb_h1"
    late = [m.activations for m in memory_by_stage(config, 1)]
    assert one[0] == late[0] and one[1] > one[2]
    assert all(held > before for held, before in zip(late[1:], one[1:], strict=True))


def test_parts_add_up(make: Make) -> None:
    for memory in memory_by_stage(make("70b", {"zero.stage": 3, "recompute": "full"}), 8):
        assert sum(getattr(memory, part) for part in PARTS) == memory.total
        assert memory.margin > 1.9 * GB


def test_the_optimizer_step_counts_where_it_is_the_peak(make: Make) -> None:
    """bf16 gradients become fp32 while the update runs, when activations are gone."""
    config = make("70b", {"precision.grad_dtype": "bf16", "zero.stage": 0, "recompute": "full"})
    memory = memory_by_stage(config, 1)[1]
    assert memory.update == 4 * memory.parameters
    assert memory.step == memory.update - memory.activations - memory.work > 0
    config.precision.grad_dtype = "fp32"
    assert memory_by_stage(config, 1)[1].step == 0


def test_host_memory_of_the_fullest_machine(make: Make) -> None:
    config = make("70b", {"zero.offload_optimizer": "cpu", "parallel.tp": 2})
    hosts = [m.host for m in memory_by_stage(config, 2)]
    assert host_by_node(config, 2, 8) == max(4 * hosts[0] + 4 * hosts[1], 4 * hosts[2] + 4 * hosts[3])
    assert all(m.optimizer == 0 for m in memory_by_stage(config, 2))


# ZeRO stage, gradients -> bytes a parameter of a rank's share on host and device of the sums and states: what
# benchmarks/memory.py measures DeepSpeed to keep. Stages 1 and 2 add the largest parameter; stage 2 whole parameters.
OFFLOADED = {(1, "fp32"): (18, 4 * 8), (2, "fp32"): (18, 4), (2, "bf16"): (20, 0), (3, "fp32"): (20, 0)}


@pytest.mark.parametrize("kind", OFFLOADED, ids=str)
def test_what_an_offloaded_optimizer_keeps_where(make: Make, kind: tuple[int, str]) -> None:
    stage, grad_dtype = kind
    changes = {"zero.stage": stage, "precision.grad_dtype": grad_dtype, "zero.offload_optimizer": "cpu"}
    memory = stage_memory(make("70b", {**changes, "trainer.global_batch_size": 64}), 8, 1)
    share, largest, (host, gradients) = memory.parameters / 8, 8192 * 2 * 28672 // 8, OFFLOADED[kind]
    assert memory.optimizer == 0 and memory.gradients == pytest.approx(gradients * share, rel=1e-6)
    beside = 2 * largest if stage < 3 else 0
    assert host * share <= memory.host - beside + 8 <= host * share + (4 * largest if kind == (2, "bf16") else 16)


def test_data_parallel_ranks_of_a_stage_differ(make: Make) -> None:
    """With sums in the parameters' type a rank takes a second buffer for its part, the last one while most is there."""
    config = make("70b", {"zero.stage": 2, "precision.grad_dtype": "bf16", "trainer.global_batch_size": 64})
    first, last = (stage_memory(config, 8, 1, copy=copy) for copy in (0, 7))
    assert last.device > first.device and stage_memory(config, 8, 1) == last
    config.trainer.global_batch_size = 8  # one microbatch: the first buffer is the sum
    assert stage_memory(config, 8, 1).device < last.device
    config.precision.grad_dtype = "fp32"
    assert stage_memory(config, 8, 1, copy=0) == stage_memory(config, 8, 1)
