"""Which rank runs on which host: the check that the launcher built one world, and the line that shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpt3d.launch.environment import LaunchError, World


def check_rank_map(entries: Sequence[tuple[str, int]], world: World, asked_nodes: int | None, own_gpu: bool) -> str:
    """The rank map in one line, from (host, local rank) of each rank in order.

    Raises LaunchError when the nodes are not those of `cluster.nodes` or, on CUDA, fewer hosts than nodes took part or
    two ranks share a GPU. On CPU several launcher "nodes" may share a host.
    """
    hosts: dict[str, list[int]] = {}
    for rank, (host, _) in enumerate(entries):
        hosts.setdefault(host, []).append(rank)
    ranks_word = "rank" if world.size == 1 else "ranks"
    shown = (
        f"{world.size} {ranks_word} on {len(hosts)} {'host' if len(hosts) == 1 else 'hosts'} ({world.launcher}): "
        + "; ".join(f"{host}: {_ranges(ranks)}" for host, ranks in hosts.items())
    )
    if asked_nodes is not None and asked_nodes != world.nodes:
        raise LaunchError(
            f"cluster.nodes={asked_nodes}, but {world.launcher} started {world.nodes} node(s) x {world.local_size} "
            f"processes: set cluster.nodes={world.nodes}, or start {asked_nodes} node(s). {shown}"
        )
    if own_gpu:
        if len(hosts) != world.nodes:
            raise LaunchError(
                f"{world.launcher} promises {world.nodes} node(s), but the ranks run on {len(hosts)}: {shown}. "
                "Does MASTER_ADDR name one and the same node everywhere?"
            )
        shared = [place for place, times in Counter(entries).items() if times > 1]
        if shared:
            host, local_rank = shared[0]
            ranks = [rank for rank, entry in enumerate(entries) if entry == shared[0]]
            raise LaunchError(f"ranks {_ranges(ranks)} would share GPU {local_rank} of {host}: {shown}")
    return shown


def _ranges(ranks: Sequence[int]) -> str:
    """0, 1, 2, 3, 6 becomes "0-3, 6"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
