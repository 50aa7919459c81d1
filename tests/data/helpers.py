"""Short ways to a configuration, a corpus on disk, and what was prepared from it."""

import json
from pathlib import Path

from gpt3d.config.schema import DataConfig, HfConfig, ModelConfig, RunConfig, TokenizerConfig, TrainerConfig
from gpt3d.data import prepare
from gpt3d.data.cache import read_manifest
from gpt3d.data.token_file import TokenFile
from gpt3d.data.tokenizer import BytesTokenizer


def run_config(cache: Path, source: str, tokenizer: str | TokenizerConfig = "bytes", **data: object) -> RunConfig:
    kind = TokenizerConfig(kind=tokenizer) if isinstance(tokenizer, str) else tokenizer
    settings = {"seq_len": 16, "validation_fraction": 0.0, "workers": 1, **data}
    hf = HfConfig(**settings.pop("hf", {}))  # type: ignore[arg-type]
    return RunConfig(
        model=ModelConfig(vocab_size=2048),
        trainer=TrainerConfig(steps=10, global_batch_size=8, micro_batch_size=2),
        data=DataConfig(source=source, cache_dir=str(cache), hf=hf, **settings),  # type: ignore[arg-type]
        tokenizer=kind,
    )


def prepared(config: RunConfig) -> tuple[list[str], dict]:
    """The training documents of a byte-tokenized corpus, as text, and the manifest."""
    (folder,) = prepare(config)
    manifest = read_manifest(folder)
    assert manifest is not None
    return documents(TokenFile(folder / "train")), manifest


def documents(file: TokenFile) -> list[str]:
    """The documents of a byte-tokenized file, each checked to end with its end-of-document id."""
    texts, start = [], 0
    for length in file.document_lengths().tolist():
        ids = file.read(start, length)
        assert ids[-1] == BytesTokenizer.eod
        texts.append(BytesTokenizer().decode(ids[:-1]))
        start += length
    return texts


def write_jsonl(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
