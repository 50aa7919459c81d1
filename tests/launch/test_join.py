"""Ranks that a launcher started: the environments, the meeting, the common end."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from gpt3d.launch import LaunchError, RankFailed, World, joining
from gpt3d.launch.environment import expand_counts, expand_hosts, read
from gpt3d.launch.rank_map import check_rank_map
from tests.launch import bodies

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
CONFIG = {"lr": 0.5, "cluster": {"device": "cpu", "nodes": 1}}


def test_a_plain_shell_is_no_world():
    assert read({}) is None
    assert read({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"}) is None, "a batch script is not a step"
    assert read(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None, "srun --pty bash"
    assert read(OPENMPI | {"OMPI_COMM_WORLD_SIZE": "1"}) is None
    assert read({"PMI_RANK": "0", "PMI_SIZE": "1"}) is None, "srun --mpi=pmi2 --pty bash"


def test_every_launcher_gives_the_same_world():
    assert read(TORCHRUN) == World("torchrun", 5, 8, 1, 4, 2, "node0", 1234)
    slurm = read(SLURM | {"MASTER_PORT": "1234"})
    assert slurm == World("Slurm", 5, 8, 1, 4, 2, "gpu08", 1234)
    assert read(OPENMPI | {"MASTER_PORT": "1234"}) == World("Open MPI", 1, 2, 1, 2, 1, "127.0.0.1", 1234)
    assert read(MPICH | {"MASTER_PORT": "1234"}) == World("MPICH", 1, 2, 1, 2, 1, "127.0.0.1", 1234)
    assert read(SLURM | {"MASTER_ADDR": ""}) == read(SLURM), "set, but empty"
    assert read(TORCHRUN | SLURM) == read(TORCHRUN), "torchrun inside an srun step"
    assert read(TORCHRUN).variables() == {k: v for k, v in TORCHRUN.items() if k != "GROUP_WORLD_SIZE"}


def test_the_port_follows_from_the_job():
    def port(job: str) -> int:
        world = read(SLURM | {"SLURM_JOB_ID": job})
        assert world is not None
        return world.port

    assert port("77") == port("77") and len({port(str(job)) for job in range(50)}) > 45


def test_slurm_lists():
    assert expand_hosts("gpu[08-10,12],login1") == ["gpu08", "gpu09", "gpu10", "gpu12", "login1"]
    assert expand_hosts("r[1-2]n[5]") == ["r1n5", "r2n5"]
    assert expand_counts("4(x2),1") == [4, 4, 1]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        (TORCHRUN | {"WORLD_SIZE": "16"}, "2 nodes x 4 processes are 8"),
        (TORCHRUN | {"RANK": "eight"}, "RANK=eight: expected a whole number"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 of 8"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4"}, "started 8 tasks.*places 4 on 1 nodes"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, "SLURM_STEP_NODELIST is not set"),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun -x MASTER_ADDR"),
        (MPICH | {"PMI_SIZE": "4"}, "-genv MASTER_ADDR"),
        (SLURM | {"SLURM_NODEID": "-1"}, "node number -1"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[a-b]"}, "cannot read the nodes"),
        ({k: v for k, v in OPENMPI.items() if not k.endswith("LOCAL_SIZE")}, "OMPI_COMM_WORLD_LOCAL_SIZE is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALNRANKS is not set"),
    ],
)
def test_no_guessing(env, words):
    """LAU-01: no silent fallback to localhost, sizes are compared."""
    with pytest.raises(LaunchError, match=words):
        read(env)


def test_a_broken_environment_ends_the_command_with_one_message(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="gpt3d: WORLD_SIZE is not set"):
        joining()


def test_rank_map():
    """LAU-01: distinct hosts are counted, and the map is shown."""
    world = read(TORCHRUN)
    good = [("a", i) for i in range(4)] + [("b", i) for i in range(4)]
    shown = check_rank_map(good, world, asked_nodes=2, own_gpu=True)
    assert shown == "8 ranks on 2 hosts (torchrun): a: 0-3; b: 4-7"
    same_host = [("a", i % 4) for i in range(8)]
    with pytest.raises(LaunchError, match=r"promises 2 node.*run on 1: .*a: 0-7"):
        check_rank_map(same_host, world, asked_nodes=2, own_gpu=True)
    assert "1 host " in check_rank_map(same_host, world, asked_nodes=2, own_gpu=False)
    twice = [*good[:7], ("b", 2)]
    with pytest.raises(LaunchError, match=r"ranks 6-7 would share GPU 2 of b"):
        check_rank_map(twice, world, asked_nodes=2, own_gpu=True)
    with pytest.raises(LaunchError, match=r"cluster\.nodes=1, but torchrun started 2"):
        check_rank_map(good, world, asked_nodes=1, own_gpu=False)


def slurm_step(size: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "{rank}",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "here",
        "MASTER_PORT": str(port),
    }


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def output(tmp_path):
    """output(rank) -> what a joined rank wrote to stdout and stderr."""
    return lambda rank: tuple((tmp_path / f"{rank}.{kind}").read_text() for kind in ("out", "err"))


@pytest.mark.parametrize("launcher", ["agent", "slurm"])
def test_all_ranks_train_with_rank_0s_config(world, tmp_path, output, port, launcher):
    variables = slurm_step(2, port) if launcher == "slurm" else {}
    assert world(bodies.joined, tmp_path, CONFIG, variables, n=2, init=False) == [0, 0]
    name = {"agent": "torchrun", "slurm": "Slurm"}[launcher]
    shown = f"2 ranks on 1 host ({name}): {socket.gethostname()}: 0-1"
    assert output(0)[0].splitlines() == [shown, "rank 0 trains with lr 0.5"]
    assert output(1)[0].splitlines() == ["rank 1 trains with lr 0.5"]


@pytest.mark.parametrize(("composed", "code"), [(None, 0), (3, 3)])
@pytest.mark.parametrize("launcher", ["agent", "slurm"])
def test_all_end_with_a_rank_0_that_does_not_train(world, tmp_path, output, port, launcher, composed, code):
    """--help, --cfg and a wrong override end every rank at once, quietly, with one code."""
    variables = slurm_step(2, port) if launcher == "slurm" else {}
    assert world(bodies.joined, tmp_path, composed, variables, n=2, init=False) == [code, code]
    assert output(0) == output(1) == ("", "")


def test_a_failing_joined_rank_ends_all_and_is_shown_once(world, tmp_path, output):
    """Rank 0 is stuck; no launcher helps here, for rank 1's process stays."""
    with pytest.raises(RankFailed, match="rank 0 ended without a result or a traceback, exit code 1"):
        world(bodies.joined, tmp_path, CONFIG | {"stuck_on": 0, "fail_on": 1}, {}, n=2, init=False, timeout=30)
    assert output(1)[1].startswith("rank 1 failed with ValueError: boom\nTraceback") and "in train" in output(1)[1]
    assert output(0)[1] == "rank 0 stopped because rank 1 failed\n"


def test_sigterm_ends_all_quietly(world, tmp_path, output):
    config = CONFIG | {"wait_on": 0, "stop_on": 1}
    assert world(bodies.joined, tmp_path, config, {}, n=2, init=False, timeout=30) == [143, 143]
    assert output(0)[1] == output(1)[1] == ""


def test_a_wrong_number_of_nodes_ends_all(world, tmp_path, output):
    config = {"lr": 0.5, "cluster": {"device": "cpu", "nodes": 2}}
    assert world(bodies.joined, tmp_path, config, {}, n=2, init=False) == [1, 1]
    assert output(0)[1].startswith("gpt3d: cluster.nodes=2, but torchrun started 1 node")
    assert output(1) == ("", "")


def test_the_start_limit_names_host_and_port(world, tmp_path, output, port):
    """LAU-01: nobody hosts the store; the port is taken."""
    variables = slurm_step(2, port) | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    assert world(bodies.joined, tmp_path, CONFIG, variables, 1.0, n=1, init=False) == [1]
    assert f"could not meet the others at 127.0.0.1:{port}" in output(0)[1] and "limit 1 s" in output(0)[1]
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        used = taken.getsockname()[1]
        assert world(bodies.joined, tmp_path, CONFIG, slurm_step(2, used), 1.0, n=1, init=False) == [1]
    assert f":{used}" in output(0)[1] and "port is taken" in output(0)[1]


def test_a_host_that_is_not_known_here_is_named_at_once(world, tmp_path, output, port):
    variables = slurm_step(2, port) | {"MASTER_ADDR": "no-such-host.invalid", "SLURM_PROCID": "1"}
    assert world(bodies.joined, tmp_path, CONFIG, variables, 1.0, n=1, init=False) == [1]
    said = output(0)[1]
    assert "finds no host named no-such-host.invalid" in said and "MASTER_ADDR" in said and "NodeAddr" in said
    assert len(said.splitlines()) == 1


def test_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, "-m", "tests.launch.bodies"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 ranks on 1 host (torchrun)" in done.stdout
    assert all(f"rank {rank} trains with lr 0.5" in done.stdout for rank in range(2))
