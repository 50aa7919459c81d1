"""Command-line overrides: text stays text before Hydra reads them, and a clear answer after Hydra refused them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import CompactHydraException, HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt3d.config.problems import Problem, nearest
from gpt3d.config.schema import RunConfig, leaves

# What Hydra and OmegaConf raise for a user's mistake; Hydra uses a bare ValueError for `group=null`.
REFUSALS = (HydraException, CompactHydraException, OmegaConfBaseException, ValueError)
_ASSIGNMENT = re.compile(r"(?P<key>\+{0,2}(?P<name>[\w./]+)(?:@[\w.:]*)?)=(?P<value>.*)", re.DOTALL)


def group_options(folders: Sequence[Path]) -> dict[str, list[str]]:
    """The options of every config group in these folders, sorted."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(options) for group, options in sorted(found.items())}


def quote_overrides(overrides: Sequence[str], conf_dir: Path) -> list[str]:
    """Quote values that Hydra's grammar would not leave as text though they are names.

    Hydra reads `zero=1` as an integer and refuses it as the name of an option, turns `run_name=1e5` into 100000.0 and
    fails on `=` or `#` in a path. Group options and the schema's text keys are names, so they are passed on as typed.
    """
    names = {leaf.key for leaf in leaves() if leaf.is_text} | set(group_options([conf_dir]))
    return [_quote_override(override, names) for override in overrides]


def _quote_override(override: str, names: set[str]) -> str:
    match = _ASSIGNMENT.fullmatch(override)
    if match is None or match["name"] not in names:
        return override
    key, value = match["key"], match["value"]
    if choice := re.fullmatch(r"choice\((.*)\)", value):
        return f"{key}=choice({_quote_elements(choice[1])})"
    return f"{key}={_quote_elements(value)}"


def _quote_elements(value: str) -> str:
    """Quote the elements of a (comma-separated) value that aren't plain text; leave structured values alone."""
    if value in ("", "null") or re.search(r"""["'()\[\]{}]""", value):
        return value
    return ",".join(element if _reads_as_text(element) else quoted(element) for element in value.split(","))


def _reads_as_text(element: str) -> bool:
    try:
        return isinstance(OverridesParser.create().parse_override(f"key={element}").value(), str)
    except REFUSALS:
        return False


def quoted(value: str) -> str:
    """The value as a double-quoted string of Hydra's grammar."""
    return '"' + re.sub(r'(\\*)"', r'\1\1\\"', value) + '"'


def diagnose(overrides: Sequence[str], error: Exception, folders: Sequence[Path], sweep: bool = False) -> list[Problem]:
    """Why Hydra refused these overrides: every mistake found in them, else what `error` says."""
    return mistakes(overrides, folders, sweep) or [_from_error(error)]


def mistakes(overrides: Sequence[str], folders: Sequence[Path], sweep: bool = False) -> list[Problem]:
    """What can be told to be wrong from the overrides alone; `sweep`: they may give several values."""
    options = group_options(folders)
    return [problem for override in overrides if (problem := _diagnose_one(override, options, sweep)) is not None]


def _diagnose_one(text: str, options: dict[str, list[str]], sweep: bool) -> Problem | None:
    try:
        override = OverridesParser.create().parse_override(text)
    except REFUSALS as error:
        return _unreadable(text, error)
    key = override.key_or_group
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return None
    if override.is_sweep_override() and not sweep and not override.is_delete():
        value = text.partition("=")[2]
        return Problem(
            key,
            value,
            "several values are a sweep",
            f"to run them all add -m; for one text write '{key}={quoted(value)}'",
        )
    if key in options:
        return None if override.is_delete() else _unknown_option(override, options[key])
    if "/" in key:
        return Problem(key, None, "there is no such config group", _did_you_mean(key, options))
    return None if override.is_delete() else unknown_key(key, text.partition("=")[2], options) or _wrong_type(override)


def _unreadable(text: str, error: Exception) -> Problem:
    key, equals, value = text.partition("=")
    if not equals:
        return Problem(text, None, "is not an override", "write key=value, e.g. optimizer.lr=1e-4; `--help` shows how")
    return Problem(
        key, value, f"can't be read ({str(error).splitlines()[0]})", f"in the shell, write '{key}={quoted(value)}'"
    )


def _unknown_option(override: Override, options: list[str]) -> Problem | None:
    if override.is_sweep_override():
        names = [str(name) for name in override.sweep_string_iterator()]
    else:
        names = ["null"] if override.value() is None else [str(override.value())]
    unknown = [name for name in (name.strip("\"'") for name in names) if name not in options]
    if not unknown or (unknown == ["null"] and override.key_or_group in ("experiment", "local", "sweep")):
        return None
    group, name = override.key_or_group, unknown[0]
    return Problem(
        group,
        name,
        "there is no such option",
        _did_you_mean(name, options) + f"{group} is one of: " + ", ".join(options),
    )


def unknown_key(key: str, value: str | None, groups: dict[str, list[str]] | None = None) -> Problem | None:
    """A problem with the nearest valid names, if the schema has no such key, section or open dictionary."""
    keys = [leaf.key for leaf in leaves()]
    if key in keys or any(known.startswith(key + ".") for known in keys):
        return None
    opened = next((leaf.key for leaf in leaves() if leaf.is_open and key.startswith(leaf.key + ".")), None)
    if opened:
        return None
    parent, _, name = key.rpartition(".")
    siblings = [known for known in keys if known.rpartition(".")[0] == parent] if parent else [*keys, *(groups or {})]
    same_name = [known for known in keys if known.rpartition(".")[2] == name]
    close = [*same_name, *nearest(key, siblings), *nearest(key, keys)]
    if not close and siblings:
        return Problem(key, value, "there is no such key", f"keys of {parent}: " + ", ".join(siblings))
    return Problem(key, value, "there is no such key", "nearest: " + ", ".join(dict.fromkeys(close)) if close else "")


def _wrong_type(override: Override) -> Problem | None:
    key, value, typed = override.key_or_group, override.value(), override.get_value_string()
    if override.is_sweep_override():
        return None  # each job of the sweep is composed, and refused, by itself
    if override.is_add() is False and any(leaf.is_open and key.startswith(leaf.key + ".") for leaf in leaves()):
        return Problem(key, typed, "is not set yet", f"add it with a plus: +{override.input_line}")
    try:
        OmegaConf.update(OmegaConf.structured(RunConfig), key, value, force_add=True)
    except OmegaConfBaseException as error:
        return Problem(key, typed, _first_line(error), _expected(key))
    return None


def _expected(key: str) -> str:
    hint: Any = next((leaf.type for leaf in leaves() if leaf.key == key), None)
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return (
        f"give {names[hint]}"
        if hint in names
        else f"give {hint}".replace("typing.", "")
        if hint
        else "keys go below it"
    )


def _did_you_mean(name: str, names: Sequence[str] | dict[str, list[str]]) -> str:
    close = nearest(name, names)
    return f"did you mean {' or '.join(close)}? " if close else ""


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].strip() if str(error) else type(error).__name__


def _from_error(error: Exception) -> Problem:
    """What Hydra or OmegaConf says, without its stack: for mistakes in YAML files rather than in overrides."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None) or getattr(error, "missing_cfg_file", None) or "configuration"
    lines = [line.strip() for line in [*str(error).splitlines(), *str(cause).splitlines()]]
    kept = [
        line
        for line in dict.fromkeys(lines)
        if line and not line.startswith(("full_key", "object_type", "reference_type"))
    ]
    known = unknown_key(str(key), None)
    return Problem(str(key), None, "; ".join(kept), known.fix if known and key != "configuration" else "")
