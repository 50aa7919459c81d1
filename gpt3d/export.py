"""Export a checkpoint for Hugging Face: `python -m gpt3d.export RUN --to FOLDER`.

The folder holds what `transformers` loads: safetensors, config.json, the tokenizer. It is written tensor by tensor
from a checkpoint of any layout, and checked by comparing logits.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from gpt3d.checkpoint import huggingface, settings
from gpt3d.checkpoint.blocks import CorruptCheckpoint
from gpt3d.checkpoint.huggingface import NoEquivalent
from gpt3d.checkpoint.initial import Region, from_huggingface
from gpt3d.checkpoint.reader import SavedTensors
from gpt3d.checkpoint.safetensors import INDEX, write_safetensors
from gpt3d.config.ending import exit_code
from gpt3d.config.load import to_typed
from gpt3d.config.schema import ModelConfig, ParallelConfig, PipelineConfig, PrecisionConfig, RunConfig
from gpt3d.data.build import open_tokenizer
from gpt3d.data.errors import DataError
from gpt3d.data.tokenizer import JsonTokenizer, Tokenizer
from gpt3d.data.vocabulary import byte_of_symbol
from gpt3d.model.build import build_chunks
from gpt3d.parallel.layout import single_process_layout
from gpt3d.parallel.placement import placement_of
from gpt3d.zero.engine import DTYPES

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
CHECKED_TOKENS = 64
TOLERANCE = 1e-4  # of logits that both sides compute in fp32


class ExportError(RuntimeError):
    """Nothing was exported, or what was exported is not the same model; the message says why."""


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m gpt3d.export", description="Export a checkpoint for Hugging Face.")
    parser.add_argument("run", type=Path, help="a run's folder (its newest checkpoint) or a step-* folder")
    parser.add_argument("--to", type=Path, required=True, help="folder to make; it must not exist")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="number format; default: that of the training")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="largest file, GB of 10^9 bytes (default 5)")
    parser.add_argument("--no-check", action="store_true", help="don't compare logits")
    given = parser.parse_args(arguments)
    if not given.shard_gb > 0:
        print(f"--shard-gb={given.shard_gb}: use a number above 0", file=sys.stderr)
        return 2
    return exit_code(lambda: _export(given), (CorruptCheckpoint, DataError, ExportError, NoEquivalent, OSError))


def _export(given: argparse.Namespace) -> None:
    source = settings.named(given.run, "RUN")[0]
    print(export(source, given.to, given.dtype, given.shard_gb, checked=not given.no_check))


def export(source: Path, target: Path, dtype: str | None = None, shard_gb: float = 5.0, checked: bool = False) -> str:
    """Write the folder `target` from the checkpoint folder `source`; says what was done. `checked`: see `check`.

    One tensor is in memory at a time. Raises ExportError if `target` exists; nothing is left of a failed export.
    """
    if target.exists():
        raise ExportError(f"{target} exists; name another folder, or remove it yourself")
    saved = SavedTensors(source)
    config = to_typed(saved.state["config"])
    dtype = dtype or config.precision.dtype
    tokenizer = open_tokenizer(config)
    described = huggingface.to_config(config.model, DTYPE_NAMES[dtype], tokenizer.eod)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write_weights(temporary, saved, config.model, DTYPES[dtype], shard_gb)
        _write_json(temporary / "config.json", described)
        _write_tokenizer(temporary, tokenizer, config.model.max_seq_len)
        said = "\n" + check(source, temporary, config) if checked else ""
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return f"{target}: {huggingface.architecture(config.model)} of {source}{said}"


def _write_weights(folder: Path, saved: SavedTensors, model: ModelConfig, dtype: torch.dtype, shard_gb: float) -> None:
    parts = huggingface.parts(model)
    shapes = {name: huggingface.shape_of(part, model) for name, part in parts.items()}
    last: dict[str, Tensor] = {}

    def read(name: str) -> Tensor:
        part = parts[name]
        if part.name not in last:  # queries, keys and values are one tensor of ours
            last.clear()
            last[part.name] = torch.from_numpy(saved.read(f"weights/{part.name}"))
        rows = last[part.name][part.start : part.stop]
        return rows.t() if part.transposed else rows

    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes.items()}
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        if shards[-1] and filled + sizes[name] > shard_gb * 1e9:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += sizes[name]
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", shapes, dtype, read)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard, dtype, read)
        weight_map |= dict.fromkeys(shard, file)
    _write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, max_seq_len: int) -> None:
    text = tokenizer.decode([tokenizer.eod])
    (folder / "tokenizer.json").write_text(_tokenizer_json(tokenizer, text), encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": text,
            "eos_token": text,
            "model_max_length": max_seq_len,
            "clean_up_tokenization_spaces": False,
        },
    )
    # no length: `max_new_tokens` here would win over the `max_length` that a caller gives
    _write_json(folder / "generation_config.json", {"bos_token_id": tokenizer.eod, "eos_token_id": tokenizer.eod})


def _tokenizer_json(tokenizer: Tokenizer, eod: str) -> str:
    """For `tokenizers`: its own file, or for the byte tokenizer one that gives the same ids (merges nothing)."""
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.content
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_of_symbol(), merges=[]))
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens([tokenizers.AddedToken(eod, special=True)])
    return built.to_str()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def check(source: Path, target: Path, config: RunConfig) -> str:
    """Compare the exported model with the checkpoint; a line that says how. Raises ExportError if they differ.

    The weights must be the checkpoint's, rounded, which is seen one tensor after the other. The logits of the model in
    `transformers` must be ours, where that is installed and the model fits into memory in fp32: one of them at a time.
    """
    read = from_huggingface(target, config.model)
    shapes = _check_weights(source, target, read, config.model)
    said = "check   weights are the checkpoint's; "
    need, free = 4 * sum(math.prod(shape) for shape in shapes.values()), _free_memory()
    if free is not None and 1.2 * need > free:
        return said + f"logits not compared: they need {1.2 * need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB is free"
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        return said + "logits not compared: pip install transformers, and export again"
    length = min(CHECKED_TOKENS, config.model.max_seq_len)
    ids = torch.randint(0, config.model.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    ours = our_logits(config, lambda name: read(name, (0,) * len(shapes[name]), shapes[name]), ids)
    logging.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, output_loading_info=True)
    theirs, info = loaded
    if info["missing_keys"] or info["unexpected_keys"]:
        raise ExportError(f"transformers finds other tensors than it expects: {info}")
    with torch.no_grad():
        difference, largest = float((theirs.eval()(ids).logits[0] - ours).abs().max()), float(ours.abs().max())
    if not difference < TOLERANCE * max(1.0, largest):
        raise ExportError(f"not exported: the logits in transformers would differ from ours by {difference:.1e}")
    return said + f"logits in transformers and here differ by at most {difference:.1e} (of {largest:.1f})"


def _check_weights(source: Path, target: Path, read: Region, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Raise ExportError unless the folder holds the checkpoint's weights, rounded; their shapes by our names."""
    saved, shapes = SavedTensors(source), dict[str, tuple[int, ...]]()
    dtype = getattr(torch, json.loads((target / "config.json").read_text())["dtype"])
    for name in dict.fromkeys(part.name for part in huggingface.parts(model).values()):
        shape = shapes[name] = saved.shape(f"weights/{name}")
        want = torch.from_numpy(saved.read(f"weights/{name}")).to(dtype).float()
        if not torch.equal(read(name, (0,) * len(shape), shape), want):
            raise ExportError(f"not exported: what was written of {name} is not what {source} holds")
    return shapes


def _free_memory() -> int | None:
    """Bytes that this machine can still give; None where that is not known."""
    with contextlib.suppress(OSError, KeyError, ValueError), open("/proc/meminfo") as file:
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in file)}
        return 1024 * kib["MemAvailable"]
    return None


@torch.no_grad()
def our_logits(config: RunConfig, read: Callable[[str], Tensor], ids: Tensor) -> Tensor:
    """Logits [s, v] in fp32 of our model, `read` giving its global weights by name, on one process: ids [1, s]."""
    single = dataclasses.replace(
        config, parallel=ParallelConfig(), pipeline=PipelineConfig(), precision=PrecisionConfig(dtype="fp32"),
        data=dataclasses.replace(config.data, seq_len=ids.shape[1]),
    )  # fmt: skip
    (chunk,) = build_chunks(single, single_process_layout())
    for parameter in chunk.parameters():
        value = read(placement_of(parameter).name)
        parameter[: len(value)].copy_(value)
    return chunk.eval()(ids, 0)[:, 0, : config.model.vocab_size].float()


if __name__ == "__main__":
    sys.exit(main())
