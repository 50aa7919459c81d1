"""The search gives legal layouts that fit, the fastest first, and says what to do if there is none."""

from __future__ import annotations

import random
import time

import pytest

from gpt3d.config.arithmetic import World, total_ranks
from gpt3d.config.problems import ConfigError
from gpt3d.config.rules import check
from gpt3d.planner.candidates import candidates
from gpt3d.planner.memory import GB, memory_by_stage
from gpt3d.planner.remedies import for_layout, for_model
from gpt3d.planner.search import Plan, largest, require_known, search
from gpt3d.planner.search_report import overrides, search_data, search_text
from tests.planner.conftest import Make


def test_405b_on_16384_gpus_within_seconds(make: Make) -> None:
    config = make("405b", {"cluster.nodes": 2048, "trainer.global_batch_size": 2048})
    began = time.process_time()
    found = search(config)
    assert time.process_time() - began < 10
    assert len(found.plans) == 10 and found.legal > 1000 > 0 < found.fitting < found.legal
    times = [plan.seconds for plan in found.plans]
    assert times == sorted(times)
    for plan in found.plans:
        assert check(plan.config, World(16_384, 8)) == [] and total_ranks(plan.config, World()) == 16_384
        assert max(m.total for m in memory_by_stage(plan.config, plan.dp)) <= 80 * GB
    assert isinstance(found.own, str) and "layers" in found.own  # 126 layers in 4 equal stages
    assert f"parallel.tp={found.plans[0].config.parallel.tp}" in search_text(found)


def test_candidates_are_legal_and_the_fullest_stage_is_found(make: Make) -> None:
    config = make("405b", {"cluster.nodes": 16, "trainer.global_batch_size": 64})
    every = list(candidates(config, 128))
    for candidate, dp in random.Random(0).sample(every, 150):
        assert [p for p in check(candidate, World(128, 8)) if p.key != "model"] == [], overrides(candidate)
        assert largest(candidate, dp) == max(m.total for m in memory_by_stage(candidate, dp)), overrides(candidate)


def test_the_users_own_layout_is_judged(make: Make) -> None:
    config = make("70b", {"cluster.nodes": 4, "trainer.global_batch_size": 16, "recompute": "full"})
    found = search(config)
    assert isinstance(found.own, Plan) and found.own.seconds > found.plans[0].seconds
    assert "times as long, most of it" in search_text(found)
    best = search(found.plans[0].config)
    assert "as good as the best" in search_text(best)
    data = search_data(found)
    assert data["own"]["seconds"]["total"] == found.own.seconds and len(data["plans"]) == len(found.plans)


def test_when_nothing_fits_the_cheapest_changes(make: Make) -> None:
    few = search(make("405b", {"cluster.nodes": 1, "cluster.host_memory_gb": 512.0}))
    assert few.plans == [] and few.legal > 0
    remedies = for_model(few.config, few.room)
    assert remedies and any(remedy.overrides[0].startswith("cluster.nodes=") for remedy in remedies)
    for remedy in remedies:
        nodes = remedy.gpus // 8
        assert max(m.total for m in memory_by_stage(remedy.plan.config, remedy.plan.dp)) <= 180 * GB, nodes
        assert str(remedy) in search_text(few, remedies) and remedy.plan.seconds > 0
    batch = search(make("405b", {"cluster.nodes": 2048, "trainer.global_batch_size": 16}))
    assert batch.legal == 0
    assert for_model(batch.config, batch.room)[0].overrides == ["trainer.global_batch_size=32"]


def test_changes_of_a_layout_that_does_not_fit(make: Make) -> None:
    """Each is planned: legal, within the memory, and slower or not as it says."""
    config = make("70b", {"cluster.nodes": 8, "trainer.global_batch_size": 64, "trainer.micro_batch_size": 4})
    room = require_known(config)
    assert not room.holds(config, 2)
    remedies = for_layout(config, 2, room)
    assert 2 <= len(remedies) <= 3
    assert [remedy.cost for remedy in remedies] == sorted(remedy.cost or 0 for remedy in remedies)
    assert remedies[0].overrides == ["trainer.micro_batch_size=1"]
    for remedy in remedies:
        plan = remedy.plan
        assert check(plan.config, World(remedy.gpus, 8)) == [], str(remedy)
        assert max(m.total for m in memory_by_stage(plan.config, plan.dp)) == plan.gb * GB <= 80 * GB
    fitting = make("70b", {"cluster.nodes": 8, "trainer.global_batch_size": 64})
    assert require_known(fitting).holds(fitting, 2)


def test_unknown_machines_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="cluster=h100"):
        search(make("70b", {"cluster.gpu": None}))
