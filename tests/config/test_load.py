"""Composition, typing and files: types survive, mistakes are one message, nothing of torch is imported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from gpt3d.config.load import compose, conf_dir, load_config, save_config, to_typed
from gpt3d.config.overrides import mistakes, quote_overrides
from gpt3d.config.problems import ConfigError


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose(overrides)
    return str(error.value)


def test_round_trip_keeps_values_and_types(tmp_path: Path) -> None:
    config = compose(["optimizer.lr=1e-4", "optimizer.eps=1e-12", "run_name=1e5", "parallel.layers_per_stage=[4]"])
    config.zero.deepspeed = {"a": {"b": 5e8, "c": "5e8", "d": None}}
    config.cluster.env = {"X": "007"}
    save_config(config, tmp_path / "config.yaml")
    loaded = load_config(tmp_path / "config.yaml")
    assert loaded == config
    assert type(loaded.optimizer.lr) is float and type(loaded.optimizer.eps) is float
    assert (loaded.run_name, loaded.cluster.env["X"], loaded.zero.deepspeed["a"]["c"]) == ("1e5", "007", "5e8")


def test_loading_refuses_what_the_schema_does_not_know(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    save_config(compose(), file)
    file.write_text(file.read_text().replace("vocab_size:", "vocab_sizee:"))
    with pytest.raises(ConfigError, match=r"model\.vocab_sizee(.|\n)*nearest: model\.vocab_size"):
        load_config(file)
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "nothing.yaml")


def test_all_mistakes_in_overrides_are_reported_together() -> None:
    text = message("model.n_layer=3", "model=70B", "optimizer.lr=abc", "trainer.stepss=3", "zero=1")
    assert "has 4 problems" in text
    for expected in ("model.num_layers", "did you mean 70b", "give a number", "trainer.steps"):
        assert expected in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model=70", "did you mean 70b"),
        ("zero=4", "zero is one of: 0, 1, 2, 3, 3_offload"),
        ("zero=null", "no such option"),
        ("experiment=nope", "experiment is one of"),
        ("steps=4", "nearest: trainer.steps"),
        ("lr=1e-4", "no such option"),
        ("trainer.steps=1.5", "give an integer"),
        ("model.bias=maybe", "give true or false"),
        ("+model.foo=1", "model.foo"),
        ("zero.deepspeed.a=1", "+zero.deepspeed.a=1"),
        ("~zero", "pick an option: zero=0|1|2|3|3_offload"),
        ("~model", "pick an option: model="),
        ("70b", "write key=value"),
        ("optimizer.lr=1,2", "add -m"),
        ("nogroup/x=1", "no such config group"),
        ("zero=[1,2]", "zero is one of"),
        ("+=", "write key=value"),
        ("model.bias=2", "give true or false"),
        ("zero.reduce_bucket_size=5e8", "as an integer: zero.reduce_bucket_size=500000000"),
        ("run_name=${model.nme}", "run_name: Interpolation key 'model.nme' not found"),
        ("run_name=${nope:1}", "run_name: Unsupported interpolation type nope"),
        ("run_name=${oc.env:GPT3D_UNSET}", "'GPT3D_UNSET' not found"),
        ("model.num_layers=${model.num_layers}", "Recursive interpolation"),
    ],
)
def test_one_clear_message(override: str, expected: str) -> None:
    text = message(override)
    assert expected in text
    assert "Traceback" not in text and "full_key" not in text and "http" not in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model={a:b}", "model is one of"),
        ("experiment=null", "leave it out"),
        ("nonsensical=x", "groups and keys: checkpoint, cluster"),
        ("+zero=2", "without the plus: zero=2"),
        ("+model.name=x", "without the plus: model.name=x"),
        ("~zero=1", "pick another option: zero=0|1|2|3|3_offload"),
        ("~model.name", "can't be removed"),
        ("~nonsensical", "no such key"),
        ("=3", "write key=value"),
        ("~", "write key=value"),
        ("zero = 1", "'zero ' is not the name of a key"),
        ("zero..stage=1", "'zero..stage' is not the name of a key"),
        ("parallel.layers_per_stage=4", "a list, [2,2] or null"),
        ("data.paths=x", "a list, [a,b]"),
        ("parallel.layers_per_stage=[null,4]", "a list, [2,2] or null"),
        ("cluster.env={A:5}", "+cluster.env={A:5}"),
        ("+cluster.env.A=[1]", "give text"),
        ("zero.deepspeed=5", "keys with values, {a:b}"),
    ],
)
def test_what_is_wrong_is_told_from_the_override_alone(override: str, expected: str) -> None:
    """The kinds of mistakes that Hydra answers with its internals."""
    (problem,) = mistakes(quote_overrides([override], conf_dir()), [conf_dir()])
    assert expected in str(problem)


def test_a_typing_error_in_a_yaml_file_is_named(tmp_path: Path) -> None:
    config = OmegaConf.create(OmegaConf.to_yaml(OmegaConf.structured(compose())))
    config.model.pop("num_layers")
    config.optimizer.lr = "fast"
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        to_typed(config)
    config.optimizer.lr = 0.1
    with pytest.raises(ConfigError, match=r"no value for model\.num_layers"):
        to_typed(config)


class TestHyd01:
    """HYD-01: values that Hydra's grammar reads in another way than they were meant."""

    @pytest.mark.parametrize("name", ["1e5", "007", "true", "null_", "a=b", "epoch=3-step=80", "x#1", "1_000", "nan"])
    def test_text_keys_keep_what_was_typed(self, name: str) -> None:
        (override,) = quote_overrides([f"run_name={name}"], conf_dir())
        assert OverridesParser.create().parse_override(override).value() == name

    def test_paths_need_no_quoting(self) -> None:
        config = compose(["data.cache_dir=/x/#1/a=b", "run_name='a,b'"])
        assert (config.data.cache_dir, config.run_name) == ("/x/#1/a=b", "a,b")
        config = compose(["data.cache_dir=null", "run_name=${model.name}_x"])
        assert (config.data.cache_dir, config.run_name) == (None, "tiny_x")

    @pytest.mark.parametrize("override", ["optimizer.lr=a=b", "optimizer.lr=#1"])
    def test_the_error_shows_the_quoted_form(self, override: str) -> None:
        key, _, value = override.partition("=")
        assert f"'{key}=\"{value}\"'" in message(override)

    def test_a_comma_without_m_says_both_ways_out(self) -> None:
        text = message("run_name=a,b")
        assert "add -m" in text and "'run_name=\"a,b\"'" in text

    def test_numbers_stay_numbers(self) -> None:
        assert compose(["optimizer.lr=1e-4"]).optimizer.lr == 1e-4


@pytest.mark.parametrize("installed", [False, True])
def test_works_from_any_folder_and_without_torch(installed: bool, tmp_path: Path) -> None:
    """From a checkout, and with the files where a wheel puts them; neither torch nor DeepSpeed is imported."""
    root = conf_dir().parent
    if installed:
        root = tmp_path / "site"
        shutil.copytree(conf_dir().parent / "gpt3d", root / "gpt3d", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(conf_dir(), root / "gpt3d" / "conf")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from gpt3d.config.load import compose, conf_dir\n"
        "from gpt3d.config.arithmetic import World\n"
        "from gpt3d.config.rules import check\n"
        "import gpt3d.config.cli, gpt3d.config.notes\n"
        "assert check(compose(['zero=2']), World()) == []\n"
        "assert not {'torch', 'deepspeed'} & set(sys.modules)\n"
        "print(conf_dir())"
    )
    done = subprocess.run([sys.executable, "-c", program, str(root)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == (root / "gpt3d" / "conf" if installed else root / "conf")
