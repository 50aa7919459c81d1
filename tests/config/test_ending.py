"""Exit codes and messages of commands that aren't Hydra's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpt3d.config.ending import READER_GONE, exit_code
from gpt3d.config.problems import ConfigError, Problem


def raising(error: BaseException) -> object:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError([Problem("a.key", 1, "is odd")]), 2, "The configuration has a problem:\n  - a.key=1: is odd\n"),
        (FileNotFoundError("no such thing"), 1, "gpt3d: no such thing\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=["refused", "answered", "interrupted"],
)
def test_what_a_user_can_mend(error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: raising(error), (OSError,)) == code
    assert capsys.readouterr() == ("", said)


def test_other_errors_keep_their_traceback() -> None:
    assert exit_code(lambda: None, ()) == 0
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: 1 / 0, (OSError,))


def test_a_reader_that_stops_early() -> None:
    code = """
import sys
from gpt3d.config.ending import exit_code
sys.exit(exit_code(lambda: [print("line", flush=True) for _ in range(100_000)], (OSError,)))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(30) == READER_GONE
