"""Will it fit, and which layouts fit: `python -m gpt3d.plan [group=option] [key=value]`. Needs no GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gpt3d.config.arithmetic import World
from gpt3d.config.cli import run_cli
from gpt3d.config.ending import end_with_reader
from gpt3d.config.problems import ConfigError
from gpt3d.config.rules import check, memory
from gpt3d.config.schema import RunConfig
from gpt3d.planner.auto import choose
from gpt3d.planner.machine import machine_of
from gpt3d.planner.pictures import write_pictures
from gpt3d.planner.remedies import for_layout, for_model
from gpt3d.planner.report import MemoryPlan, memory_plan, memory_text, plan_data, write_json
from gpt3d.planner.search import Room, require_known, search
from gpt3d.planner.search_report import remedy_data, search_data, search_text
from gpt3d.planner.time_report import time_data, time_in_short, time_text

HELP = """
Say what a layout needs before it is started: memory of each pipeline stage part by part, whether it fits, and, on a
named cluster, an estimate of its step. With search=true: the layouts that fit, the fastest first. Exit code 0: it fits;
1: it does not. The world is cluster.nodes x cluster.gpus_per_node, or tp x pp x dp as given.

  python -m gpt3d.plan model=70b zero=0 parallel=single precision=bf16      16 or 18 bytes a parameter, and ZeRO's share
  python -m gpt3d.plan model=70b parallel=tp8_pp2 precision=bf16 cluster=h100 cluster.nodes=4 plan_json=plan.json
  python -m gpt3d.plan model=70b precision=bf16 cluster=h100 cluster.nodes=8 trainer.global_batch_size=512 search=true
"""


def main() -> None:
    """The command."""
    argv = sys.argv[1:]
    plain = not any(argument.startswith("-") for argument in argv)
    no_run_folder = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none"] if plain else []
    sys.argv[1:] = [*argv, *no_run_folder]
    run_cli(plan, HELP, check=check_plan, resolve=resolve_plan)


def resolve_plan(config: RunConfig) -> list[str]:
    """Overrides for the keys left to the planner (parallel=auto). Raises ConfigError."""
    choice = None if config.search else choose(config, World())
    if choice is not None:
        print(choice.text)
    return choice.overrides if choice else []


def check_plan(config: RunConfig) -> None:
    """Raise ConfigError for what can't be planned: a layout against the rules, a search for unknown GPUs."""
    if config.search:
        require_known(config)
    elif problems := check(config, World(), leave_out=[memory]):  # that it is too large is what the plan says
        raise ConfigError(problems)


def plan(config: RunConfig) -> None:
    """Print the plan of this layout, or the result of the search; leaves the process with the verdict as exit code."""
    (plan_search if config.search else plan_layout)(config)


def plan_layout(config: RunConfig) -> None:
    """Print memory and time of this layout; the exit code says whether it fits."""
    layout, machine = memory_plan(config), machine_of(config)
    data, answers, times = plan_data(layout), [], ""
    if machine is not None:
        data |= time_data(config, layout.dp, machine)
        answers, times = [time_in_short(data)], "\n\n" + time_text(data, layout.ranks)
    if layout.fits is False and layout.gpu_gb is not None:
        helps = for_layout(config, layout.dp, _room(layout))
        data["changes"] = [remedy_data(remedy) for remedy in helps]
        answers += ["the cheapest changes that fit:", *(f"  {remedy}" for remedy in helps)] if helps else []
    text = memory_text(layout, answers) + times
    if config.plan_pictures is not None:
        text += "\n\n" + _pictures(layout, Path(config.plan_pictures))
    _finish(config, text, data, layout.fits is not False)


def _pictures(layout: MemoryPlan, folder: Path) -> str:
    """Draw the plan; a line that names the files. Ends the process if the folder can't be written."""
    try:
        written = write_pictures(layout, machine_of(layout.config), folder)
    except OSError as error:
        sys.exit(f"gpt3d: plan_pictures={folder} can't be written: {error.strerror}")
    return f"pictures: {' '.join(map(str, written))}"


def plan_search(config: RunConfig) -> None:
    """Print the best layouts of this model on these GPUs; the exit code says whether there is one."""
    result = search(config)
    helps = [] if result.plans else for_model(config, result.room)
    _finish(config, search_text(result, helps), search_data(result, helps), bool(result.plans))


def _room(layout: MemoryPlan) -> Room:
    """The GPUs of this layout."""
    per_node = min(layout.config.cluster.gpus_per_node or layout.ranks, layout.ranks)
    return Room(layout.ranks, per_node, machine_of(layout.config), layout.gpu_gb, layout.host_gb)


def _finish(config: RunConfig, text: str, data: dict[str, Any], good: bool) -> None:
    failure = write_json(config, data)  # first: printing ends with its reader
    print(text)
    sys.exit(failure or (0 if good else 1))


if __name__ == "__main__":
    end_with_reader()
    main()
