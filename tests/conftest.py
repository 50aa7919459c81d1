"""Shared by all tests: one fork server for the session, and the `world` fixture that runs a body on N ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch: ranks share few cores

from gpt3d import launch
from tests import world as world_module

# The same examples every time, and no clock: what fails, fails everywhere. For new ones: --hypothesis-profile=default
settings.register_profile("suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

SLOW = Path(__file__).with_name("slow.txt")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that slow.txt lists, before `-m` looks at the marks. A line that is no test is an error."""
    listed = {line for line in SLOW.read_text().splitlines() if line and not line.startswith("#")}
    for item in items:
        if item.nodeid in listed:
            item.add_marker("slow")
    files = {item.nodeid.partition("::")[0] for item in items}
    gone = listed - {item.nodeid for item in items} if config.args == config.getini("testpaths") else set()
    if stale := sorted(line for line in gone if line.partition("::")[0] in files):
        raise pytest.UsageError(f"{SLOW}: no such test: {stale[0]}")


@pytest.fixture(scope="session")
def _fork_server() -> None:
    launch.preload("pytest", "tests.world", "gpt3d.verification.compare")


@pytest.fixture
def world(_fork_server: None) -> Callable[..., list[Any]]:
    """world(fn, *args, n=2, timeout=60, init=True, **kwargs) -> results of the ranks; see tests/world.py."""
    return world_module.world
