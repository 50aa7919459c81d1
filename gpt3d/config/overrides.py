"""Command-line overrides: text stays text before Hydra reads them, and a clear answer after Hydra refused them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import CompactHydraException, HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt3d.config.problems import ConfigError, Problem, nearest
from gpt3d.config.schema import RunConfig, leaves

# What Hydra and OmegaConf raise for a user's mistake: for odd group values (null, a list, nothing) it is any of these.
REFUSALS = (HydraException, CompactHydraException, OmegaConfBaseException, ValueError, TypeError, AssertionError)
NONE_TAKEN = ("experiment", "sweep")  # groups of which no option need be chosen
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


def refuse_silent(overrides: Sequence[str]) -> None:
    """Raise ConfigError for what Hydra would take without a word and turn into something else: `model.bias=2`."""
    switches = {leaf.key for leaf in leaves() if leaf.type is bool}
    problems = []
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        if key in switches and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value) and value not in ("0", "1"):
            problems.append(Problem(key, value, "is a number, and this is a switch", "give true or false"))
    if problems:
        raise ConfigError(problems)


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
    if not key:
        return _unreadable(text, HydraException())
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return None
    if override.is_sweep_override() and not sweep and not override.is_delete():
        value = text.partition("=")[2]
        one = "" if key in options else f"; for one text write '{key}={quoted(value)}'"
        shown = value.replace('"', "") if key in options else value
        return Problem(key, shown, "several values are a sweep", f"to run them all add -m{one}")
    if override.is_delete():
        return _removal(text, key, options)
    if key in options:
        return _unknown_option(override, options[key]) or _added_twice(override)
    if "/" in key:
        return Problem(key, None, "there is no such config group", _did_you_mean(key, options))
    return unknown_key(key, text.partition("=")[2], options) or _wrong_type(override) or _added_twice(override)


def _removal(text: str, key: str, options: dict[str, list[str]]) -> Problem | None:
    """`~key`: every key of the schema has its place; only what a user added can be taken out."""
    if any(leaf.is_open and key.startswith(leaf.key + ".") for leaf in leaves()):
        return None
    fix = f"pick another option: {key}={'|'.join(options[key])}" if key in options else "set it to another value"
    return unknown_key(key, None, options) or Problem(text, None, "what a run needs can't be removed", fix)


def _added_twice(override: Override) -> Problem | None:
    """`+key=value` of what is there already."""
    text, key = override.input_line or "", override.key_or_group
    users = key.startswith(tuple(leaf.key + "." for leaf in leaves() if leaf.is_open))
    ours = key.partition(".")[0] in (*NONE_TAKEN, *(leaf.key.partition(".")[0] for leaf in leaves()))
    if not text.startswith("+") or text.startswith("++") or users or not ours:
        return None
    text = text.replace('"', "")
    return Problem(text, None, "is there already, and a plus adds something new", f"without the plus: {text[1:]}")


def _unreadable(text: str, error: Exception) -> Problem:
    key, equals, value = text.partition("=")
    how = "write key=value, e.g. optimizer.lr=1e-4; `--help` shows how"
    if not equals or not key.strip("+~"):
        return Problem(repr(text), None, "is not an override", how)
    if not re.fullmatch(r"[+~]{0,2}[\w-]+([./][\w-]+)*(@[\w.:-]*)?", key):
        return Problem(repr(text), None, f"{key!r} is not the name of a key", how)
    return Problem(
        key, value, f"can't be read ({str(error).splitlines()[0]})", f"in the shell, write '{key}={quoted(value)}'"
    )


def _unknown_option(override: Override, options: list[str]) -> Problem | None:
    if override.is_sweep_override():
        names = [str(name) for name in override.sweep_string_iterator()]
    else:
        names = ["null"] if override.value() is None else [str(override.value())]
    unknown = [name for name in (name.strip("\"'") for name in names) if name not in options]
    if not unknown:
        return None
    group, name = override.key_or_group, unknown[0]
    if name == "null" and group in NONE_TAKEN:
        return Problem(group, name, "is how it is when nothing is chosen", "leave it out")
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
    top = [*(groups or {}), *(known for known in keys if "." not in known)]
    siblings = [known for known in keys if known.rpartition(".")[0] == parent] if parent else [*keys, *top]
    same_name = [known for known in keys if known.rpartition(".")[2] == name]
    close = [*same_name, *nearest(key, siblings), *nearest(key, keys)]
    if not close and siblings:
        known = f"keys of {parent}: " + ", ".join(siblings) if parent else "groups and keys: " + ", ".join(top)
        return Problem(key, value, "there is no such key", known)
    return Problem(key, value, "there is no such key", "nearest: " + ", ".join(dict.fromkeys(close)) if close else "")


def _wrong_type(override: Override) -> Problem | None:
    key, value, typed = override.key_or_group, override.value(), override.get_value_string()
    if override.is_sweep_override():
        return None  # each job of the sweep is composed, and refused, by itself
    try:
        OmegaConf.update(OmegaConf.structured(RunConfig), key, value, force_add=True)
    except OmegaConfBaseException as error:
        return Problem(key, typed, _first_line(error), _expected(key, value))
    inside = [leaf.key for leaf in leaves() if leaf.is_open and f"{key}.".startswith(leaf.key + ".")]
    if inside and not override.is_add() and (key != inside[0] or value):
        return Problem(key, typed, "is not set yet", f"add it with a plus: +{override.input_line}")
    return None


def _expected(key: str, value: Any) -> str:
    """Which kind of value `key` takes; of a whole number that was written with a point or exponent, the number."""
    hint: Any = next((leaf.type for leaf in leaves() if leaf.key == key), None)
    if hint is None:
        parent = next((leaf for leaf in leaves() if leaf.is_open and key.startswith(leaf.key + ".")), None)
        return "keys go below it" if parent is None else f"give {_in_words(get_args(parent.type)[1])}"
    integer = hint is int or int in get_args(hint)
    if integer and isinstance(value, float) and value.is_integer():
        return f"as an integer: {key}={int(value)}"
    return f"give {_in_words(hint)}"


def _in_words(hint: Any) -> str:
    """A type of the schema as a user would say it."""
    plain = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
        Any: "a value",
    }
    if hint in plain:
        return plain[hint]
    kind, inner = get_origin(hint), get_args(hint)
    if kind is list:
        return "a list, [2,2]" if inner == (int,) else "a list, [a,b]"
    return "keys with values, {a:b}" if kind is dict else " or ".join(_in_words(one) for one in inner)


def _did_you_mean(name: str, names: Sequence[str] | dict[str, list[str]]) -> str:
    close = nearest(name, names)
    return f"did you mean {' or '.join(close)}? " if close else ""  # the space: a list may follow


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
    known = None if str(key).startswith("hydra") else unknown_key(str(key), None)
    return Problem(str(key), None, "; ".join(kept), known.fix if known and key != "configuration" else "")
