"""One run at a time in a folder: a job that is started again while the old one still ends must not write beside it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO

from gpt3d.config.problems import ConfigError, Problem

NAME = ".lock"
WAIT_SECONDS = 5.0  # a process that was killed a moment ago
_TAKEN = (errno.EACCES, errno.EAGAIN)


class RunLock:
    """A POSIX lock on `run_dir/.lock`: it ends with its process, however that ends, and holds over NFS.

    A file system without locks, or a folder that cannot be written to, leaves the run unlocked.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / NAME
        self.file: IO[str] | None = None

    def take(self, wait: float = WAIT_SECONDS) -> None:
        """Hold it until `release` or the end of this process. Raises ConfigError if another process does."""
        end = time.monotonic() + wait
        while not self._try():
            if time.monotonic() > end:
                why = f"another run is writing into this folder ({self._holder()})"
                fix = "wait until it has ended, or end it; or name another folder"
                raise ConfigError([Problem("run_dir", str(self.path.parent), why, fix)])
            time.sleep(0.2)

    def _try(self) -> bool:
        """False if another process holds it."""
        try:
            file = open(self.path, "a+")  # noqa: SIM115, closed by `release`
        except OSError:
            return True
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            return error.errno not in _TAKEN
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self.file = file
        return True

    def _holder(self) -> str:
        try:
            return self.path.read_text().strip() or "unknown"
        except OSError:
            return "unknown"

    def release(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None
