"""The corpora that the data settings ask for. A setting that its source does not listen to is refused, not ignored."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt3d.config.schema import DataConfig, SourceConfig
from gpt3d.data.blend import normalized
from gpt3d.data.errors import DataError

_PREPARED = ("shakespeare", "stdlib", "files", "hf")
_LISTENING = {
    "paths": ("files", "tokens"),
    "validation_paths": ("files", "tokens"),
    "txt_documents": ("files",),
    "token_dtype": ("tokens",),
    "text_column": ("files", "hf"),
    "on_error": ("files", "hf"),
    "deduplicate": _PREPARED,
    "shuffle_documents": _PREPARED,
    "hf": ("hf",),
    "blend": ("blend",),
    "packing": (*_PREPARED, "tokens", "blend"),
    "document_masks": (*_PREPARED, "tokens", "blend"),
}


def corpora(data: DataConfig) -> dict[str, tuple[SourceConfig, float]]:
    """The corpora of a run by name, each with its share of the samples; one unless `data.source=blend`."""
    _check_applies("data", data)
    if data.source != "blend":
        return {data.source: (data, 1.0)}
    if not data.blend:
        raise DataError(
            "data.source=blend needs data.blend, by name: "
            "{plays: {source: shakespeare, weight: 0.7}, code: {source: stdlib, weight: 0.3}}"
        )
    parts = {name: _blend_part(name, keys) for name, keys in data.blend.items()}
    shares = normalized({name: weight for name, (_, weight) in parts.items()})
    return {name: (parts[name][0], share) for name, share in shares.items()}


def _blend_part(name: str, keys: Any) -> tuple[SourceConfig, float]:
    keys = dict(keys)
    try:
        weight = float(keys.pop("weight"))
        source = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SourceConfig), keys))
    except (KeyError, TypeError, ValueError, OmegaConfBaseException) as error:
        raise DataError(
            f"data.blend.{name}: {str(error).splitlines()[0]}; it needs weight, source and the keys of its source"
        ) from error
    assert isinstance(source, SourceConfig)
    for item in fields(SourceConfig):
        choices, value = item.metadata.get("choices"), getattr(source, item.name)
        if choices and value not in choices:
            raise DataError(f"data.blend.{name}.{item.name}={value} is not a choice; one of: {', '.join(choices)}")
    if source.source not in (*_PREPARED, "tokens") or source.hf.streaming:
        raise DataError(
            f"data.blend.{name}.source={source.source}: a blend is of shakespeare, stdlib, files, hf, tokens"
        )
    _check_applies(f"data.blend.{name}", source)
    return source, weight


def _check_applies(prefix: str, source: SourceConfig) -> None:
    """Raise DataError if a key was set that has no effect with this source; `prefix`: where the keys are."""
    default = DataConfig() if isinstance(source, DataConfig) else SourceConfig()
    for key, sources in _LISTENING.items():
        value = getattr(source, key, None)
        if value != getattr(default, key, None) and source.source not in sources:
            shown = "..." if key in ("hf", "blend") else value
            where = "; set it in the parts" if source.source == "blend" else ""
            raise DataError(
                f"{prefix}.{key}={shown} has no effect with {prefix}.source={source.source}, only with "
                f"{', '.join(sources)}{where}"
            )
