"""Memory, read once gloo's threads have let go."""

from __future__ import annotations

import time
from collections.abc import Callable


def settled(read: Callable[[], int]) -> int:
    """The least of several reads over 0.3 s: the thread that ran a collective holds its tensor until its next turn."""
    least = read()
    for _ in range(6):
        time.sleep(0.05)
        least = min(least, read())
    return least
