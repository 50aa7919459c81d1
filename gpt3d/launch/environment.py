"""What torchrun, a Slurm step or MPI's mpirun tell a process about its world, in one form.

Nothing is guessed: where the address of rank 0 cannot be known, one error says what to set.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

PORT_RANGE = range(15000, 31000)  # below the ports that systems hand out by themselves


@dataclass(frozen=True)
class Mpi:
    """The variables that an MPI's mpirun sets."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


MPIS = (
    Mpi(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Mpi("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Intel MPI and MVAPICH, too
)


class LaunchError(RuntimeError):
    """The launcher's environment does not describe one world."""

    show_traceback = False


@dataclass(frozen=True)
class World:
    """This process's place: rank of size, local rank of local size, and where rank 0 keeps the store."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    nodes: int
    host: str
    port: int

    def variables(self) -> dict[str, str]:
        """The world as the variables that torch reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def read(env: Mapping[str, str]) -> World | None:
    """The world a launcher started this process in; None in a plain shell. torchrun's variables win over the others."""
    if "RANK" in env or "WORLD_SIZE" in env:
        world = _torchrun(env)
    elif "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and _slurm_tasks(env) > 1:
        world = _slurm(env)
    else:
        mpi = next((mpi for mpi in MPIS if mpi.rank in env or mpi.size in env), None)
        if mpi is None or _integer(env, mpi.size) == 1:
            return None
        world = _mpi(env, mpi)
    _check(world)
    return world


def expand_hosts(nodelist: str) -> list[str]:
    """Host names of a Slurm list: "gpu[01-03,7],login1" gives gpu01, gpu02, gpu03, gpu7, login1."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        hosts += _expand(item)
    return hosts


def expand_counts(counts: str) -> list[int]:
    """Tasks on each node of a Slurm step: "4(x2),1" gives 4, 4, 1."""
    result: list[int] = []
    for item in counts.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if found is None:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={counts}: cannot read {item!r}; expected for example 4(x2),1")
        result += [int(found[1])] * int(found[2] or 1)
    return result


def _torchrun(env: Mapping[str, str]) -> World:
    size, local_size = _integer(env, "WORLD_SIZE"), _integer(env, "LOCAL_WORLD_SIZE")
    return World(
        launcher="torchrun",
        rank=_integer(env, "RANK"),
        size=size,
        local_rank=_integer(env, "LOCAL_RANK"),
        local_size=local_size,
        nodes=_integer(env, "GROUP_WORLD_SIZE") if "GROUP_WORLD_SIZE" in env else -(-size // max(1, local_size)),
        host=_text(env, "MASTER_ADDR"),
        port=_integer(env, "MASTER_PORT"),
    )


def _slurm_tasks(env: Mapping[str, str]) -> int:
    return _integer(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")


def _slurm(env: Mapping[str, str]) -> World:
    counts = expand_counts(_text(env, "SLURM_STEP_TASKS_PER_NODE"))
    size, node = _slurm_tasks(env), _integer(env, "SLURM_NODEID")
    if sum(counts) != size or not 0 <= node < len(counts):
        raise LaunchError(
            f"Slurm started {size} tasks, this one on node number {node}, but SLURM_STEP_TASKS_PER_NODE="
            f"{env['SLURM_STEP_TASKS_PER_NODE']} places {sum(counts)} on {len(counts)} nodes"
        )
    host = env.get("MASTER_ADDR")
    if not host:
        host = "127.0.0.1" if len(counts) == 1 else expand_hosts(_text(env, "SLURM_STEP_NODELIST"))[0]
    step = f"{_text(env, 'SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    return World(
        launcher="Slurm",
        rank=_integer(env, "SLURM_PROCID"),
        size=size,
        local_rank=_integer(env, "SLURM_LOCALID"),
        local_size=counts[node],
        nodes=len(counts),
        host=host,
        port=_port(env, step),
    )


def _mpi(env: Mapping[str, str], mpi: Mpi) -> World:
    size, local_size = _integer(env, mpi.size), _integer(env, mpi.local_size)
    host = env.get("MASTER_ADDR")
    if not host:
        if local_size != size:
            raise LaunchError(
                f"{mpi.name} started {size} ranks on several nodes but does not say where rank 0 is: "
                "give them MASTER_ADDR=<host of rank 0> (mpirun -x MASTER_ADDR=... or -genv MASTER_ADDR ...)"
            )
        host = "127.0.0.1"
    return World(
        launcher=mpi.name,
        rank=_integer(env, mpi.rank),
        size=size,
        local_rank=_integer(env, mpi.local_rank),
        local_size=local_size,
        nodes=-(-size // max(1, local_size)),
        host=host,
        port=_port(env, env.get("PMIX_NAMESPACE", "")),
    )


def _port(env: Mapping[str, str], job: str) -> int:
    """MASTER_PORT, or one that follows from the job's name: jobs that share a node do not meet."""
    if "MASTER_PORT" in env:
        return _integer(env, "MASTER_PORT")
    return PORT_RANGE[zlib.crc32(job.encode()) % len(PORT_RANGE)]


def _check(world: World) -> None:
    if not (0 <= world.rank < world.size and 0 <= world.local_rank < world.local_size):
        raise LaunchError(
            f"{world.launcher} gave rank {world.rank} of {world.size} and local rank {world.local_rank} of "
            f"{world.local_size}: a rank must be below its size"
        )
    if world.launcher != "Slurm" and world.nodes * world.local_size != world.size:  # Slurm's counts are compared above
        raise LaunchError(
            f"{world.launcher} gave a world of {world.size} ranks, but {world.nodes} nodes x {world.local_size} "
            f"processes are {world.nodes * world.local_size}: start the same number of processes on every node"
        )
    if not 0 < world.port < 2**16:
        raise LaunchError(f"MASTER_PORT={world.port}: a port is between 1 and 65535")


def _expand(item: str) -> list[str]:
    found = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", item)
    if found is None:
        return [item]
    names: list[str] = []
    for part in found[2].split(","):
        low, _, high = part.partition("-")
        if not low.isdigit() or not (high or low).isdigit():
            raise LaunchError(f"cannot read the nodes {item!r} of Slurm's list; expected for example gpu[01-03,7]")
        numbers = [str(n).zfill(len(low)) for n in range(int(low), int(high or low) + 1)]
        names += [f"{found[1]}{number}{rest}" for number in numbers for rest in _expand(found[3])]
    return names


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise LaunchError(
            f"{name} is not set, though other variables of a distributed launcher are: start with torchrun, srun or "
            "mpirun, or, for local ranks, from a shell without RANK and WORLD_SIZE"
        )
    return env[name]


def _integer(env: Mapping[str, str], name: str) -> int:
    text = _text(env, name)
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text}: expected a whole number") from None
