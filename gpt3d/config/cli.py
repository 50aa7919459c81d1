"""Every command's way into Hydra: one clear message for a mistake, everything Hydra offers otherwise.

`--help`, `--cfg job|hydra|all`, `--info`, `-m` sweeps, `--hydra-help` and shell completion (`-sc`) work as in any Hydra
program; Hydra's own errors, which name its internals, are replaced by ConfigError's message.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from gpt3d.config.load import compose, conf_dir, register_schema, to_typed
from gpt3d.config.overrides import REFUSALS, diagnose, group_options, quote_overrides, refuse_silent
from gpt3d.config.problems import ConfigError, Problem
from gpt3d.config.schema import RunConfig

USAGE_ERROR = 2  # exit code of a refused configuration


def run_cli(
    task: Callable[[RunConfig], Any],
    help_text: str,
    config_name: str = "config",
    check: Callable[[RunConfig], None] | None = None,
    resolve: Callable[[RunConfig], Sequence[str]] | None = None,
) -> None:
    """Compose the configuration from sys.argv and call `task` with it, once or once a job of a sweep.

    `resolve` may add overrides, for keys left to the planner; they are recorded as if they had been typed. `check` may
    raise ConfigError; a plain run calls it before Hydra makes a run folder, a sweep before each job.
    A refused configuration is one message on stderr and exit code 2. `task` ends the process with sys.exit for another
    code, a sweep goes on and has the highest of them; other exceptions pass through. `help_text` opens `--help`.
    """
    argv = sys.argv[1:]
    if "--help" in argv or "-h" in argv:
        print(full_help(help_text, config_name))
        return
    register_schema()
    if "-sc" not in argv and "--shell-completion" not in argv:
        argv = _overrides_first(quote_overrides(argv, conf_dir()))
        sys.argv[1:] = argv
    plain = not any(argument.startswith("-") for argument in argv)
    failure: list[tuple[BaseException, TracebackType | None]] = []
    codes: list[int] = []  # of a sweep's jobs that ended with one

    def job(config: DictConfig) -> Any:
        try:
            typed = to_typed(config)
            # an experiment can be a sweep by itself (hydra.mode): its jobs are resolved and checked one by one, too
            checked = plain and HydraConfig.get().mode != RunMode.MULTIRUN
            if resolve is not None and not checked:
                typed = to_typed(_merged(config, resolve(typed)))
            if check is not None and not checked:
                check(typed)
            if typed.run_name != config.run_name:
                _rename_folder(config.run_name, typed.run_name)
            return task(typed)
        except SystemExit as end:
            if HydraConfig.get().mode != RunMode.MULTIRUN or _ends_all(end):
                raise
            codes.append(_code(end))
            return None
        except BaseException as error:
            if isinstance(error, ConfigError):  # at once: of a sweep, Hydra reports only the first failure, at the end
                print(error, file=sys.stderr)
            failure.append((error, error.__traceback__))
            raise

    try:
        refuse_silent(argv)
        if plain and (check is not None or resolve is not None):
            typed = compose(argv, config_name)
            if resolve is not None and (more := resolve(typed)):
                sys.argv[1:] = [*argv, *quote_overrides(more, conf_dir())]
                typed = compose(sys.argv[1:], config_name)
            if check is not None:
                check(typed)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(USAGE_ERROR)
    try:
        _with_full_errors(hydra.main(config_path=str(conf_dir()), config_name=config_name, version_base="1.3")(job))
    except Exception as error:
        traceback = next((stack for raised, stack in failure if raised is error), None)
        if traceback is None:
            print(_refusal(error, argv), file=sys.stderr)
        elif not isinstance(error, ConfigError):
            raise error.with_traceback(traceback) from error.__cause__  # without Hydra's frames
        sys.exit(USAGE_ERROR)
    if any(codes):
        sys.exit(max(codes))


def _refusal(error: Exception, argv: list[str]) -> ConfigError:
    """What Hydra refused before any job began, in our words; raises `error` if it is no user's mistake."""
    if isinstance(error, ConfigError):
        return error
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    if isinstance(error, REFUSALS):  # some of which are OSErrors
        sweep = "-m" in argv or "--multirun" in argv
        return ConfigError(diagnose(_split(argv)[0], error, [conf_dir(), *_config_dirs(argv)], sweep))
    if isinstance(error, OSError):
        why = f"the run folder can't be made: {error.strerror}"
        return ConfigError([Problem("hydra.run.dir", error.filename, why)])
    raise error


def _ends_all(end: SystemExit) -> bool:
    """A signal has ended the job, and with it a sweep."""
    return isinstance(end.code, int) and end.code > 128


def _code(end: SystemExit) -> int:
    """The exit code of sys.exit, which prints a text."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def without_run_folder(argv: list[str]) -> list[str]:
    """`argv` of a command that only prints: Hydra makes no folder for it. Sweeps and flags stay as typed."""
    plain = not any(argument.startswith("-") for argument in argv)
    return argv + (["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none"] if plain else [])


def _merged(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The composed configuration of a sweep's job with these overrides."""
    merged = OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(merged, DictConfig)
    return merged


def _rename_folder(before: str, now: str) -> None:
    """Hydra has named a job's folder before the planner chose the layout that is part of the run's name."""
    runtime: Any = HydraConfig.get().runtime
    old = Path(runtime.output_dir)
    new = old.with_name(old.name.replace(before, now))
    if old.is_dir() and not new.exists():
        old.rename(new)
        with read_write(runtime):
            runtime.output_dir = str(new)


def full_help(help_text: str, config_name: str = "config") -> str:
    """The text of `--help`: the command, the groups with their options, and how to go on."""
    groups = group_options([conf_dir()])
    width = max(map(len, groups))
    taken: dict[str, Any] = {}
    file = conf_dir() / f"{config_name}.yaml"
    for default in OmegaConf.to_container(OmegaConf.load(file))["defaults"]:  # type: ignore[call-overload,index]
        taken |= default if isinstance(default, Mapping) else {}
    listed = "\n".join(
        f"  {group:<{width}}  " + " ".join(f"[{name}]" if name == taken.get(group) else name for name in options)
        for group, options in groups.items()
    )
    return f"""{help_text.strip()}

Configuration groups, chosen with group=option; the default is in brackets (files: {conf_dir()}):
{listed}

Change a key:     group.key=value        optimizer.lr=1e-4  trainer.steps=1000
Add a key:        +group.key=value       +zero.deepspeed.wall_clock_breakdown=true  +cluster.env.NCCL_DEBUG=INFO
Sweep:            -m key=a,b             -m model=125m optimizer.lr=1e-4,3e-4
Show, don't run:  --cfg job              the composed configuration; --cfg job --resolve, --info defaults-tree
Your own groups:  --config-dir FOLDER    FOLDER/model/mine.yaml is then model=mine
More of Hydra:    --hydra-help           shell completion: -sc install=bash"""


def _with_full_errors(main: Callable[[], Any]) -> None:
    """Run Hydra's main so that its errors are raised instead of printed (its documented HYDRA_FULL_ERROR=1)."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        main()
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


# Hydra's flags that take a value.
_VALUE_FLAGS = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--package", "-p", "--cfg", "-c")


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Arguments as (overrides, flags with their values)."""
    overrides: list[str] = []
    flags: list[str] = []
    for before, argument in pairwise(["", *argv]):
        value = before in _VALUE_FLAGS or (before in ("--info", "-i") and "=" not in argument)
        (flags if argument.startswith("-") or value else overrides).append(argument)
    return overrides, flags


def _overrides_first(argv: list[str]) -> list[str]:
    """Hydra 1.3 refuses overrides on both sides of a flag (`a=1 -m b=2,3`): put them together."""
    overrides, flags = _split(argv)
    return [*overrides, *flags]


def _config_dirs(argv: list[str]) -> list[Path]:
    """Folders given with --config-dir: their options are valid names too."""
    after = [argument for before, argument in pairwise(argv) if before in ("--config-dir", "-cd")]
    joined = [argument.partition("=")[2] for argument in argv if argument.startswith("--config-dir=")]
    return [Path(folder) for folder in after + joined]
