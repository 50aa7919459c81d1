"""Every command's way into Hydra: one clear message for a mistake, everything Hydra offers otherwise.

`--help`, `--cfg job|hydra|all`, `--info`, `-m` sweeps, `--hydra-help` and shell completion (`-sc`) work as in any Hydra
program; Hydra's own errors, which name its internals, are replaced by ConfigError's message.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from gpt3d.config.load import compose, conf_dir, register_schema, to_typed
from gpt3d.config.overrides import REFUSALS, diagnose, group_options, quote_overrides
from gpt3d.config.problems import ConfigError
from gpt3d.config.schema import RunConfig

USAGE_ERROR = 2  # exit code of a refused configuration


def run_cli(
    task: Callable[[RunConfig], Any],
    help_text: str,
    config_name: str = "config",
    check: Callable[[RunConfig], None] | None = None,
) -> None:
    """Compose the configuration from sys.argv and call `task` with it, once or once a job of a sweep.

    `check` may raise ConfigError; for a plain run it is called before Hydra makes a run folder, in a sweep before each job.
    A refused configuration is one message on stderr and exit code 2. `task` ends the process with sys.exit for another
    code; its other exceptions pass through. `help_text` opens what `--help` prints.
    """
    argv = sys.argv[1:]
    if argv and argv[0] in ("--help", "-h"):
        print(full_help(help_text, config_name))
        return
    register_schema()
    completion = "-sc" in argv or "--shell-completion" in argv
    argv = argv if completion else quote_overrides(argv, conf_dir())
    sys.argv[1:] = argv
    raised_by_task: list[BaseException] = []

    def job(config: DictConfig) -> Any:
        try:
            typed = to_typed(config)
            if check is not None:
                check(typed)
            return task(typed)
        except BaseException as error:
            raised_by_task.append(error)
            raise

    try:
        if check is not None and not any(argument.startswith("-") for argument in argv):
            check(compose(argv, config_name))
        _with_full_errors(hydra.main(config_path=str(conf_dir()), config_name=config_name, version_base="1.3")(job))
    except ConfigError as error:
        _refuse(error)
    except REFUSALS as error:
        if error in raised_by_task or _user_wants_traceback():
            raise
        sweep = "-m" in argv or "--multirun" in argv
        overrides = _positional(argv)
        _refuse(ConfigError(diagnose(overrides, error, [conf_dir(), *_config_dirs(argv)], sweep)))


def full_help(help_text: str, config_name: str = "config") -> str:
    """The text of `--help`: the command, the groups with their options, and how to go on."""
    groups = group_options([conf_dir()])
    width = max(map(len, groups))
    listed = "\n".join(f"  {group:<{width}}  {' '.join(options)}" for group, options in groups.items())
    return f"""{help_text.strip()}

Configuration groups, chosen with group=option (what is taken by default: {conf_dir() / (config_name + ".yaml")}):
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


def _user_wants_traceback() -> bool:
    return os.environ.get("HYDRA_FULL_ERROR", "0") == "1"


def _refuse(error: ConfigError) -> None:
    print(error, file=sys.stderr)
    sys.exit(USAGE_ERROR)


# Hydra's flags that take a value.
_VALUE_FLAGS = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--package", "-p", "--cfg", "-c")


def _positional(argv: list[str]) -> list[str]:
    """The overrides among the arguments."""
    return [
        argument
        for before, argument in zip(["", *argv], argv, strict=False)
        if not argument.startswith("-") and before not in (*_VALUE_FLAGS, "--info", "-i")
    ]


def _config_dirs(argv: list[str]) -> list[Path]:
    """Folders given with --config-dir: their options are valid names too."""
    after = [argument for before, argument in zip(argv, argv[1:], strict=False) if before in ("--config-dir", "-cd")]
    joined = [argument.partition("=")[2] for argument in argv if argument.startswith("--config-dir=")]
    return [Path(folder) for folder in after + joined]
