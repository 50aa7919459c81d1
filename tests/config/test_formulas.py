"""FLOPs, memory and hardware against published figures and integers worked out by hand."""

from __future__ import annotations

import pytest

from gpt3d.config.load import compose
from gpt3d.config.schema import ModelConfig
from gpt3d.model.flops import hardware_flops_per_token, layer_parameters, model_flops_per_token, parameter_count
from gpt3d.planner.hardware import lookup, peak_tflops
from gpt3d.planner.memory import layer_activations, layers_in_flight, memory_by_stage, stage_parameters, worst_rank
from tests.config.conftest import Make, Options


def gpt(**changes: object) -> ModelConfig:
    base = dict(
        name="t", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_hidden_size=256,
        vocab_size=512, max_seq_len=128, position="learned", norm="layernorm", activation="gelu", bias=True,
        tied_embeddings=True,
    )  # fmt: skip
    return ModelConfig(**{**base, **changes})  # type: ignore[arg-type]


class TestLog02:
    """LOG-02: the FLOPs function, integer for integer."""

    def test_gpt(self) -> None:
        assert model_flops_per_token(gpt(), 128) == 983_040
        assert model_flops_per_token(gpt(), 128, causal_half=True) == 884_736

    def test_tied_or_not_is_the_same_work(self) -> None:
        assert model_flops_per_token(gpt(tied_embeddings=False), 128) == 983_040

    def test_gqa_and_gated_mlp(self) -> None:
        gqa = gpt(num_kv_heads=1)  # K and V are 16 wide instead of 64: 6 x L x h x 2 x 48 less
        assert model_flops_per_token(gqa, 128) == 983_040 - 6 * 2 * 64 * 2 * 48
        swiglu = gpt(activation="swiglu")  # a third matrix: 6 x L x h x f more
        assert model_flops_per_token(swiglu, 128) == 983_040 + 6 * 2 * 64 * 256

    def test_recompute_is_only_a_hardware_figure(self) -> None:
        assert hardware_flops_per_token(gpt(), 128, "none") == 983_040
        assert hardware_flops_per_token(gpt(), 128, "full") == 983_040 + (589_824 + 196_608) // 3
        assert hardware_flops_per_token(gpt(), 128, "selective") == 983_040 + 196_608 // 3

    def test_narayanan_equation_3(self) -> None:
        model = gpt(num_layers=8, hidden_size=1024, num_heads=16, num_kv_heads=16, head_dim=64, ffn_hidden_size=4096)
        layers, h, s, v = 8, 1024, 2048, 512
        assert model_flops_per_token(model, s) == pytest.approx(
            72 * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
        )
        full = 96 * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
        assert hardware_flops_per_token(model, s, "full") == pytest.approx(full)

    @pytest.mark.parametrize(
        ("name", "dtype", "peak"),
        [
            ("NVIDIA H100 80GB HBM3", "bf16", 989.0),
            ("NVIDIA H100 PCIe", "bf16", 756.5),
            ("NVIDIA H200", "bf16", 989.0),
            ("NVIDIA A100-SXM4-40GB", "fp16", 312.0),
            ("NVIDIA B200", "bf16", 2250.0),
            ("NVIDIA GB200", "bf16", 2500.0),
            ("NVIDIA L4", "bf16", 121.0),
            ("NVIDIA L40S", "bf16", 362.0),
            ("NVIDIA H200 MIG 1g.18gb", "bf16", None),
            ("NVIDIA H100 80GB HBM3", "fp32", None),
            ("Tesla V100-SXM2-16GB", "bf16", None),
            (None, "bf16", None),
        ],
    )
    def test_unknown_peak_is_none(self, name: str | None, dtype: str, peak: float | None) -> None:
        assert peak_tflops(name, dtype) == peak

    def test_configured_peak_comes_first(self) -> None:
        assert peak_tflops("NVIDIA H200", "bf16", 100.0) == 100.0

    @pytest.mark.parametrize("cluster", ["a100_40gb", "a100", "h100", "h200", "b200"])
    def test_clusters_agree_with_the_table(self, options: Options, cluster: str) -> None:
        node = options[f"cluster={cluster}"].cluster
        assert node.gpu is not None
        gpu = lookup(node.gpu)
        assert gpu is not None and (gpu.bf16_tflops, gpu.memory_gb) == (node.peak_tflops, node.gpu_memory_gb)


class TestParameters:
    @pytest.mark.parametrize("tp", [1, 2, 4])
    def test_layers_on_tp_ranks_sum_up(self, tp: int) -> None:
        model = gpt()
        copies = 2 * 2 * 64 + 2 * 64  # two layer norms with bias, two row biases: whole on each rank
        assert layer_parameters(model, tp) * tp == layer_parameters(model) + (tp - 1) * copies

    def test_kv_heads_are_copied(self) -> None:
        model = gpt(num_kv_heads=2, bias=False, norm="rmsnorm")
        extra = 4 * 64 * 2 * 16 - 64 * 2 * 32  # four ranks hold one KV head each, of two
        assert layer_parameters(model, 4) * 4 == layer_parameters(model) + extra + 3 * 2 * 64

    def test_stages_hold_the_whole_model(self, make: Make) -> None:
        config = make({"parallel.pp": 4})
        assert sum(stage_parameters(config, i) for i in range(4)) == parameter_count(config.model, padded=True)
        config.model.tied_embeddings = True
        tied_copy = config.model.padded_vocab_size * config.model.hidden_size
        assert sum(stage_parameters(config, i) for i in range(4)) == parameter_count(config.model, True) + tied_copy

    def test_padding_is_counted_apart(self, options: Options) -> None:
        model = options["model=125m"].model
        assert parameter_count(model, padded=True) - parameter_count(model) == (50304 - 50257) * 768


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "family", [{}, {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2}]
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_built_model_has_as_many_parameters(bias: bool, tied: bool, family: dict[str, object]) -> None:
    import torch

    from gpt3d.model.gpt import GPTStage
    from gpt3d.parallel.layout import single_process_layout

    model = gpt(bias=bias, tied_embeddings=tied, vocab_size=500, **family)
    built = GPTStage(
        model, single_process_layout(), range(2), first=True, last=True, seq_len=128, dtype=torch.float32, seed=0
    )  # fmt: skip
    assert sum(p.numel() for p in built.parameters()) == parameter_count(model, padded=True)


class TestMemory:
    def test_70b_on_one_rank_is_16_bytes_a_parameter(self) -> None:
        config = compose(["model=70b", "zero=0", "parallel=single", "precision=bf16", "precision.grad_dtype=bf16"])
        memory = worst_rank(config, dp=1)
        assert memory.state == 16 * 70_553_706_496
        assert (memory.weights, memory.gradients) == (2 * 70_553_706_496, 2 * 70_553_706_496)

    @pytest.mark.parametrize(("stage", "per_parameter"), [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)])
    def test_zero_divides_12_14_16(self, make: Make, stage: int, per_parameter: float) -> None:
        config = make({"zero.stage": stage, "precision.dtype": "bf16", "precision.grad_dtype": "bf16"})
        expected = per_parameter * parameter_count(config.model, padded=True)
        assert worst_rank(config, dp=8).state == pytest.approx(expected, abs=3)

    def test_fp32_accumulator_and_offload(self, make: Make) -> None:
        config = make({"zero.stage": 3, "precision.dtype": "bf16"})
        count = parameter_count(config.model)
        assert worst_rank(config, 1).gradients == 4 * count
        config.zero.offload_optimizer = config.zero.offload_param = "cpu"
        memory = worst_rank(config, 1)
        # weights; master, moments and an fp32 gradient; and the sum of gradients, which DeepSpeed keeps besides
        assert memory.state == 0 and memory.host == (2 + 16 + 4) * count

    @pytest.mark.parametrize(
        ("tp", "sp", "recompute", "per_sbh"),
        [
            (1, False, "none", 34 + 5 * 16),
            (8, False, "none", 10 + 24 / 8 + 5 * 16 / 8),
            (8, True, "none", 34 / 8 + 5 * 16 / 8),
            (8, False, "selective", 10 + 24 / 8),
            (8, True, "selective", 34 / 8),
            (1, False, "full", 2),
        ],
    )
    def test_korthikanti_table_2(self, tp: int, sp: bool, recompute: str, per_sbh: float) -> None:
        h, heads, s = 1024, 16, 1024  # 5as/h = 5 x 16
        model = gpt(
            hidden_size=h, num_heads=heads, num_kv_heads=heads, head_dim=64, ffn_hidden_size=4 * h,
            hidden_dropout=0.1, attention_dropout=0.1,
        )  # fmt: skip
        assert layer_activations(model, 2, s, tp, sp, recompute, flash=False) == per_sbh * s * 2 * h

    def test_microbatches_in_flight(self, make: Make) -> None:
        config = make({"parallel.pp": 2, "trainer.global_batch_size": 64})  # 16 microbatches, 2 layers a stage
        assert [layers_in_flight(config, 1, i) for i in range(2)] == [4, 2]
        config.pipeline.schedule = "gpipe"
        assert layers_in_flight(config, 1, 0) == 32
        config.pipeline.schedule, config.pipeline.chunks = "interleaved", 2
        assert layers_in_flight(config, 1, 0) == 4 * (1 + 1 / 4)  # L (1 + (p - 1) / (p v))

    def test_logits_are_on_the_last_stage(self, make: Make) -> None:
        first, last = memory_by_stage(make({"parallel.pp": 2, "parallel.tp": 2}), 1)
        assert first.logits == 0 and last.logits == 4 * 4 * 128 * 2048 // 2
