"""What ships in the package: the plays of Shakespeare, a tokenizer trained on them, GPT-2's (assets/PROVENANCE.md)."""

from __future__ import annotations

import hashlib
import json
import lzma
from importlib.resources import files

from gpt3d.data.errors import DataError

SHA256 = {
    "shakespeare.jsonl.xz": "df930414a13712b47140e13683288338e812b23f8413e44d049feaa6fe97c141",
    "shakespeare_bpe.json": "0e1bcc119690b1944d2b51f1cb1f1cff3aabf276289159e0707546df2f773b38",
    "gpt2_merges.txt.xz": "7a7f1932afdbe16b50230e3f4ef6ff1037208e6c276d97d3652608c385401f6e",
}


def read_asset(name: str) -> bytes:
    """Content of an embedded file, checked against its pinned sha256."""
    content = files("gpt3d.data").joinpath("assets", name).read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise DataError(f"embedded file {name} is damaged: sha256 {found}, expected {SHA256[name]}; reinstall gpt3d")
    return content


def gpt2_merges() -> list[str]:
    """The 50,000 merges of GPT-2 in order, each as two symbols with a space between."""
    lines = lzma.decompress(read_asset("gpt2_merges.txt.xz")).decode("utf-8").splitlines()
    return lines[1:]


def shakespeare() -> list[str]:
    """The 38 plays, one document each, in a fixed order."""
    content = lzma.decompress(read_asset("shakespeare.jsonl.xz")).decode("utf-8")
    return [json.loads(line)["text"] for line in content.split("\n") if line]
