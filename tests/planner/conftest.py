"""A GPT and a Llama configuration, composed once for all tests here."""

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
def composed() -> dict[str, RunConfig]:
    shared = ["precision=bf16", "cluster=h100", "parallel=tp8_pp4", "zero=1", "trainer.micro_batch_size=1"]
    return {name: compose([f"model={name}", *shared]) for name in ("70b", "405b", "175b")}


@pytest.fixture
def make(composed: dict[str, RunConfig]) -> Make:
    """`make("70b", {"parallel.tp": 2})`: that model with tp 8, pp 4, ZeRO 1, bf16 on H100s, and these keys changed."""

    def build(name: str, changes: dict[str, Any] | None = None) -> RunConfig:
        config = copy.deepcopy(composed[name])
        for key, value in (changes or {}).items():
            parent, _, last = key.rpartition(".")
            holder = attrgetter(parent)(config) if parent else config
            assert hasattr(holder, last), key
            setattr(holder, last, value)
        return config

    return build
