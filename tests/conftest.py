"""Shared by all tests: one fork server for the session, and the `world` fixture that runs a body on N ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch: ranks share few cores

from gpt3d import launch
from tests import world as world_module


@pytest.fixture(scope="session")
def _fork_server() -> None:
    launch.preload("pytest", "tests.world", "gpt3d.verification.compare")


@pytest.fixture
def world(_fork_server: None) -> Callable[..., list[Any]]:
    """world(fn, *args, n=2, timeout=60, init=True, **kwargs) -> results of the ranks; see tests/world.py."""
    return world_module.world
