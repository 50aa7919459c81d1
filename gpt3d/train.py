"""Train a GPT: `python -m gpt3d.train [group=option] [key=value]`.

In a plain shell the ranks are started on this machine; under torchrun, srun or mpirun this process joins as one of
them. The configuration is composed once, checked as a whole, and given to every rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gpt3d.config.auto import auto_keys
from gpt3d.config.cli import run_cli, without_run_folder
from gpt3d.config.rules import require_valid
from gpt3d.config.schema import RunConfig
from gpt3d.data.errors import DataError
from gpt3d.launch import RankFailed
from gpt3d.launch.environment import World
from gpt3d.launch.rundir import RunDirError
from gpt3d.rank import train_rank
from gpt3d.sweep.end import table_at_end
from gpt3d.sweep.jobs import SweepFailed, figures, update
from gpt3d.tracking.tracker import record_failure

NVIDIA_DRIVER = Path("/dev/nvidiactl")

HELP = """
Train a GPT on this machine's GPUs or CPU, or as part of a world that torchrun, srun or mpirun started.

  python -m gpt3d.train                                       a tiny model on Shakespeare, 4 ranks, minutes on a CPU
  python -m gpt3d.train parallel=tp2 zero=3 trainer.steps=50  another layout of the same model
  python -m gpt3d.train model=70b parallel=tp8_pp2            what a large model needs, if it does not fit here
  python -m gpt3d.train model=70b parallel=tp8_pp2 precision=bf16 dry_run=true    what one of its ranks does and holds
  python -m gpt3d.train model=125m parallel=auto zero=auto    the fastest layout that fits here
  torchrun --nproc-per-node 8 -m gpt3d.train model=8b parallel=tp8 precision=bf16
"""


def main() -> None:
    """The command."""
    from gpt3d.launch.join import join_world, joining

    if (world := joining()) is not None:
        join_world(world, compose_on_rank_0, train_rank)
    if any(argument.startswith("dry_run=") for argument in sys.argv[1:]):
        sys.argv[1:] = without_run_folder(sys.argv[1:])
    try:
        with table_at_end():
            run_cli(train_or_dry_run, HELP, check=check_here, resolve=resolve_here)
    except (DataError, RankFailed, RunDirError, SweepFailed) as failure:
        sys.exit(f"gpt3d: {failure}")
    except KeyboardInterrupt:
        print("gpt3d: interrupted", file=sys.stderr)
        sys.exit(130)


def train_or_dry_run(config: RunConfig) -> float | None:
    """What `dry_run` asks for."""
    if not config.dry_run:
        return train_here(config)
    from gpt3d.dryrun.command import print_dry_run

    print_dry_run(config)
    return None


def train_here(config: RunConfig) -> float | None:
    """Start the ranks on this machine; returns the `objective` of a sweep: validation loss, or tokens/s.

    What goes wrong is raised, so that the other jobs of a sweep still run.
    """
    from gpt3d import data, launch
    from gpt3d.config.arithmetic import total_ranks
    from gpt3d.launch.machine import this_machine

    world = this_machine(config)
    recorded = make_run_dir(config)
    data.prepare(config)
    ranks, device = total_ranks(config, world), world.device or "cpu"
    grace = config.checkpoint.signal_seconds if config.checkpoint.on_signal else launch.GRACE_SECONDS
    print(
        f"gpt3d: starting {ranks} rank{'s' if ranks > 1 else ''} on {device}; run folder {recorded['run_dir']}",
        flush=True,
    )
    run_dir = Path(recorded["run_dir"])
    try:
        results = launch.start(train_rank, recorded, nprocs=ranks, device=device, run_dir=run_dir, grace=grace)
    except RankFailed as failure:
        record_failure(run_dir, failure, config.tracking.report)
        raise
    if config.objective == "tokens_per_s":
        return figures(run_dir).tokens_per_s
    return results["validation_loss"]


def resolve_here(config: RunConfig, joined: World | None = None) -> list[str]:
    """Overrides for the keys left to the planner (parallel=auto); says which layout it takes. Raises ConfigError."""
    from gpt3d.launch.machine import this_machine
    from gpt3d.planner.auto import choose

    choice = choose(config, this_machine(config, joined)) if auto_keys(config) else None
    if choice is not None:
        print(choice.text, flush=True)
    return choice.overrides if choice else []


def check_here(config: RunConfig) -> None:
    """Raise ConfigError with everything that keeps this configuration from running on this machine."""
    from gpt3d import launch
    from gpt3d.checkpoint.settings import check_start

    if config.dry_run:
        from gpt3d.dryrun.command import check_dry_run

        return check_dry_run(config)
    if config.cluster.device == "cpu" or not NVIDIA_DRIVER.exists():
        launch.preload()  # the server of the ranks imports torch while this process does
    from gpt3d.launch.machine import this_machine

    require_valid(config, this_machine(config))
    check_start(config)


def compose_on_rank_0() -> dict[str, Any] | None:
    """Under a launcher: the checked and recorded configuration, or None if only help was asked for."""
    from gpt3d.checkpoint.settings import check_start
    from gpt3d.launch.join import joining
    from gpt3d.launch.machine import this_machine

    composed: list[dict[str, Any]] = []

    def check(config: RunConfig) -> None:
        require_valid(config, this_machine(config, joining()))
        check_start(config)

    def resolve(config: RunConfig) -> list[str]:
        return resolve_here(config, joining())

    run_cli(lambda config: composed.append(make_run_dir(config)), HELP, check=check, resolve=resolve)
    return composed[0] if composed else None


def make_run_dir(config: RunConfig) -> dict[str, Any]:
    """The run's folder, with the resolved configuration in it; that configuration as a plain dictionary."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from gpt3d.launch import rundir

    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        name_in_sweep(config, Path(hydra.sweep.dir).name, Path(hydra.runtime.output_dir).name)
    plain = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(plain, dict)
    named, go_on = config.run_dir is not None, config.checkpoint.resume == "auto"
    path = Path(config.run_dir or hydra.runtime.output_dir)
    settings = {str(k): v for k, v in plain.items()}
    try:
        recorded = rundir.create(path, settings, list(hydra.overrides.task), exact=named, go_on=go_on)
    except RunDirError as error:
        if hydra.mode == RunMode.MULTIRUN:
            raise  # the other jobs go on
        sys.exit(f"gpt3d: {error}")
    if hydra.mode == RunMode.MULTIRUN:
        update(Path(hydra.runtime.cwd, hydra.sweep.dir).absolute(), hydra.job.num, run_dir=recorded["run_dir"])
    return recorded


def name_in_sweep(config: RunConfig, sweep: str, job: str) -> None:
    """At wandb the jobs of a sweep are one group, each with the name of its folder, unless the user named them."""
    wandb = config.tracking.wandb
    wandb.group = wandb.group or sweep
    wandb.name = wandb.name or job
    wandb.job_type = wandb.job_type or "sweep"


if __name__ == "__main__":
    main()
