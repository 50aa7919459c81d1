"""Token files: Megatron's bytes, and every kind of damage is named."""

import struct
from pathlib import Path

import numpy as np
import pytest

from gpt3d.data.errors import DataError
from gpt3d.data.token_file import TokenFile, TokenFileWriter, token_dtype


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 1000) -> str:
    writer = TokenFileWriter(prefix, token_dtype(vocab_size))
    for document in documents:
        writer.add(np.array(document, np.int64))
    return writer.close()


def test_bytes_are_those_of_megatron(tmp_path: Path):
    """The layout written out by hand: what Megatron's IndexedDatasetBuilder gives for these three documents."""
    write(tmp_path / "t", [[1, 2, 3], [], [500]])
    assert (tmp_path / "t.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 500)
    assert (tmp_path / "t.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 3, 4)
        + struct.pack("<3i", 3, 0, 1)
        + struct.pack("<3q", 0, 6, 6)
        + struct.pack("<4q", 0, 1, 2, 3)
    )


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65499, np.uint16), (65500, np.int32)])
def test_round_trip(tmp_path: Path, vocab_size: int, dtype: type):
    documents = [[vocab_size - 1, 0], [7] * 5, [1]]
    checksum = write(tmp_path / "corpus.v1", documents, vocab_size)
    file = TokenFile(tmp_path / "corpus.v1")
    assert (file.dtype, file.documents, file.tokens) == (dtype, 3, 8)
    assert file.document_lengths().tolist() == [2, 5, 1]
    assert file.read(1, 3).tolist() == [0, 7, 7]
    assert file.read(8, 0).tolist() == []
    assert file.checksum() == checksum


def test_documents_of_several_sequences_and_modes(tmp_path: Path):
    """Sentence-split files have fewer documents than sequences; multimodal ones have a mode byte a sequence."""
    (tmp_path / "t.bin").write_bytes(struct.pack("<6B", *range(6)))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 1, 3, 3)
    index = head + struct.pack("<3i", 1, 2, 3) + struct.pack("<3q", 0, 1, 3) + struct.pack("<3q", 0, 2, 3) + b"\0\0\0"
    (tmp_path / "t.idx").write_bytes(index)
    file = TokenFile(tmp_path / "t")
    assert file.document_lengths().tolist() == [3, 3]
    assert file.read(0, 6).tolist() == list(range(6))


def test_damaged_offsets_do_not_matter(tmp_path: Path):
    """NVIDIA/Megatron-LM#1672: offsets that overflowed int32 when files were merged."""
    write(tmp_path / "t", [[1, 2], [3]])
    raw = bytearray((tmp_path / "t.idx").read_bytes())
    raw[34 + 8 + 8 : 34 + 8 + 16] = struct.pack("<q", -5)
    (tmp_path / "t.idx").write_bytes(raw)
    assert TokenFile(tmp_path / "t").read(0, 3).tolist() == [1, 2, 3]


@pytest.mark.parametrize("bad", [70000, 65536, -1])
def test_ids_beyond_the_dtype_are_refused(tmp_path: Path, bad: int):
    """princeton-nlp/LLM-Shearing#65: uint16 silently turns 70000 into 4464."""
    with pytest.raises(DataError, match=f"token id {bad} does not fit uint16"):
        write(tmp_path / "t", [[1], [bad]])


def test_damage_is_named(tmp_path: Path):
    write(tmp_path / "t", [[1, 2, 3]])
    index, binary = (tmp_path / "t.idx"), (tmp_path / "t.bin")
    good, tokens = index.read_bytes(), binary.read_bytes()

    def error(idx: bytes, content: bytes = tokens) -> str:
        index.write_bytes(idx)
        binary.write_bytes(content)
        with pytest.raises(DataError) as info:
            TokenFile(tmp_path / "t")
        return str(info.value)

    assert "truncated" in error(good[:-1])
    assert "no Megatron index" in error(good[:20])
    assert "TNTIDX" in error(b"TNTIDX\0\0" + good)
    assert "dtype code 9" in error(good[:17] + b"\x09" + good[18:])
    assert "describes 6" in error(good, tokens[:-1])
    assert "describes 6" in error(good, tokens + b"\0\0")
    with pytest.raises(DataError, match="cannot open"):
        TokenFile(tmp_path / "absent")


def test_a_file_cut_while_in_use_is_an_error_not_a_crash(tmp_path: Path):
    """Lightning-AI/litData#454: a memory map would end the process with SIGBUS."""
    write(tmp_path / "t", [[1] * 100])
    file = TokenFile(tmp_path / "t")
    with open(tmp_path / "t.bin", "r+b") as binary:
        binary.truncate(50)
    with pytest.raises(DataError, match="cut while in use"):
        file.read(0, 100)
    with pytest.raises(DataError, match="asked of 100"):
        file.read(50, 51)


def test_empty_file(tmp_path: Path):
    write(tmp_path / "t", [])
    assert (TokenFile(tmp_path / "t").documents, TokenFile(tmp_path / "t").tokens) == (0, 0)
