"""A sink that raises, hangs or is slow: training neither waits nor fails, and there is one warning."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from gpt3d.tracking.background import Background
from gpt3d.tracking.metrics import Metrics


class Recording:
    """A sink that keeps what it gets; `before` is called first in each method."""

    def __init__(self, before: Callable[[str], None] = lambda call: None) -> None:
        self.before, self.got, self.exit_code = before, list[Metrics](), None
        before("open")

    def log(self, metrics: Metrics) -> None:
        self.before("log")
        self.got.append(metrics)

    def close(self, exit_code: int) -> None:
        self.before("close")
        self.exit_code = exit_code  # type: ignore[assignment]


class Hang:
    """Something to hang on. `over`: somebody has waited until it ended by itself, which takes minutes."""

    def __init__(self) -> None:
        self.event, self.over = threading.Event(), False

    def __call__(self, *_: object) -> None:
        self.over |= not self.event.wait(100)


@pytest.fixture
def hang() -> Iterator[Hang]:
    """Ends with the test, so that no thread stays behind."""
    hanging = Hang()
    yield hanging
    hanging.event.set()


def test_everything_arrives_in_order_with_the_exit_code() -> None:
    sink, said = Recording(), list[str]()
    background = Background("tracker", lambda: sink, said.append)
    for step in range(100):
        background.log({"step": step})
    background.close(143, seconds=100)
    assert [m["step"] for m in sink.got] == list(range(100)) and sink.exit_code == 143 and said == []


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_a_failing_sink_costs_one_warning(where: str) -> None:
    said: list[str] = []

    def fail(call: str) -> None:
        if call == where:
            raise ConnectionError("no route\nto host")

    background = Background("tracker", lambda: Recording(fail), said.append)
    for step in range(50):
        background.log({"step": step})
        time.sleep(0.001)
    background.close(0, seconds=100)
    why = "failed (ConnectionError: no route)"
    assert said == [f"warning: tracker {why} and gets no further metrics; metrics.jsonl has all of them"]


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_a_hanging_sink_is_left_behind_at_the_end(where: str, hang: Hang) -> None:
    said: list[str] = []
    background = Background("tracker", lambda: Recording(lambda call: hang() if call == where else None), said.append)
    for step in range(1000):
        background.log({"step": step})
    background.close(0, seconds=0.2)
    assert not hang.over, "training waited"
    assert len(said) == 1 and "did not finish in time" in said[0]


def test_a_hanging_sink_is_noticed_while_training(hang: Hang) -> None:
    said: list[str] = []
    background = Background("tracker", lambda: Recording(hang), said.append, stuck_seconds=0.1)
    while not background.given_up and not hang.over:
        background.log({"step": 1})
        time.sleep(0.02)
    background.close(0, seconds=1000)
    assert not hang.over, "the end waited for a sink that was given up"
    assert len(said) == 1 and "has not answered for 0.1 s" in said[0]


def test_a_sink_that_is_too_slow_does_not_fill_the_memory(hang: Hang) -> None:
    said: list[str] = []
    background = Background("tracker", lambda: Recording(hang), said.append, most_waiting=10)
    for step in range(1000):
        background.log({"step": step})
    assert len(said) == 1 and "is 10 lines behind" in said[0]


@pytest.mark.slow
def test_handing_over_takes_microseconds() -> None:
    """Below 1 % of a step of 10 ms, whatever the sink does."""
    background = Background("tracker", lambda: Recording(lambda _: time.sleep(0.001)), print)
    metrics: Metrics = {f"name_{i}": float(i) for i in range(40)}
    begun = time.thread_time()
    for _ in range(1000):
        background.log(metrics)
    assert (time.thread_time() - begun) / 1000 < 100e-6
    background.given_up = True  # the rest is of no interest
