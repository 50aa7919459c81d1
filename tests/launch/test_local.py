"""run_ranks: results, the rank to blame, hangs."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch

from gpt3d import launch
from gpt3d.launch import RankFailed, run_ranks
from tests.launch import bodies
from tests.launch.processes import gone


def test_results_in_rank_order(world):
    assert world(bodies.all_reduce, 2.0, n=3) == [6.0, 6.0, 6.0]
    ranks = world(bodies.environment, n=2, init=False)
    assert [env["LOCAL_RANK"] for env in ranks] == ["0", "1"]


def test_ranks_see_the_environment_of_now(world, monkeypatch):
    world(bodies.environment, n=1, init=False)  # the fork server runs
    monkeypatch.setenv("SET_LATER", "yes")
    assert world(bodies.environment, n=1, init=False)[0]["SET_LATER"] == "yes"


@pytest.mark.parametrize("threads", ["2,1", "many"])
def test_a_thread_count_that_is_no_number(world, monkeypatch, threads):
    """OpenMP takes a list for nested regions, and passes over what it cannot read."""
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert world(torch.get_num_threads, n=1, init=False)[0] == (2 if threads == "2,1" else torch.get_num_threads())


def test_the_failing_rank_is_shown_once(world):
    with pytest.raises(RankFailed) as failure:
        world(bodies.act_on, 2, "raise", n=3)
    text = str(failure.value)
    assert failure.value.rank == 2 and failure.value.error_type == "ValueError"
    assert text.count("Traceback") == 1
    assert text.startswith("rank 2 failed with ValueError: boom") and "in act_on" in text
    assert "gpt3d/launch" not in text, "our own frames help nobody"


def test_a_users_mistake_is_one_message(world):
    with pytest.raises(RankFailed) as failure:
        world(bodies.act_on, 0, "mistake")
    said = str(failure.value).splitlines()
    assert said[:2] == ["rank 0 failed with UserMistake: two mistakes:", "data.seq_len=0: use a positive length"]
    assert "Traceback" not in str(failure.value) and str(failure.value).count("two mistakes") == 1


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (str(int(signal.SIGKILL)), "rank 1 was killed by SIGKILL"),
        (str(int(signal.SIGTERM)), "rank 1 was ended by SIGTERM"),
        (str(int(signal.SIGSEGV)), "rank 1 was killed by SIGSEGV"),
        ("exit", "rank 1 ended without a result or a traceback, exit code 9"),
    ],
)
def test_a_rank_that_dies_is_the_cause_and_leaves_no_process(world, tmp_path, action, words):
    pid_file = tmp_path / "pid"
    with pytest.raises(RankFailed, match=words) as failure:
        world(bodies.act_on, 1, action, pid_file, n=3)
    assert gone([int(pid_file.read_text())]), "a worker of the dead rank lives on"
    if action == str(int(signal.SIGSEGV)):
        assert "in act_on" in str(failure.value)


def test_a_hang_shows_where(world):
    for limit in (1, 4, 16):  # a busy machine may not have brought the ranks there within the first
        with pytest.raises(RankFailed, match=f"no end after {limit} s; still running: ranks 0, 1") as failure:
            world(bodies.hang, init=False, timeout=limit)
        if str(failure.value).count("in hang") == 2:
            return
    pytest.fail(str(failure.value))


def test_start_gives_rank_0s_result_and_keeps_the_other_logs(tmp_path, capfd, world):
    config = {"lr": 0.25, "cluster": {"env": {"EXTRA": "1"}}}
    result = launch.start(bodies.train, config, nprocs=2, device="cpu", run_dir=tmp_path)
    assert result == {"rank": 0, "total": 1.0}
    assert (tmp_path / "logs" / "rank1.log").read_text() == "rank 1 trains with lr 0.25\n"
    assert not (tmp_path / "logs" / "rank0.log").exists()
    with pytest.raises(RankFailed, match="boom"):
        launch.start(bodies.train, config | {"fail_on": 1}, nprocs=2, device="cpu", run_dir=tmp_path)
    assert "ValueError: boom" in (tmp_path / "logs" / "rank1.log").read_text()


def test_deepspeed_starts_without_compiling_or_chatter(tmp_path, world):
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    losses = run_ranks(bodies.deepspeed_step, nprocs=2, timeout=60, log_dir=tmp_path, env=env)
    assert all(0 < loss < 100 for loss in losses)
    assert not (tmp_path / "extensions").exists(), "a C++ extension was built"
    assert (tmp_path / "rank1.log").read_text() == ""


def test_what_cannot_be_sent_is_said_before_any_start():
    with pytest.raises(TypeError, match="top level of an importable module"):
        run_ranks(lambda: None, nprocs=1)
    with pytest.raises(ValueError, match="'tpu'"):
        run_ranks(os.getpid, nprocs=1, device="tpu")


def test_ranks_do_not_load_the_command_that_started_them(world):
    assert world(main_file, n=1, init=False) == [None]


def main_file() -> str | None:
    return getattr(sys.modules["__main__"], "__file__", None)
