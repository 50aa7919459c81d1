"""Hugging Face `datasets` as a reader: anything `load_dataset` or `load_from_disk` opens, by row or as a stream."""

from __future__ import annotations

from functools import lru_cache
from glob import glob
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gpt3d.config.schema import HfConfig
from gpt3d.data.errors import DataError


def describe(config: HfConfig) -> str:
    """The dataset as a user names it."""
    named = f"{config.path}/{config.name}" if config.name else str(config.path)
    return f"{named}[{config.split}]"


def load(config: HfConfig, column: str) -> Any:
    """The dataset, or with `streaming` the iterable dataset, checked to have the text column."""
    if config.path is None:
        raise DataError(
            "data.source=hf needs data.hf.path: a dataset on the hub, a folder, or a format (json, parquet, text) "
            "with data.hf.data_files"
        )
    return _load(config.path, column, _frozen(config))


def identity(config: HfConfig) -> dict[str, Any]:
    """What is taken to determine the content: the arguments, and size and time of local files."""
    arguments = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(arguments, dict)
    local = [Path(path) for path in [*config.data_files, *([config.path] if config.path else [])]]
    stats = [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for path in local for p in _below(path)]
    return {str(key): value for key, value in arguments.items()} | {"local": stats}


def _frozen(config: HfConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


@lru_cache(maxsize=2)
def _load(path: str, column: str, frozen: str) -> Any:
    import datasets

    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(HfConfig), OmegaConf.create(frozen)))
    assert isinstance(config, HfConfig)
    try:
        if any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(path)
            rows = loaded[config.split] if isinstance(loaded, datasets.DatasetDict) else loaded
            rows = rows.to_iterable_dataset(num_shards=config.streams) if config.streaming else rows
        else:
            rows = datasets.load_dataset(
                path,
                config.name,
                split=config.split,
                revision=config.revision,
                **({"data_files": list(config.data_files)} if config.data_files else {}),
                streaming=config.streaming,
                **config.options,
            )
    except Exception as error:  # the library raises many kinds
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise DataError(f"data.hf: cannot load {describe(config)}: {type(error).__name__}: {error}{cause}") from error
    columns = rows.column_names or list(next(iter(rows.take(1)), {}))
    if column not in columns:
        raise DataError(
            f"{describe(config)} has no column data.text_column={column}; its columns are {sorted(columns)}"
        )
    return rows.select_columns([column])


def _below(path: Path) -> list[Path]:
    """Local files a name stands for: itself, those below it, or those a pattern matches; none for a hub name."""
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file())
    if path.is_file():
        return [path]
    return sorted(Path(p) for p in glob(str(path), recursive=True))
