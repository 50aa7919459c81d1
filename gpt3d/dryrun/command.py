"""`python -m gpt3d.train ... dry_run=true`: checks, runs, prints."""

from __future__ import annotations

import sys

from gpt3d.config.arithmetic import World, resolve_dp
from gpt3d.config.ending import end_with_reader
from gpt3d.config.problems import ConfigError
from gpt3d.config.rules import check, memory
from gpt3d.config.schema import RunConfig
from gpt3d.planner.memory import memory_by_stage, ranks_a_stage, stage_memory
from gpt3d.planner.report import write_json


def check_dry_run(config: RunConfig) -> None:
    """Raise ConfigError for what no machine could run. That it is too large for this one is no problem."""
    if problems := check(config, World(), leave_out=[memory]):
        raise ConfigError(problems)


def print_dry_run(config: RunConfig) -> None:
    """Run one step of the chosen rank on tensors without numbers; print what it does and holds."""
    from gpt3d.dryrun.report import dry_run_data, dry_run_text
    from gpt3d.dryrun.run import dry_run

    dp = resolve_dp(config, World())
    run = dry_run(config, dp, fullest_rank(config, dp) if config.rank is None else config.rank)
    failure = write_json(config, dry_run_data(config, run))
    end_with_reader()
    print(dry_run_text(config, run))
    if failure is not None:
        sys.exit(failure)


def fullest_rank(config: RunConfig, dp: int) -> int:
    """The first rank of those that need most memory, as the planner sees it."""
    need = [memory.total for memory in memory_by_stage(config, dp)]
    stage, most = need.index(max(need)), max(need)
    alike = stage_memory(config, dp, stage, copy=0).total == most
    return stage * ranks_a_stage(config, dp) + (0 if alike else (dp - 1) * config.parallel.tp * config.parallel.cp)
