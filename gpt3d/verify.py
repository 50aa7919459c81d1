"""Is a layout equal to one plain process? `python -m gpt3d.verify [group=option] [key=value]`, or `--all`."""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from gpt3d.config.arithmetic import World
from gpt3d.config.cli import run_cli
from gpt3d.config.problems import ConfigError, Problem
from gpt3d.config.rules import require_valid
from gpt3d.config.schema import RunConfig

HELP = """
Train the same tiny model in the given layout and in one plain process, and compare losses, gradient norms and weights.
The model keeps its family and shrinks to kilobytes; parallel, pipeline, zero, precision and recompute are as given.
Exit code: 0 equal, 1 different, 2 the configuration cannot run.

  python -m gpt3d.verify parallel=tp2_pp2 zero=3                is this layout equal to one process?
  python -m gpt3d.verify model=70b parallel=tp8_pp2 zero=2      with Llama's shape of attention and MLP
  python -m gpt3d.verify --all                                  all layouts of the matrix; --sample 12: some of them
  python -m gpt3d.verify --all --markdown docs/layouts.md       and the table as a file
"""
MAX_CPU_RANKS = 64  # more processes than this on one machine measure its scheduler


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--markdown", type=Path)
    options, overrides = parser.parse_known_args()
    if options.seed is not None and options.sample is None:
        parser.error("--seed goes with --sample; for another seed of the model write seed=...")
    if options.all or options.sample is not None:
        if overrides:
            parser.error(f"--all and --sample compare fixed layouts and take no overrides: {' '.join(overrides)}")
        if options.all and options.sample is not None:
            parser.error("--all compares every layout, --sample some: take one of them")
        if options.sample is not None and options.sample < 0:
            parser.error(f"--sample {options.sample}: how many layouts, 0 or more")
        if options.markdown is not None:
            try:
                options.markdown.parent.mkdir(parents=True, exist_ok=True)
                options.markdown.open("a").close()  # now: not after minutes
            except OSError as error:
                parser.error(f"--markdown {options.markdown} can't be written: {error.strerror}")
        sys.exit(verify_matrix(options.sample, options.seed, options.markdown))
    if options.markdown is not None:
        parser.error("--markdown goes with --all or --sample")
    plain = not any(argument.startswith("-") for argument in overrides)
    no_run_folder = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled"] if plain else []
    sys.argv[1:] = [*overrides, *no_run_folder]
    run_cli(verify_one, HELP, check=lambda config: require_valid(config, World()))


def verify_one(config: RunConfig) -> None:
    """Print the table of one layout; leaves the process with the exit code."""
    from gpt3d.verification.tiny import tiny_config
    from gpt3d.verification.verdict import table, verify

    tiny, notes = tiny_config(config)
    kind = device_for(tiny)
    p = tiny.parallel
    ranks = p.tp * p.cp * p.pp * (p.dp or 1)
    if kind == "cpu" and ranks > MAX_CPU_RANKS:
        why = f"this layout has {ranks} ranks, more than the {MAX_CPU_RANKS} processes that make sense on one machine"
        raise ConfigError(
            [Problem("parallel", None, why, "a smaller tp, pp or dp of the same kind, e.g. parallel.pp=2")]
        )
    require_valid(tiny, World(ranks=ranks, ranks_per_node=ranks, device=kind))
    print(
        f"{tiny.model.name}: {tiny.trainer.steps} steps on {ranks} ranks ({kind}) = TP {p.tp} x PP {p.pp} x DP {p.dp}"
        f"{' with SP' if p.sequence_parallel else ''}, {tiny.pipeline.schedule}, ZeRO-{tiny.zero.stage}, "
        f"{tiny.precision.dtype}, recompute {tiny.recompute}",
        *(f"note: {note}" for note in notes),
        sep="\n",
        flush=True,
    )
    verdict = verify(tiny, kind)
    print(table(verdict))
    sys.exit(0 if verdict.equal else 1)


def verify_matrix(sample: int | None, seed: int | None, file: Path | None) -> int:
    """Compare many layouts, print a line for each and write the table; returns the exit code."""
    from gpt3d.launch import preload
    from gpt3d.verification.compare import plain_result
    from gpt3d.verification.matrix import HARDEST, MATRIX
    from gpt3d.verification.verdict import markdown, verify

    cases = [*MATRIX, *HARDEST]
    if sample is not None:
        seed = seed if seed is not None else random.randrange(10**6)
        cases = [*random.Random(seed).sample(MATRIX, min(sample, len(MATRIX))), *HARDEST]
        print(f"{len(cases)} layouts, the hardest among them; the same again with --sample {sample} --seed {seed}")
    preload("gpt3d.verification.compare")
    begun, verdicts = time.monotonic(), {}
    for case in cases:
        verdict = verdicts[str(case)] = verify(case.config(), "cpu", plain_result(case.family, case.clip))
        d = verdict.differences
        numbers = f"loss {d.loss:.1e}  norm {d.norm:.1e}  weights {d.weight:.1e}" if d is not None else ""
        print(
            f"{'equal' if verdict.equal else 'DIFFERENT':<9}  {numbers}  {verdict.seconds:5.1f} s  {case}", flush=True
        )
        if verdict.problem:
            print(verdict.problem, flush=True)
    wrong = [name for name, verdict in verdicts.items() if not verdict.equal]
    minutes = (time.monotonic() - begun) / 60
    print(
        f"{len(verdicts) - len(wrong)} of {len(verdicts)} layouts are equal to one plain process; {minutes:.1f} minutes"
    )
    if file is not None:
        file.write_text(f"{TABLE_HEAD.format(count=len(verdicts))}\n\n{markdown(verdicts)}\n")
        print(f"table written to {file}")
    return 1 if wrong else 0


TABLE_HEAD = """# {count} layouts against one plain process

Written by `python -m gpt3d.verify --all --markdown docs/layouts.md`. A tiny model trains 5 steps in each layout and,
from the same initial weights, in one process of plain PyTorch that shares no parallel code. Columns: the largest
difference of a loss [nats] (5 steps and one evaluation), of a gradient norm (relative), of a weight after 5 steps.
Bounds: fp32 2e-6, 5e-5, 5e-6; bf16, compared with fp32, 2e-3, 1e-2, 5e-3 (Adam moves a weight by up to 1e-3 a step)."""


def device_for(config: RunConfig) -> str:
    """The wish of `cluster.device`; auto takes GPUs if there is one for each rank, else the CPU."""
    from gpt3d.parallel import device

    p = config.parallel
    if config.cluster.device == "auto" and (device.count("cuda") or 0) < p.tp * p.cp * p.pp * (p.dp or 1):
        return "cpu"
    return device.kind(config.cluster.device)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("gpt3d: interrupted", file=sys.stderr)
        sys.exit(130)
