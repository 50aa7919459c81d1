"""The live panel in a pseudo-terminal, and plain lines where there is none."""

from __future__ import annotations

import fcntl
import io
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as Terminal

from gpt3d.tracking.metrics import Metrics
from gpt3d.tracking.panel import LiveConsole, memory_table, new_console, sparkline
from gpt3d.tracking.sinks import Console
from tests.config.conftest import Make

LINE: Metrics = {
    "step": 1, "loss": 3.25, "lr": 1e-3, "grad_norm": 1.0, "skipped_steps": 2, "tokens_per_s": 1000.0,
    "tokens_per_s_per_device": 500.0, "mfu": None, "tokens": 1000, "data_wait": 0.1, "memory_gb": 2.0,
    "memory_now_gb": 0.5, "eta_s": 61.0, "pipeline_bubble": 0.2, "memory_gb_stage_0": 2.0, "memory_now_gb_stage_0": 1.5,
    "memory_gb_stage_1": 1.0, "memory_now_gb_stage_1": 0.5,
}  # fmt: skip
PROGRAM = f"""
import os, sys, time, warnings, signal
from gpt3d.tracking.panel import LiveConsole
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with it ignored
console = LiveConsole(200, "my[run]")
console.print("before")
try:
    for step in range(int(sys.argv[1])):
        console.advance()
        if step == 5:
            print("printed [bold]x[/bold]")
            warnings.warn("careful")
            os.write(1, b"from another process\\n")
        console.log({LINE!r} | {{"step": step + 1, "loss": 9 - step / 30}})
        time.sleep(0.01)
finally:
    console.close()
print("after")
"""
ONLY_THE_CONSOLE = f"""
import time
from gpt3d.tracking.panel import LiveConsole
console = LiveConsole(100, "my[run]")
console.print("before")
for step in range(60):
    console.advance()
    console.log({LINE!r})
    time.sleep(0.01)
    console.print(f"line {{step}}")
console.close()
"""


def run_in_terminal(columns: int, rows: int, steps: int, end: int | None = None, resize: bool = False) -> str:
    """What a terminal of that size is sent."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(steps)], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    got, stop = b"", time.monotonic() + 120
    while time.monotonic() < stop:
        try:
            if select.select([mine], [], [], 0.2)[0]:
                got += os.read(mine, 65536)
        except OSError:  # the program has gone
            break
        if resize and b"elapsed" in got:
            fcntl.ioctl(mine, termios.TIOCSWINSZ, struct.pack("HHHH", 6, 30, 0, 0))
            resize = False
        if end is not None and got.count(b"elapsed") > 1:
            process.send_signal(end)
            end = None
    process.wait(60)
    os.close(mine)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", lambda m: m[0] if m[0].endswith(("l", "h")) else "", got.decode())


def test_what_is_printed_stands_above_the_panel() -> None:
    text = run_in_terminal(100, 30, 60)
    for words in ("before", "printed [bold]x[/bold]", "careful", "from another process", "my[run]", "after"):
        assert words in text, words
    last = text[text.rindex("╭") :]
    assert "60/200" in last and "loss 7.0333" in last and "█" in last and "▁" in last and "skipped 2" in last
    assert "memory stage 1" in last and "peak 1.00" in last and re.search(r"ETA \d:\d\d", last)
    assert last.rindex("╰") < last.index("after")


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_usable_terminal(end: int) -> None:
    text = run_in_terminal(100, 30, 2000, end=end)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is visible"
    assert "after" not in text


def test_a_terminal_that_becomes_too_small_gets_one_line() -> None:
    text = run_in_terminal(100, 30, 100, resize=True)
    assert "100/200" in text and "after" in text


@pytest.mark.parametrize("opened, seen", [(os.pipe, b"before"), (pty.openpty, b"elapsed")])
def test_a_terminal_that_goes_away_ends_nothing(opened: Callable[[], tuple[int, int]], seen: bytes) -> None:
    mine, theirs = opened()
    env = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen([sys.executable, "-c", ONLY_THE_CONSOLE], stdout=theirs, stderr=subprocess.PIPE, env=env)
    os.close(theirs)
    got = b""
    while seen not in got:
        got += os.read(mine, 65536)
    os.close(mine)
    said = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 0, said
    assert said.count("the terminal can't be written to") == 1 and "Error" not in said.replace("[Errno", ""), said


@given(st.integers(1, 150), st.integers(1, 40))
def test_any_size_is_drawn_within_it(columns: int, rows: int) -> None:
    console = LiveConsole(100, "a long title of a run that does not fit")
    console.terminal = Terminal(width=columns, height=rows, force_terminal=True, color_system=None)
    for loss in (3.0, 2.0, 2.5):
        console.seen, console.losses = LINE, [*console.losses, loss]
        drawn = console.terminal.render_lines(console.render(), pad=False)
        lines = ["".join(segment.text for segment in line) for line in drawn]
        assert all(len(line) <= columns for line in lines) and len(lines) <= rows


def test_letters_that_the_terminal_does_not_have(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    console = new_console(make())
    console.print("caf\u00e9")
    assert type(console) is Console and written.getvalue() == b"caf?\n"


@pytest.mark.parametrize("columns", [44, 60, 100])
def test_a_narrow_panel_cuts_no_number(columns: int) -> None:
    console = LiveConsole(100, "run")
    console.terminal = Terminal(width=columns, height=30, force_terminal=True, color_system=None)
    console.seen, console.losses = LINE | {"memory_gb_stage_1": 123.0, "memory_now_gb_stage_1": 121.5}, [3.0]
    drawn = console.terminal.render_lines(console.render(), pad=False)
    text = "\n".join("".join(segment.text for segment in line) for line in drawn)
    words = ("grad norm 1.000", "1,000 tokens/s (500 a device)", "data wait 10.0%", "stage 1", "121.50 GB, peak 123.00")
    assert [word for word in words if word not in text] == [], text


def test_plain_lines_without_a_terminal_and_when_asked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(new_console(make())) is Console
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert type(new_console(make())) is LiveConsole
    assert type(new_console(make({"tracking.progress_bar": False}))) is Console
    monkeypatch.setenv("TERM", "dumb")
    assert type(new_console(make())) is Console


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(-3, 100))
def test_sparkline(values: list[float], width: int) -> None:
    drawn = sparkline(values, width)
    assert len(drawn) == min(len(values), max(width, 0))
    if len(values) <= width and values and max(values) > min(values):
        assert drawn[values.index(min(values))] == "▁" and drawn[values.index(max(values))] == "█"


def test_sparkline_of_extreme_values() -> None:
    assert sparkline([0.0, 2.2e-313], 2) == "▁█"
    assert sparkline([3.0, math.nan, 2.0, math.inf], 4) == "█!▁!"
    assert sparkline([math.nan] * 4, 2) == "!!"


def test_of_a_long_pipeline_the_fullest_stages_are_shown() -> None:
    stages = {f"memory_gb_stage_{i}": float(i) for i in range(64)} | {
        f"memory_now_gb_stage_{i}": 0.0 for i in range(64)
    }
    assert memory_table({**LINE, **stages}, 8, 100).row_count == 8
