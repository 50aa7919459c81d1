"""Cross-field rules: each mistake is named with key, value, reason and a value that works; all of them at once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from gpt3d.config.arithmetic import World, num_microbatches, resolve_dp, stage_layers
from gpt3d.config.deepspeed import extra_keys
from gpt3d.config.notes import batch_in_words, notes
from gpt3d.config.problems import ConfigError, Problem
from gpt3d.config.rules import check, check_vocabulary, require_valid
from gpt3d.zero.ds_config import derive_ds_config
from tests.config.conftest import Make

ANY = World()


def keys(problems: list[Problem]) -> list[str]:
    return [problem.key for problem in problems]


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def test_the_default_is_valid(make: Make) -> None:
    assert check(make(), ANY) == []


def test_several_mistakes_are_reported_together_and_nothing_is_rewritten(make: Make) -> None:
    config = make(
        {
            "model.num_heads": 6,
            "parallel.tp": 4,
            "trainer.global_batch_size": 7,
            "zero.offload_param": "cpu",
            "optimizer.weight_decay": -1.0,
            "lr.schedule": "cosin",
            "precision.grad_dtype": "bf16",
        }
    )
    before = copy.deepcopy(config)
    found = keys(check(config, ANY))
    expected = {
        "parallel.tp",
        "trainer.global_batch_size",
        "zero.offload_param",
        "optimizer.weight_decay",
        "lr.schedule",
    }
    assert {*expected, "precision.grad_dtype"} == set(found)
    assert config == before
    with pytest.raises(ConfigError) as error:
        require_valid(config, ANY)
    assert len(error.value.problems) == 6 and "has 6 problems" in str(error.value)
    assert pickle.loads(pickle.dumps(error.value)).problems == error.value.problems


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("pipeline.schedule", "1b1f", "did you mean 1f1b"),
        ("parallel.tp", 0, "1 or more"),
        ("model.num_heads", 0, "1 or more"),
        ("model.num_kv_heads", 0, "1 or more"),
        ("trainer.micro_batch_size", 0, "1 or more"),
        ("pipeline.chunks", 0, "1 or more"),
        ("zero.stage", 4, "3 or less"),
        ("model.hidden_dropout", 1.5, "0.99 or less"),
        ("precision.dtype", "bf32", "one of: fp32, bf16, fp16"),
    ],
)
def test_limits(make: Make, key: str, value: Any, expected: str) -> None:
    problem = only(check(make({key: value}), ANY))
    assert (problem.key, problem.value) == (key, value)
    assert expected in problem.fix


def test_a_number_that_is_none_is_refused(make: Make) -> None:
    assert keys(check(make({"optimizer.lr": float("nan")}), ANY)) == ["optimizer.lr"]


class TestCfg01:
    """CFG-01: heads and KV heads against TP."""

    def heads(self, make: Make, heads: int, kv: int, tp: int) -> list[Problem]:
        return check(make({"model.num_heads": heads, "model.num_kv_heads": kv, "parallel.tp": tp}), ANY)

    def test_fewer_kv_heads_than_tp_are_copied(self, make: Make) -> None:
        assert self.heads(make, 8, 2, 4) == []
        config = make({"model.num_heads": 8, "parallel.tp": 4})
        assert any("KV heads is copied to 2 ranks" in note for note in notes(config, ANY))

    def test_heads_not_divisible(self, make: Make) -> None:
        problem = only(self.heads(make, 6, 6, 4))
        assert (problem.key, problem.value) == ("parallel.tp", 4)
        assert "model.num_heads=6" in problem.why and "[1, 2]" in problem.fix

    def test_kv_heads_do_not_divide_heads(self, make: Make) -> None:
        problem = only(self.heads(make, 6, 4, 1))
        assert (problem.key, problem.value) == ("model.num_kv_heads", 4)
        assert "[1, 2, 3, 6]" in problem.fix

    def test_neither_divides_the_other(self, make: Make) -> None:
        assert keys(self.heads(make, 24, 6, 4)) == ["parallel.tp"]

    def test_control(self, make: Make) -> None:
        assert self.heads(make, 8, 2, 2) == []


class TestCfg03:
    """CFG-03: one batch arithmetic, over all machines."""

    def batch(self, make: Make, world: int, tp: int, pp: int, total: int, micro: int, **more: Any) -> list[Problem]:
        changes = {"parallel.tp": tp, "parallel.pp": pp, "trainer.global_batch_size": total}
        config = make({**changes, "trainer.micro_batch_size": micro, **more})
        return check(config, World(ranks=world, ranks_per_node=world))

    def test_legal(self, make: Make) -> None:
        assert self.batch(make, 4, 2, 1, 8, 4, **{"zero.stage": 3}) == []

    def test_less_than_one_microbatch(self, make: Make) -> None:
        problem = only(self.batch(make, 8, 1, 1, 8, 2))
        assert "8 / (2 x 8) = 0.5 microbatches" in problem.why
        assert "trainer.global_batch_size=16" in problem.fix and "micro batch of 1" in problem.fix

    def test_not_divisible(self, make: Make) -> None:
        problem = only(self.batch(make, 2, 1, 1, 16, 3))
        assert (problem.key, problem.value) == ("trainer.global_batch_size", 16)
        assert "=12 or" in problem.fix and "=18" in problem.fix

    def test_world_does_not_divide(self, make: Make) -> None:
        problem = only(self.batch(make, 6, 2, 2, 16, 4))
        assert "dp would be 1.5" in problem.why and "4 or 8 ranks" in problem.fix

    def test_accumulation(self, make: Make) -> None:
        config = make(
            {"parallel.tp": 2, "parallel.pp": 2, "trainer.global_batch_size": 12, "trainer.micro_batch_size": 2}
        )
        world = World(ranks=8, ranks_per_node=8)
        assert check(config, world) == []
        dp = resolve_dp(config, world)
        assert (dp, num_microbatches(config, dp)) == (2, 3)
        assert "12 sequences a step = 2 a microbatch x 3 microbatches x 2 model copies" in batch_in_words(config, dp)

    def test_global_means_all_machines(self, make: Make) -> None:
        config = make()
        one, two = World(ranks=4, ranks_per_node=4), World(ranks=4, ranks_per_node=2)
        assert resolve_dp(config, one) == resolve_dp(config, two) == 4
        config.cluster.nodes, config.cluster.gpus_per_node = 2, 2
        assert resolve_dp(config, ANY) == 4


class TestCfg05:
    """CFG-05: sequence length under SP. Validation uses data.seq_len as well, there is no second length."""

    def test_refused_with_the_nearest_lengths(self, make: Make) -> None:
        config = make({"data.seq_len": 30, "parallel.tp": 4, "parallel.sequence_parallel": True})
        problem = only(check(config, ANY))
        assert (problem.key, problem.value) == ("data.seq_len", 30)
        assert "28 or 32" in problem.fix

    def test_without_sp_any_length_goes(self, make: Make) -> None:
        assert check(make({"data.seq_len": 30, "parallel.tp": 4}), ANY) == []


def test_cfg06_vocabulary(make: Make) -> None:
    config = make({"model.vocab_size": 512})
    assert check_vocabulary(config, 511) == []
    for largest in (512, 639):
        problem = only(check_vocabulary(config, largest))
        assert problem.value == 512 and str(largest) in problem.why and str(largest + 1) in problem.fix


def test_mlp_and_vocabulary_split_over_tp(make: Make) -> None:
    config = make({"model.ffn_hidden_size": 350, "parallel.tp": 4, "model.vocab_size": 2047, "model.vocab_multiple": 1})
    problem = only(check(config, ANY))
    assert "ffn_hidden_size=350" in problem.why and "2047" in problem.why


def test_rope_and_learned_positions(make: Make) -> None:
    assert keys(check(make({"model.head_dim": 33}), ANY)) == ["model.head_dim"]
    assert keys(check(make({"model.position": "learned", "data.seq_len": 129}), ANY)) == ["data.seq_len"]
    assert check(make({"data.seq_len": 129}), ANY) == []


class TestPipeline:
    def test_layers_divide(self, make: Make) -> None:
        problem = only(check(make({"parallel.pp": 3}), ANY))
        assert "[1, 2, 4]" in problem.fix and "parallel.layers_per_stage=[1,2,1]" in problem.fix
        assert "at most 4 pieces" in only(check(make({"parallel.pp": 5}), ANY)).fix

    def test_uneven_only_when_asked_for(self, make: Make) -> None:
        config = make({"parallel.pp": 3, "parallel.layers_per_stage": [1, 2, 1]})
        assert check(config, ANY) == [] and stage_layers(config) == [1, 2, 1]
        for wrong in ([1, 2], [1, 2, 2], [0, 2, 2], []):
            problem = only(check(make({"parallel.pp": 3, "parallel.layers_per_stage": wrong}), ANY))
            assert (problem.key, problem.value) == ("parallel.layers_per_stage", wrong)
            assert "[1,2,1]" in problem.fix
        allowed = make({"parallel.pp": 3, "parallel.allow_uneven_stages": True})
        assert check(allowed, ANY) == [] and stage_layers(allowed) == [1, 2, 1]
        assert keys(check(make({"parallel.pp": 5, "parallel.allow_uneven_stages": True}), ANY)) == ["parallel.pp"]

    def test_chunks(self, make: Make) -> None:
        assert keys(check(make({"parallel.pp": 2, "pipeline.chunks": 2}), ANY)) == ["pipeline.chunks"]
        good = {"parallel.pp": 2, "pipeline.chunks": 2, "pipeline.schedule": "interleaved"}
        assert check(make(good), ANY) == [] and stage_layers(make(good)) == [1, 1, 1, 1]

    def test_interleaved_microbatches(self, make: Make) -> None:
        config = make({"parallel.pp": 2, "pipeline.chunks": 2, "pipeline.schedule": "interleaved"})
        config.trainer.global_batch_size = 12
        problem = only(check(config, ANY))
        assert "3 microbatches" in problem.why and problem.fix == "8 or 16"


class TestRanks:
    def test_explicit_dp_must_fill_the_world(self, make: Make) -> None:
        config = make({"parallel.tp": 2, "parallel.dp": 2})
        assert check(config, World(ranks=4, ranks_per_node=4)) == []
        problem = only(check(config, World(ranks=8, ranks_per_node=8)))
        assert (problem.key, problem.value) == ("parallel.dp", 2) and "parallel.dp=4" in problem.fix

    def test_one_node_may_be_used_in_part(self, make: Make) -> None:
        config = make({"parallel.dp": 2, "cluster.gpus_per_node": 8})
        assert check(config, ANY) == []
        assert any("6 of 8 GPUs stay idle" in note for note in notes(config, ANY))
        config.cluster.nodes = 2
        assert keys(check(config, ANY)) == ["parallel.dp"]

    def test_too_few_gpus_here(self, make: Make) -> None:
        problem = only(check(make({"parallel.tp": 2}), World(gpus=1, device="cuda")))
        assert "wants 2 GPUs and this machine has 1" in problem.why and "parallel=single" in problem.fix
        assert keys(check(make({"cluster.device": "cuda"}), World(gpus=0, device="cpu"))) == ["parallel"]

    def test_local_gpus_become_dp(self, make: Make) -> None:
        assert resolve_dp(make({"parallel.tp": 2}), World(gpus=8, device="cuda")) == 4
        assert resolve_dp(make({"parallel.tp": 2}), World(gpus=0, device="cpu")) == 1

    def test_context_parallel_is_refused(self, make: Make) -> None:
        problem = only(check(make({"parallel.cp": 2}), ANY))
        assert "context parallelism is not available" in problem.why and problem.fix == "use 1"

    def test_tp_across_nodes(self, make: Make) -> None:
        config = make({"parallel.tp": 4})
        problem = only(check(config, World(ranks=4, ranks_per_node=2)))
        assert problem.key == "parallel.tp" and "[1, 2]" in problem.fix and "allow_cross_node_tp=true" in problem.fix
        config.parallel.allow_cross_node_tp = True
        assert check(config, World(ranks=4, ranks_per_node=2)) == []
        assert check(make({"parallel.tp": 2}), World(ranks=4, ranks_per_node=2)) == []


class TestMemory:
    def test_host_memory_short(self, make: Make) -> None:
        config = make({"model.num_layers": 8000})
        problem = only(check(config, World(gpus=0, device="cpu", host_memory_gb=16)))
        assert "it has 16.0 GB" in problem.why and "wants 1 GPU of at least" in problem.why

    def test_model_state_larger_than_the_gpu(self, make: Make) -> None:
        changes = {"model.num_layers": 80_000, "cluster.gpu_memory_gb": 80.0, "cluster.device": "cuda"}
        assert keys(check(make({**changes, "cluster.gpus_per_node": 1}), ANY)) == ["model"]


class TestZeroAndPrecision:
    def test_offload_needs_its_stage(self, make: Make) -> None:
        assert keys(check(make({"zero.stage": 0, "zero.offload_optimizer": "cpu"}), ANY)) == ["zero.offload_optimizer"]
        for stage in (1, 2):
            assert keys(check(make({"zero.stage": stage, "zero.offload_param": "cpu"}), ANY)) == ["zero.offload_param"]
        assert check(make({"zero.stage": 3, "zero.offload_param": "cpu", "zero.offload_optimizer": "cpu"}), ANY) == []

    def test_fp16_on_cpu(self, make: Make) -> None:
        config = make({"precision.dtype": "fp16"})
        assert keys(check(config, World(device="cpu"))) == ["precision.dtype"]
        assert check(config, World(device="cuda", gpus=1)) == []

    @pytest.mark.parametrize(
        ("given", "ours"),
        [
            ({"train_batch_size": 32}, "16"),
            ({"train_micro_batch_size_per_gpu": 1}, "4"),
            ({"gradient_accumulation_steps": 1}, "4"),
            ({"gradient_clipping": 0.5}, "1.0"),
            ({"bf16": {"enabled": True}}, "False"),
            ({"fp16": {"enabled": True}}, "False"),
            ({"zero_optimization": {"stage": 3}}, "1"),
            ({"zero_optimization": {"reduce_bucket_size": 5e8}}, "50000000"),
            ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "'none'"),
            ({"zero_optimization": {"round_robin_gradients": True}}, "False"),
            ({"optimizer": {"type": "Adam"}}, ""),
            ({"bf16": {"immediate_grad_update": False}}, "True"),
            ({"zero_force_ds_cpu_optimizer": True}, "False"),
            ({"zero_optimization": 5}, "a section"),
            ({"fp16": True}, "a section"),
        ],
    )
    def test_contradicting_deepspeed_keys(self, make: Make, given: dict[str, Any], ours: str) -> None:
        problem = only(check(make({"zero.deepspeed": given}), ANY))
        assert problem.key.startswith("zero.deepspeed.") and ours in problem.why

    @pytest.mark.parametrize(
        ("given", "key", "why"),
        [
            ({"nonsense": 5}, "nonsense", "no such key"),
            ({"zero_optimization": {"nonsense": 5}}, "zero_optimization.nonsense", "no such key"),
            ({"comms_logger": {"nonsense": 5}}, "comms_logger.nonsense", "no such key"),
            ({"wall_clock_breakdwon": True}, "wall_clock_breakdwon", "no such key"),
            ({"zero_optimization": {"ignore_unused_parameters": "x"}}, "zero_optimization.ignore_unused", "boolean"),
            ({"compile": 5}, "", "mapping"),
        ],
    )
    def test_what_deepspeed_does_not_know(self, make: Make, given: dict[str, Any], key: str, why: str) -> None:
        problem = only(check(make({"zero.deepspeed": given}), ANY))
        assert problem.key.startswith(f"zero.deepspeed.{key}".rstrip(".")) and why in problem.why

    def test_sub_groups_would_part_the_stages(self, make: Make) -> None:
        classic = {"zero_optimization": {"sub_group_size": 1e9, "stage3_gather_16bit_weights_on_model_save": True}}
        assert check(make({"zero.stage": 3, "zero.deepspeed": classic}), ANY) == []
        problem = only(check(make({"zero.stage": 3, "zero.deepspeed": classic, "parallel.pp": 2}), ANY))
        assert problem.key == "zero.deepspeed.zero_optimization.sub_group_size" and "parallel.pp" in problem.why

    def test_the_same_value_and_other_keys_are_allowed(self, make: Make) -> None:
        given = {
            "train_batch_size": 16,
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": 1, "reduce_bucket_size": "5e7", "ignore_unused_parameters": False},
            "comms_logger": {"enabled": True},
        }
        config = make({"zero.deepspeed": given})
        assert check(config, ANY) == []
        expected = {"zero_optimization": {"ignore_unused_parameters": False}, "comms_logger": {"enabled": True}}
        assert extra_keys(config) == expected
        derived = derive_ds_config(config)
        assert derived["comms_logger"] == {"enabled": True} and "train_batch_size" not in derived
        assert derived["zero_optimization"]["ignore_unused_parameters"] is False
        assert derived["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"precision.dtype": "fp16", "precision.initial_loss_scale": 3.0}, "2 or 4"),
        (
            {"precision.dtype": "fp16", "precision.initial_loss_scale": 1.0, "precision.min_loss_scale": 2.0},
            "1 or less",
        ),
        ({"model.rope_scaling.factor": 8.0, "model.rope_scaling.high_freq_factor": 1.0}, "4"),
        ({"optimizer.beta1": 1.0}, "or less"),
        ({"optimizer.beta2": 1.0}, "or less"),
        ({"optimizer.eps": 0.0}, "or more"),
        ({"seed": 2**63}, "or less"),
        ({"run_name": "ü" * 101}, "shorter"),
        ({"cluster.gpus_per_node": 0, "parallel.tp": 2}, "1 or more"),
    ],
)
def test_values_that_would_fail_or_mislead_later(make: Make, changes: dict[str, Any], fix: str) -> None:
    assert fix in only(check(make(changes), ANY)).fix


def test_nodes_without_a_launcher(make: Make) -> None:
    config = make({"cluster.nodes": 3})
    assert keys(check(config, World(gpus=0, device="cpu"))) == ["cluster.nodes"]
    assert check(config, ANY) == []  # a plan
    config.cluster.nodes = 2
    assert check(config, World(ranks=2, ranks_per_node=1, gpus=0, device="cpu")) == []


def test_decay_before_the_end_of_warm_up(make: Make) -> None:
    assert keys(check(make({"lr.decay_steps": 10, "lr.warmup_steps": 10}), ANY)) == ["lr.decay_steps"]


@pytest.mark.parametrize("name", ["a/b", "", ".."])
def test_run_name_is_a_folder_name(make: Make, name: str) -> None:
    assert keys(check(make({"run_name": name}), ANY)) == ["run_name"]


def test_settings_without_effect_are_notes_and_not_errors(make: Make) -> None:
    config = make({"parallel.sequence_parallel": True, "pipeline.schedule": "gpipe"})
    assert check(config, ANY) == []
    found = [note for note in notes(config, ANY) if note.startswith("no effect")]
    assert len(found) == 3  # SP with tp 1, a schedule with pp 1, ZeRO with dp 1
