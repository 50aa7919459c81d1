"""The data pipeline: text -> tokens on disk -> sample k as a function of (seed, k) -> microbatches of a rank."""

from gpt3d.data.build import Data, build_data, prepare
from gpt3d.data.dataset import Dataset, SyntheticDataset, TokenDataset, ValidationSet, unigram_entropy
from gpt3d.data.errors import DataError
from gpt3d.data.loader import IGNORE, Batches, MicroBatch, validation_batches
from gpt3d.data.tokenizer import Tokenizer, load_tokenizer

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
    "prepare",
    "unigram_entropy",
    "validation_batches",
]
