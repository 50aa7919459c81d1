"""From YAML files and overrides to a typed RunConfig, and back to a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt3d.config.overrides import REFUSALS, diagnose, group_options, quote_overrides, refuse_silent, unknown_key
from gpt3d.config.problems import ConfigError, Problem
from gpt3d.config.schema import ModelConfig, RunConfig
from gpt3d.model.flops import parameter_count


def conf_dir() -> Path:
    """Folder of the YAML files: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no conf/config.yaml in {package} or beside it: the installation is incomplete")


def register_schema() -> None:
    """Make `gpt3d_schema` known to Hydra. Needed once before composing; repeating it is harmless."""
    ConfigStore.instance().store(name="gpt3d_schema", node=RunConfig, provider="gpt3d")
    OmegaConf.register_new_resolver("multiply", lambda *factors: math.prod(factors), replace=True)
    OmegaConf.register_new_resolver("steps_for_tokens_per_parameter", _steps, replace=True)


def _steps(tokens_per_parameter: float, *, _root_: DictConfig) -> int:
    """`${steps_for_tokens_per_parameter:20}`: steps that show the model so many tokens for each of its parameters."""
    model = OmegaConf.to_container(_root_.model, resolve=True)
    shape = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), model))
    assert isinstance(shape, ModelConfig)
    a_step = _root_.trainer.global_batch_size * _root_.data.seq_len
    return math.ceil(tokens_per_parameter * parameter_count(shape) / a_step)


def compose(overrides: Sequence[str] = (), config_name: str = "config") -> RunConfig:
    """The configuration for these command-line overrides, for tests and programs. Raises ConfigError."""
    register_schema()
    refuse_silent(overrides)
    overrides = quote_overrides(overrides, conf_dir())
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        try:
            return to_typed(hydra_compose(config_name, overrides))
        except ConfigError:
            raise
        except REFUSALS as error:
            raise ConfigError(diagnose(overrides, error, [conf_dir()])) from error


def to_typed(config: Any) -> RunConfig:
    """Resolved dataclasses from a composed or loaded config; all missing and unknown keys are refused together.

    `+model.foo=1` and `~model` get past the closed key set while Hydra composes: this is where they are caught.
    """
    node = config if isinstance(config, DictConfig) else OmegaConf.create(config)
    raw = OmegaConf.to_container(node, resolve=False)
    assert isinstance(raw, dict)
    problems = [problem for key in _paths(raw) if (problem := unknown_key(key, None)) is not None]
    if problems:
        raise ConfigError(problems)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), raw)
        if missing := _missing(OmegaConf.to_container(merged, resolve=False)):
            raise ConfigError(missing)
        plain = OmegaConf.to_container(merged, resolve=True)
        typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), plain))
    except OmegaConfBaseException as error:
        raise ConfigError(diagnose([], error, [])) from error
    assert isinstance(typed, RunConfig)
    return typed


def _paths(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and values of a nested dictionary."""
    paths: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        paths |= _paths(value, key + ".") if isinstance(value, dict) and value else {key: value}
    return paths


def _missing(tree: Any) -> list[Problem]:
    """A problem for each group that lacks values."""
    by_group: dict[str, list[str]] = {}
    for key, value in _paths(tree).items():
        if value == MISSING:
            by_group.setdefault(key.partition(".")[0], []).append(key)
    options = group_options([conf_dir()])
    return [
        Problem(
            group,
            None,
            f"no value for {', '.join(keys)}",
            f"pick an option: {group}={'|'.join(options[group])}" if group in options else f"set {group}=...",
        )
        for group, keys in by_group.items()
    ]


def save_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration as YAML; `load_config` reads it back equal, types included."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))


def load_config(path: Path) -> RunConfig:
    """Read what `save_config` wrote. Raises ConfigError for a file that isn't a run configuration."""
    if not path.is_file():
        raise ConfigError([Problem("config file", path, "there is no such file")])
    loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        raise ConfigError([Problem("config file", path, "is not a run configuration: it holds a list")])
    return to_typed(loaded)
