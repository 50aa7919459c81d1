"""The YAML files: every option composes, every key is explained, the published sizes are exact."""

from __future__ import annotations

import re

import pytest

from gpt3d.config.arithmetic import World, stage_layers
from gpt3d.config.load import compose, conf_dir
from gpt3d.config.overrides import group_options
from gpt3d.config.rules import check, limits
from gpt3d.config.schema import RunConfig, leaves
from gpt3d.model.flops import parameter_count
from tests.config.conftest import Options


def test_every_option_composes_within_its_limits(options: Options) -> None:
    groups = {name.partition("=")[0] for name in options}
    assert groups | {"experiment", "debug", "sweep"} == set(group_options([conf_dir()]))
    for option, config in options.items():
        assert list(limits(config)) == [], option


def test_default_run() -> None:
    config = compose()
    assert check(config, World(gpus=0, device="cpu", host_memory_gb=8)) == []
    assert (config.model.name, config.parallel.tp, config.parallel.pp, config.zero.stage) == ("tiny", 2, 2, 1)
    assert (config.precision.dtype, config.data.seq_len, config.trainer.steps) == ("fp32", 128, 300)


def test_issue_s_options_exist() -> None:
    options = group_options([conf_dir()])
    models = "tiny 125m 350m 760m 1.3b 2.7b 6.7b 13b 175b 1b 3b 8b 70b 405b"
    assert set(models.split()) == set(options["model"])
    layouts = "single dp2 dp4 tp2 tp4 tp2_dp2 pp2 pp4 tp2_pp2 tp2_pp2_dp2 tp8 tp8_pp2 tp8_pp4 tp8_pp8 tp8_pp16 auto"
    assert set(layouts.split()) == set(options["parallel"])
    assert options["zero"] == ["0", "1", "2", "3", "3_offload", "auto"]
    assert {"local", "a100", "a100_40gb", "h100", "h200", "b200"} == set(options["cluster"])


def test_every_key_is_explained() -> None:
    """Each schema key has a comment beside it or above it in one of its group's files."""
    missing = []
    for leaf in leaves():
        group, _, rest = leaf.key.partition(".")
        files = sorted((conf_dir() / group).glob("*.yaml")) if rest else [conf_dir() / "config.yaml"]
        name = leaf.key.rpartition(".")[2]
        beside = re.compile(rf"^ *{name}:.*\s#\s\S", re.MULTILINE)
        above = re.compile(rf"^ *#.*\n *{name}:", re.MULTILINE)
        optimizer_name = leaf.key == "optimizer.name"
        texts = [file.read_text() for file in files]
        if not optimizer_name and not any(beside.search(text) or above.search(text) for text in texts):
            missing.append(leaf.key)
    assert missing == []


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("125m", 125_226_240),
        ("175b", 174_604_259_328),
        ("1b", 1_235_814_400),
        ("3b", 3_212_749_824),
        ("8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        ("405b", 405_853_388_800),
    ],
)
def test_parameter_counts(options: Options, model: str, count: int) -> None:
    assert parameter_count(options[f"model={model}"].model) == count


@pytest.mark.parametrize(
    ("model", "billions"), [("350m", 0.35), ("760m", 0.76), ("1.3b", 1.3), ("2.7b", 2.7), ("6.7b", 6.7), ("13b", 13)]
)
def test_gpt3_sizes_are_what_their_names_say(options: Options, model: str, billions: float) -> None:
    shape = options[f"model={model}"].model
    assert parameter_count(shape) / 1e9 == pytest.approx(billions, rel=0.03)
    assert shape.num_heads * shape.head_dim == shape.hidden_size
    assert shape.ffn_hidden_size == 4 * shape.hidden_size


def test_zero_3_offload_is_the_classic_deepspeed_json(options: Options) -> None:
    zero = options["zero=3_offload"].zero
    assert (zero.stage, zero.offload_optimizer, zero.offload_param) == (3, "cpu", "cpu")
    assert zero.pin_memory and zero.overlap_comm and zero.contiguous_gradients
    assert zero.reduce_bucket_size == zero.allgather_bucket_size == zero.prefetch_bucket_size == 500_000_000


def test_zero_by_number(options: Options) -> None:
    assert [options[f"zero={stage}"].zero.stage for stage in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("experiment", "world"),
    [
        ("gpt3_125m_h200", World(gpus=1, device="cuda")),
        ("llama3_70b_h100", World(ranks=128, ranks_per_node=8)),
        ("lr_sweep", World(gpus=0, device="cpu")),
        ("layout_sweep", World(gpus=0, device="cpu")),
        ("scaling", World(gpus=0, device="cpu")),
    ],
)
def test_experiments_pass_the_rules(experiment: str, world: World) -> None:
    assert check(compose([f"experiment={experiment}"]), world) == []


def test_debug_presets() -> None:
    fast, kill = compose(["debug=fast"]), compose(["debug=kill_rank"])
    assert (fast.trainer.steps, fast.debug.fault) == (5, "none")
    assert (kill.trainer.steps, kill.debug.fault, kill.debug.fault_rank) == (300, "kill", 1)


def test_large_models_compose_with_their_layouts() -> None:
    large = ["cluster=b200", "cluster.nodes=16", "precision=bf16"]
    fits: RunConfig = compose(["model=405b", "parallel=tp8_pp16", *large])  # the option asks for uneven stages
    assert check(fits, World()) == [] and stage_layers(fits) == [7, *[8] * 14, 7]
    assert stage_layers(compose(["model=70b", "parallel=tp8_pp16", *large])) == [5] * 16
    problems = check(compose(["model=405b", "parallel=tp8_pp8", *large]), World())  # this one doesn't
    assert [p.key for p in problems] == ["parallel.pp"]
    split = re.search(r"parallel\.layers_per_stage=\[[\d,]+\]", problems[0].fix)
    assert split is not None
    for fix in (split[0], "parallel.allow_uneven_stages=true"):
        mended = compose(["model=405b", "parallel=tp8_pp8", *large, fix])
        assert check(mended, World()) == [] and stage_layers(mended) == [15, *[16] * 6, 15]
