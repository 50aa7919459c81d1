"""Bytes of each rank as planned, as a dry run counts them, and as a real step on gloo ranks allocates them.

python -m benchmarks.memory          all layouts, about half a minute on 2 cores
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gpt3d.config.schema import RunConfig
from gpt3d.dryrun.measure import Measured, measure_step
from gpt3d.dryrun.run import dry_run
from gpt3d.launch import run_ranks
from gpt3d.parallel import device
from gpt3d.parallel.layout import Sizes, create_layout
from gpt3d.planner.memory import stage_memory
from gpt3d.planner.table import columns
from gpt3d.verification.cases import Case

SHAPE = dict(
    num_layers=4, hidden_size=256, num_heads=4, head_dim=64, vocab_size=2000, vocab_multiple=128, max_seq_len=128
)
BF16 = {"dtype": "bf16"}
ALL_BF16 = {"dtype": "bf16", "grad_dtype": "bf16"}
CASES = {
    str(case): case
    for case in [
        Case("llama", zero=0),
        Case("gpt", zero=0, **BF16),
        Case("gpt", zero=0, recompute="full", **BF16),
        Case("gpt", tp=2, zero=0),
        Case("llama", tp=2, sp=True, zero=0, **BF16),
        Case("gpt", pp=2, zero=0),
        Case("llama", pp=2, zero=0, schedule="zb_h1", **BF16),
        Case("gpt", pp=2, zero=0, schedule="interleaved", chunks=2),
        Case("llama", pp=2, zero=0, schedule="gpipe", recompute="full"),
        Case("gpt", dp=2, zero=0, recompute="full"),
        Case("llama", dp=2, zero=0, recompute="selective", **ALL_BF16),
        *(Case("llama", dp=2, zero=stage, **BF16) for stage in (1, 2, 3)),
        *(Case("llama", dp=2, zero=stage) for stage in (1, 2, 3)),
        *(Case("gpt", dp=2, zero=stage, **ALL_BF16) for stage in (1, 2, 3)),
        Case("llama", dp=2, zero=1, offload_optimizer="cpu"),
        *(Case("llama", dp=2, zero=stage, offload_optimizer="cpu", **BF16) for stage in (2, 3)),
    ]
}
QUICK = tuple(map(str, (
    Case("gpt", zero=0, **BF16), Case("llama", tp=2, sp=True, zero=0, **BF16), Case("gpt", pp=2, zero=0),
    Case("llama", dp=2, zero=1, **BF16), Case("gpt", dp=2, zero=3, **ALL_BF16),
)))  # fmt: skip


def small(case: Case) -> RunConfig:
    """A model of 4 million parameters, with buckets that are small beside it."""
    config, llama = case.config(), case.family == "llama"
    changes = dict(SHAPE, num_kv_heads=2 if llama else 4, ffn_hidden_size=704 if llama else 1024)
    config.model = dataclasses.replace(config.model, **changes)  # type: ignore[arg-type]
    config.data.seq_len, config.trainer.micro_batch_size = 128, 2
    config.trainer.global_batch_size = 2 * case.dp * 2 * case.pp
    config.zero.pin_memory = False
    config.zero.reduce_bucket_size = config.zero.allgather_bucket_size = config.zero.prefetch_bucket_size = 20_000
    return config


def measure(names: Sequence[str]) -> list[Measured]:
    """On each rank of the world: a real step in each of these layouts."""
    found = []
    for name in names:
        case, config = CASES[name], small(CASES[name])
        layout = create_layout(
            Sizes(tp=case.tp, dp=case.dp, pp=case.pp), torch.device("cpu"), sequence_parallel=case.sp,
            num_kv_heads=config.model.num_kv_heads,
        )  # fmt: skip
        found.append(measure_step(config, layout))
    return found


class Row(NamedTuple):
    """Bytes of one rank in one layout."""

    name: str
    rank: int
    real: int
    dry: int
    planned: int


def compared(names: Sequence[str], results: Sequence[Sequence[Measured]]) -> list[Row]:
    """One row a rank: `results` by rank, then by name."""
    rows = []
    for i, name in enumerate(names):
        case, config = CASES[name], small(CASES[name])
        for rank, measured in enumerate(results):
            stage, copy = rank // (case.tp * case.dp), rank // case.tp % case.dp
            planned = stage_memory(config, case.dp, stage, on_cpu=True, copy=copy)
            dry = dry_run(config, case.dp, rank).peak + planned.host  # here device and host are one memory
            rows.append(Row(name, rank, measured[i].peak, dry, planned.device + planned.host))
    return rows


def measure_alone(names: Sequence[str]) -> list[Measured]:
    """`measure` on a rank that has not joined its world yet."""
    device.init_process_group(device.select(0, "cpu"))
    found = measure(names)
    device.destroy_process_group()
    return found


def main() -> None:
    """Print the table."""
    from benchmarks.memory import measure_alone as body  # by this name the ranks find it

    rows = [["layout", "rank", "real MB", "dry run", "planned"]]
    for ranks in (1, 2):
        names = [name for name, case in CASES.items() if case.world == ranks]
        with tempfile.TemporaryDirectory() as logs:  # DeepSpeed talks
            results = run_ranks(body, names, nprocs=ranks, timeout=300, log_dir=logs)
        for row in compared(names, results):
            errors = [f"{size / row.real - 1:+.1%}" for size in (row.dry, row.planned)]
            rows.append([row.name, str(row.rank), f"{row.real / 2**20:.2f}", *errors])
    print("\n".join(columns(rows)))


if __name__ == "__main__":
    main()
