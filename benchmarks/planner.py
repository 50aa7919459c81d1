"""The planner's time model against published runs: `python -m benchmarks.planner RUNS.csv`.

RUNS.csv holds one run a row (id, source_key, hardware, layers, hidden, heads, ... iter_time_s or tflops_per_gpu). Rows
that name their layout, on A100 or H100 in 16-bit formats, are taken; every second one, in order of their ids, has been
looked at when the constants of gpt3d/planner/time.py were set, and the others judge them.
"""

from __future__ import annotations

import csv
import dataclasses
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from gpt3d.config.load import compose
from gpt3d.config.schema import RunConfig
from gpt3d.model.flops import hardware_flops_per_token, model_flops_per_token
from gpt3d.planner.machine import Software, machine_of
from gpt3d.planner.table import columns
from gpt3d.planner.time import step_time

NEEDED = ("layers", "hidden", "heads", "seq", "vocab", "tp", "pp", "micro_bs", "global_bs", "gpus")
CLUSTERS = {"A100-80GB": "a100", "A100-40GB": "a100_40gb", "H100-80GB": "h100"}
# Jean Zay, where BLOOM was trained: four 100 Gb/s Omni-Path ports a node of eight GPUs (Le Scao et al. 2022).
SLOW_NETWORK = {"BLOOM-PREQUEL": 6.25, "BLOOM-PROD": 6.25}
# What the programs of the time had. The ZeRO-3 runs of the 2021 table gather parameter by parameter, and as slowly as
# through one network port a ring; overlapped collectives came to Megatron-LM with its paper of 2022.
SOFTWARE = {
    "LLM-FOUNDRY": Software("flash1"),
    "SC21-T2": Software("unfused", overlaps_tp=False, shares_ports=False),
    "KORTH22": Software("unfused"),
    "KORTH22-T5": Software("unfused"),
}
MEGATRON = ("SC21-T1", "SC21-T2", "KORTH22", "KORTH22-T5")
BUCKET = 500_000_000  # elements, DeepSpeed's default
OLD = Software("unfused", overlaps_tp=False)


@dataclass(frozen=True)
class Run:
    """A published run as our configuration, with its measured seconds a step."""

    name: str
    source: str
    config: RunConfig
    dp: int
    seconds: float


def read_runs(path: Path) -> list[Run]:
    """The rows that can be planned, in order of their ids."""
    bases = {name: compose([f"cluster={cluster}", "model=175b"]) for name, cluster in CLUSTERS.items()}
    with path.open() as file:
        rows = sorted(csv.DictReader(file), key=lambda row: row["id"])
    return [run for row in rows if (run := _run(row, bases)) is not None]


def _run(row: dict[str, str], bases: dict[str, RunConfig]) -> Run | None:
    precise = row["precision"].startswith(("fp16", "bf16", "amp_bf16"))
    if row["hardware"] not in bases or not precise or any(not row[key] for key in NEEDED):
        return None
    if row["cp"] not in ("", "1") or row["ep"] not in ("", "1"):
        return None
    layers, hidden, heads, seq, vocab, tp, pp, micro, batch, gpus = (int(float(row[key])) for key in NEEDED)
    dp, chunks = gpus // tp // pp, int(row["vpp"] or 1)
    if batch % (micro * dp) or layers < pp * chunks:
        return None
    base = bases[row["hardware"]]
    gated = "llama" in row["model"].lower()
    model = dataclasses.replace(
        base.model, num_layers=layers, hidden_size=hidden, num_heads=heads, num_kv_heads=int(row["kv_heads"] or heads),
        head_dim=hidden // heads, ffn_hidden_size=int(row["ffn"] or 4 * hidden), vocab_size=vocab, max_seq_len=seq,
        activation="swiglu" if gated else "gelu",
    )  # fmt: skip
    whole = layers % (pp * chunks) == 0
    grad = "fp32" if "fp32 grad" in row["precision"] else "bf16"
    config = dataclasses.replace(
        base,
        model=model,
        parallel=dataclasses.replace(
            base.parallel, tp=tp, pp=pp, dp=dp, sequence_parallel=row["sp"] == "1", embedding_layers=0 if whole else 0.1
        ),
        pipeline=dataclasses.replace(base.pipeline, schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks),
        zero=dataclasses.replace(base.zero, stage=int(row["zero_stage"] or 0), reduce_bucket_size=BUCKET),
        precision=dataclasses.replace(base.precision, dtype="bf16", grad_dtype=grad),
        data=dataclasses.replace(base.data, seq_len=seq),
        trainer=dataclasses.replace(base.trainer, global_batch_size=batch, micro_batch_size=micro),
        cluster=dataclasses.replace(
            base.cluster,
            inter_node_gb_per_s=SLOW_NETWORK.get(row["source_key"], base.cluster.inter_node_gb_per_s),
        ),
        recompute=row["recompute"] if row["recompute"] in ("selective", "full") else "none",
    )
    seconds = _measured(row, config, gpus)
    return None if seconds is None else Run(row["id"], row["source_key"], config, dp, seconds)


def _measured(row: dict[str, str], config: RunConfig, gpus: int) -> float | None:
    """Seconds a step: as printed, or from the printed FLOP/s by the count that the source uses."""
    if row["iter_time_s"]:
        return float(row["iter_time_s"])
    if not row["tflops_per_gpu"]:
        return None
    hardware = row["tflops_kind"].startswith("hardware")
    seq, tokens = config.data.seq_len, config.trainer.global_batch_size * config.data.seq_len
    each = (
        hardware_flops_per_token(config.model, seq, config.recompute)
        if hardware
        else model_flops_per_token(config.model, seq)
    )
    return each * tokens / (float(row["tflops_per_gpu"]) * 1e12 * gpus)


def error(run: Run) -> float:
    """Planned over published FLOP/s, minus 1."""
    machine = machine_of(run.config, SOFTWARE.get(run.source, OLD))
    assert machine is not None
    return run.seconds / step_time(run.config, run.dp, machine).total - 1


def summary(name: str, errors: list[float]) -> list[str]:
    """One row: count, median and ninth decile of the absolute error, mean and worst."""
    sizes = sorted(map(abs, errors))
    ninth = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    figures = (statistics.median(sizes), ninth, statistics.mean(errors), max(errors, key=abs))
    texts = [f"{figure:+.1%}" if i > 1 else f"{figure:.1%}" for i, figure in enumerate(figures)]
    return [name, str(len(errors)), *texts]


def main() -> None:
    """Print the table."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    runs = read_runs(Path(sys.argv[1]))
    errors = [(run, error(run)) for run in runs]
    rows = [["", "runs", "median", "9 in 10", "mean", "worst"]]
    for name, part in (("constants set on", errors[::2]), ("judged on", errors[1::2])):
        rows.append(summary(name, [off for _, off in part]))
    by_source: defaultdict[str, list[float]] = defaultdict(list)
    for run, off in errors[1::2]:
        by_source[f"  {run.source}, {run.config.cluster.name}"].append(off)
    rows += [summary(source, offs) for source, offs in sorted(by_source.items())]
    print("Planned against published FLOP/s, error of each run:")
    print("\n".join(columns(rows)))
    print("\n".join(targets(errors)))
    print("The ten worst of those judged on:")
    worst = sorted(errors[1::2], key=lambda entry: -abs(entry[1]))[:10]
    print("\n".join(columns([[run.name, f"{off:+.1%}", layout(run)] for run, off in worst])))


def targets(errors: list[tuple[Run, float]]) -> list[str]:
    """What was promised before the constants were set, and whether it holds."""
    judged = sorted(abs(off) for _, off in errors[1::2])
    megatron, name = max((abs(off), run.name) for run, off in errors if run.source in MEGATRON)
    held = (
        ("median of those judged on at most 10 %", statistics.median(judged), 0.10),
        ("nine in ten of them within 25 %", judged[int(0.9 * len(judged))], 0.25),
        (f"every run of the Megatron tables of 2021 and 2022 within 20 % ({name})", megatron, 0.20),
    )
    return [f"  {text}: {off:.1%}, {'met' if off <= limit else 'MISSED'}" for text, off, limit in held]


def layout(run: Run) -> str:
    """The run's sizes."""
    c, p = run.config, run.config.parallel
    return (
        f"tp {p.tp} pp {p.pp} dp {run.dp} micro {c.trainer.micro_batch_size} batch {c.trainer.global_batch_size} "
        f"{c.recompute} ZeRO {c.zero.stage}: {run.seconds:.3g} s"
    )


if __name__ == "__main__":
    main()
