"""`init_from`: weights to begin a new run with, from a Hugging Face folder or from one of our checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt3d.checkpoint import huggingface, settings
from gpt3d.checkpoint.blocks import CorruptCheckpoint
from gpt3d.checkpoint.huggingface import Part
from gpt3d.checkpoint.planner import PieceLoadPlanner, State
from gpt3d.checkpoint.safetensors import SafetensorsFolder
from gpt3d.checkpoint.state import state_of
from gpt3d.checkpoint.storage import RawReader
from gpt3d.config.schema import ModelConfig
from gpt3d.parallel.placement import placement_of
from gpt3d.zero.fragments import Fragment

SHOWN = 5  # of many problems
Region = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]


def load_initial(path: Path, state: State, model: ModelConfig) -> None:
    """Fill the weights of this rank's state; moments become zero. Raises CorruptCheckpoint or ConfigError."""
    for key, pieces in state.items():
        if not key.startswith("weights/"):
            for part in pieces.parts:
                part.values.zero_()
    _fill({key: pieces for key, pieces in state.items() if key.startswith("weights/")}, path, model)


def read_weights(path: Path, parameters: Iterable[nn.Parameter], model: ModelConfig) -> None:
    """Fill these parameters of a stage, rounded to their number format. Raises CorruptCheckpoint or ConfigError."""
    whole = (Fragment(placement_of(p), 0, {"weights": p.data.view(-1)}) for p in parameters)
    _fill(state_of(whole, model), path, model)


def _fill(weights: State, path: Path, model: ModelConfig) -> None:
    if (path / "config.json").is_file():
        region = from_huggingface(path, model)
        for key, pieces in weights.items():
            for part in pieces.parts:
                part.values.copy_(region(key.removeprefix("weights/"), part.offsets, tuple(part.values.shape)))
        return
    reader = RawReader(settings.named(path, "init_from")[0])
    planner = PieceLoadPlanner()
    planner.set_up_planner(weights, reader.read_metadata())
    reader.read_data(planner.create_local_plan(), planner)


def from_huggingface(path: Path, model: ModelConfig) -> Region:
    """region(our name, offsets, sizes) -> that rectangle in fp32, read from the safetensors in `path`."""
    tensors = SafetensorsFolder(path)
    by_name: dict[str, list[tuple[str, Part]]] = {}
    for theirs, part in named_parts(tensors, model).items():
        by_name.setdefault(part.name, []).append((theirs, part))

    def region(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        found = []
        for theirs, part in by_name[name]:
            first, stop = max(offsets[0], part.start), min(offsets[0] + sizes[0], part.stop)
            if first < stop:
                whole: Any = tensors[theirs]
                whole = (whole.t() if part.transposed else whole)[first - part.start : stop - part.start]
                for dim in range(1, len(sizes)):
                    whole = whole.narrow(dim, offsets[dim], sizes[dim])
                found.append(whole.to(torch.float32))
        return torch.cat(found)

    return region


def check_folder(path: Path, model: ModelConfig) -> None:
    """Raise CorruptCheckpoint unless the Hugging Face folder holds this model and nothing else; reads headers only."""
    named_parts(SafetensorsFolder(path), model)


def named_parts(tensors: SafetensorsFolder, model: ModelConfig) -> dict[str, Part]:
    """The parts of our tensors by the names in this folder. Raises CorruptCheckpoint with all that is wrong.

    GPT-2 as it was published has names without `transformer.`. Masks and rotary frequencies that old versions of
    transformers stored are no weights.
    """
    parts, found = huggingface.parts(model), tensors.entries.keys()
    prefix = huggingface.PREFIX[huggingface.architecture(model)]
    if not any(name.startswith(prefix) for name in found):
        parts = {name.removeprefix(prefix): part for name, part in parts.items()}
    shapes = {name: huggingface.shape_of(part, model) for name, part in parts.items()}
    extra = sorted(name for name in found - parts.keys() if not name.endswith(huggingface.BUFFERS))
    if model.tied_embeddings and extra == ["lm_head.weight"]:
        embedding = next(name for name, part in parts.items() if part.name == "embedding.word.weight")
        if embedding in found and torch.equal(tensors["lm_head.weight"], tensors[embedding]):
            extra = []  # stored twice
    problems = [f"{name} is missing" for name in parts if name not in found]
    for name in parts:
        if name in found and (shape := tensors.shape(name)) != shapes[name]:
            problems.append(f"{name} has the shape {list(shape)}, and {list(shapes[name])} is wanted")
    problems += [f"{name} is in no place of this model" for name in extra]
    if problems:
        listed = "; ".join(problems[:SHOWN]) + (f"; and {len(problems) - SHOWN} more" if problems[SHOWN:] else "")
        raise CorruptCheckpoint(f"{tensors.folder} does not fit: {listed}")
    return parts
