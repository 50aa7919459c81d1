"""Which data settings a source listens to: one that has no effect is refused rather than ignored."""

from __future__ import annotations

from gpt3d.config.schema import DataConfig, SourceConfig
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


def check_applies(prefix: str, source: SourceConfig) -> None:
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
