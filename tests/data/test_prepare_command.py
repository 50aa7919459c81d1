"""The command `python -m gpt3d.prepare`, and the look into what it made."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpt3d.data import DataError, prepare
from gpt3d.data.inspection import inspect
from gpt3d.data.token_file import TokenFileWriter
from tests.data.helpers import run_config, write_jsonl

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cwd / "cache")}
    run = [sys.executable, "-m", "gpt3d.prepare", *arguments]
    return subprocess.run(run, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_prepare_and_inspect(tmp_path: Path):
    records = [{"body": f"document {i}"} for i in range(40)] + [{"body": None}]
    write_jsonl(tmp_path / "a.jsonl", records)
    arguments = ["data=files", "data.paths=[a.jsonl]", "data.text_column=body", "tokenizer=bytes"]
    first = command(*arguments, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.splitlines()[0])
    assert folder.parent == tmp_path / "cache" / "gpt3d"
    for words in ("38 documents", "2 documents", "1 null", "a.jsonl:41"):
        assert words in first.stdout
    assert "preparing files in" in first.stderr
    assert "preparing" not in command(*arguments, cwd=tmp_path).stderr, "done once"
    assert not (tmp_path / "outputs").exists(), "no run folder"
    shown = command("--inspect", str(folder), cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    for words in ("38 documents", "checksum: good", "|document 0<|endoftext|>|"):
        assert words in shown.stdout


def test_a_mistake_is_one_message(tmp_path: Path):
    failed = command("data=files", "data.paths=[absent.txt]", cwd=tmp_path)
    assert failed.returncode != 0 and "Traceback" not in failed.stderr
    assert failed.stderr.startswith("gpt3d: data.paths: absent.txt matches no file")
    assert len(failed.stderr.splitlines()) == 1


def test_inspect_notices_damage(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "Now is the winter"}])
    (folder,) = prepare(run_config(tmp_path / "c", "files", "shakespeare_bpe", paths=[str(path)]))
    report = inspect(folder / "train.bin")
    assert "checksum: good" in report and "|Now is the winter<|endoftext|>|" in report
    content = bytearray((folder / "train.bin").read_bytes())
    content[0] ^= 1
    (folder / "train.bin").write_bytes(content)
    assert "checksum: WRONG" in inspect(folder)


def test_inspect_files_of_others(tmp_path: Path):
    writer = TokenFileWriter(tmp_path / "t", np.dtype("<u2"))
    for length in (1, 2, 3, 100):
        writer.add(np.full(length, 7))
    writer.close()
    report = inspect(tmp_path / "t")
    assert "4 documents, 106 tokens" in report and "checksum: none recorded" in report
    assert "median 2, longest 100" in report
    assert "2 to           3            2 ####" in report
    with pytest.raises(DataError, match=r"no folder with \.idx files"):
        inspect(tmp_path / "absent")


def test_helper_processes_stay_small():
    """They must not load torch (200 MB), nor the caller's main module."""
    code = "import sys, gpt3d.data.helper; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=300).returncode == 0
