"""A valid configuration to spoil: composed once, copied for each test."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest

from gpt3d.config.load import compose, conf_dir
from gpt3d.config.overrides import group_options
from gpt3d.config.schema import RunConfig

Make = Callable[..., RunConfig]
Options = dict[str, RunConfig]


@pytest.fixture(scope="session")
def composed() -> RunConfig:
    return compose(["parallel=single"])


@pytest.fixture(scope="session")
def options() -> dict[str, RunConfig]:
    """Every option of every group, "model=70b" -> a configuration with it: the i-th options of all groups are composed
    together, from the first again where a group has fewer. What changes other groups is left out."""
    groups = {
        group: names
        for group, names in group_options([conf_dir()]).items()
        if group not in ("experiment", "debug", "sweep")
    }
    found = {}
    for i in range(max(map(len, groups.values()))):
        chosen = [f"{group}={names[i % len(names)]}" for group, names in groups.items()]
        config = compose(chosen)
        found.update(dict.fromkeys(chosen, config))
    return found


@pytest.fixture
def make(composed: RunConfig) -> Make:
    """`make({"parallel.tp": 2})`: the default configuration on one rank with these keys changed."""

    def build(changes: dict[str, Any] | None = None) -> RunConfig:
        config = copy.deepcopy(composed)
        for key, value in (changes or {}).items():
            parent, _, name = key.rpartition(".")
            holder = attrgetter(parent)(config) if parent else config
            assert hasattr(holder, name), key
            setattr(holder, name, value)
        return config

    return build
