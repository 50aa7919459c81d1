"""Turn text into token files, or look into some: `python -m gpt3d.prepare [key=value]` or `--inspect PATH`."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from gpt3d.config.cli import run_cli
from gpt3d.config.schema import RunConfig
from gpt3d.data.build import prepare
from gpt3d.data.cache import read_manifest
from gpt3d.data.errors import DataError
from gpt3d.data.inspection import inspect

HELP = """
Tokenize the corpus of a configuration into Megatron .bin/.idx files in the cache, and print where they are. Training
does this by itself when needed; use this command to do it beforehand on a CPU machine, or to look at the result.

  python -m gpt3d.prepare data=files data.paths=[corpus/*.jsonl.gz] tokenizer=gpt2
  python -m gpt3d.prepare data=hf data.hf.path=json data.hf.data_files=[a.jsonl] data.text_column=body
  python -m gpt3d.prepare data=files data.paths=[corpus/] tokenizer=trained tokenizer.vocab_size=16384
  python -m gpt3d.prepare --inspect FOLDER           documents, lengths, samples and checksums of what was prepared
"""


def main() -> None:
    """The command."""
    argv = sys.argv[1:]
    if "--inspect" in argv:
        inspect_there(argv)
        return
    try:
        plain = not any(argument.startswith("-") for argument in argv)
        no_run_folder = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none"] if plain else []
        sys.argv[1:] = [*argv, *no_run_folder]
        run_cli(prepare_here, HELP)
    except KeyboardInterrupt:
        sys.exit(130)


def inspect_there(argv: list[str]) -> None:
    """Print the report on the folder or files that `--inspect PATH` names."""
    if len(argv) != 2 or argv[0] != "--inspect":
        sys.exit("usage: python -m gpt3d.prepare --inspect PATH (a prepared folder, or a .bin file's name)")
    try:
        print(inspect(Path(argv[1])))
    except DataError as error:
        sys.exit(f"gpt3d: {error}")


def prepare_here(config: RunConfig) -> None:
    """Prepare what is missing and print what there is."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)  # to stderr, in place of Hydra's
    begin = time.perf_counter()
    try:
        folders = prepare(config)
    except DataError as error:
        sys.exit(f"gpt3d: {error}")
    if not folders:
        print(f"data={config.data.source}: nothing to prepare")
    for folder in folders:
        manifest = read_manifest(folder) or {}
        print(folder)
        for name in ("train", "validation"):
            print(f"  {name:<10} {manifest[name]['documents']:>12,} documents {manifest[name]['tokens']:>16,} tokens")
        for kind, count in manifest["left_out"].items():
            print(f"  {count:,} {kind}")
        for place in manifest["places"]:
            print(f"    {place}")
    print(f"{time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
