"""A valid configuration to spoil: composed once, copied for each test."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest

from gpt3d.config.load import compose
from gpt3d.config.schema import RunConfig

Make = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def composed() -> RunConfig:
    return compose(["parallel=single"])


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
