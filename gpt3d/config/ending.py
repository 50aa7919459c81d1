"""How a command ends: its exit code, and one message for what a user can mend."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from gpt3d.config.problems import ConfigError

READER_GONE = 141  # as a shell says of a program that SIGPIPE has ended


def exit_code(body: Callable[[], object], answered: tuple[type[Exception], ...]) -> int:
    """Call `body`: 0, or 2 for a refused setting and 1 for an `answered` error, each told in its own words.

    Ctrl-C is 130. A reader that stops early (`... | head`) ends the command without a word. Other errors pass through.
    """
    try:
        body()
        sys.stdout.flush()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes
        return READER_GONE
    except answered as error:
        print(f"gpt3d: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def end_with_reader() -> None:
    """`... | head` ends this process without a word, as it ends any filter: for commands that only print."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
