"""The data pipeline: text -> tokens on disk -> sample k as a function of (seed, k) -> microbatches of a rank.

The loader needs torch and is imported on first use: the helper processes that tokenize stay small without it.
"""

from typing import TYPE_CHECKING, Any

from gpt3d.data.errors import DataError

if TYPE_CHECKING:
    from gpt3d.data.build import Data, build_data, open_tokenizer, prepare
    from gpt3d.data.dataset import Dataset, SyntheticDataset, TokenDataset, ValidationSet
    from gpt3d.data.loader import IGNORE, Batches, MicroBatch, validation_batches
    from gpt3d.data.tokenizer import Tokenizer, load_tokenizer

_HOME = {
    "build": ("Data", "build_data", "open_tokenizer", "prepare"),
    "dataset": ("Dataset", "SyntheticDataset", "TokenDataset", "ValidationSet"),
    "loader": ("IGNORE", "Batches", "MicroBatch", "validation_batches"),
    "tokenizer": ("Tokenizer", "load_tokenizer"),
}

__all__ = [
    "IGNORE",
    "Batches",
    "Data",
    "DataError",
    "Dataset",
    "MicroBatch",
    "SyntheticDataset",
    "TokenDataset",
    "Tokenizer",
    "ValidationSet",
    "build_data",
    "load_tokenizer",
    "open_tokenizer",
    "prepare",
    "validation_batches",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"gpt3d.data.{module}"), name)
    raise AttributeError(f"module gpt3d.data has no attribute {name}")
