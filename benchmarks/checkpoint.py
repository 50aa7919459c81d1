"""How long a save keeps training waiting, how fast it writes, and whether a kill at any moment leaves a whole one.

    python -m benchmarks.checkpoint --gb 1 --ranks 4            # targets: blocking <= 10 %, rate >= 90 % of raw
    python -m benchmarks.checkpoint --kills 200                 # every time the newest committed one is whole

On 2 CPU cores, 1 GB over 4 ranks, medians of 4: raw 0.89 s, a save that waits 0.84 s (106 % of the raw rate: the disk
begins before all is written), one that does not keeps training waiting 0.02 s (2.7 %): the copy is made beside forward
and backward. Saving adds 1.2 % of a rank's state in memory, loading 0.5 %; saving in the background 100 %, its copy.
200 kills during 48 saves left 34 unfinished ones, and the newest committed one was whole every time;
`benchmarks/kills.py` kills training.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpt3d.checkpoint import folder
from gpt3d.checkpoint.checkpointer import Checkpointer
from gpt3d.checkpoint.reader import SavedTensors
from gpt3d.checkpoint.state import owned_state
from gpt3d.config.load import compose
from gpt3d.config.schema import RunConfig
from gpt3d.launch import run_ranks
from gpt3d.parallel import device
from gpt3d.parallel.layout import Sizes, create_layout, single_process_layout
from gpt3d.parallel.placement import Placement
from gpt3d.zero.fragments import KINDS, Fragment

TENSORS = 40
REPEATS = 4
COMPUTE = 0.5  # seconds of forward and backward between a save and the next update


@dataclass
class Shard:
    """The optimizer state of one of `copies` data-parallel ranks, as ZeRO cuts it: a part of each of 40 matrices."""

    rank: int
    copies: int
    bytes_: int
    steps: int = 1
    scaler: Any = None
    held: list[Fragment] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows = max(self.copies, self.bytes_ // (12 * TENSORS * 1024))
        for i in range(TENSORS):
            low, high = (rows * 1024 * (self.rank + k) // self.copies for k in (0, 1))
            tensors = {kind: torch.randn(high - low) for kind in KINDS}
            self.held.append(Fragment(Placement(f"layers.{i}.w", (rows, 1024)), low, tensors))

    def fragments(self) -> Iterator[Fragment]:
        yield from self.held

    def adopt(self, steps: int) -> None:
        self.steps = steps


def progress(step: int) -> dict[str, Any]:
    return {"step": step, "consumed_samples": step, "consumed_tokens": step, "seconds": 0.0}


def measure(config: RunConfig, root: str, total: int) -> dict[str, list[float]]:
    """On each rank, seconds: raw write + fsync of its bytes; a save that waits; and one that does not.

    Of the last: what training waits for (the call, and the update after a forward and backward of COMPUTE seconds),
    the call alone, and all until the checkpoint is committed.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device.init_process_group(device.select(0, "cpu"), timeout_minutes=10)
    layout = create_layout(Sizes(dp=world), torch.device("cpu"))
    files = Checkpointer(config, layout, Shard(rank, world, total), Path(root), lambda text: None)
    found: dict[str, list[float]] = {kind: [] for kind in ("raw", "sync", "blocking", "call", "async")}
    for repeat in range(REPEATS + 1):
        files.together.gather(None)
        begun = time.perf_counter()
        raw = [p.values for pieces in owned_state(files.optimizer, config.model).values() for p in pieces.parts]
        write_raw(Path(root) / f"raw{rank}", raw)
        files.together.gather(None)
        took = {"raw": time.perf_counter() - begun}

        begun = time.perf_counter()
        files.save(progress(2 * repeat + 1), wait=True)
        files.together.gather(None)
        took["sync"] = time.perf_counter() - begun

        begun = time.perf_counter()
        files.save(progress(2 * repeat + 2))
        took["call"] = time.perf_counter() - begun
        compute(COMPUTE)
        waited = time.perf_counter()
        files.before_update()
        took["blocking"] = took["call"] + time.perf_counter() - waited
        files.finish()
        took["async"] = time.perf_counter() - begun
        if repeat:  # the first save allocates
            for kind, seconds in took.items():
                found[kind].append(seconds)
    return found


def memory_peaks(config: RunConfig, root: str, total: int) -> tuple[int, int, int]:
    """On each rank, bytes: its state, and how far the process grew while saving it and while loading it."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device.init_process_group(device.select(0, "cpu"), timeout_minutes=10)
    layout = create_layout(Sizes(dp=world), torch.device("cpu"))
    shard = Shard(rank, world, total)
    files = Checkpointer(config, layout, shard, Path(root), lambda text: None)
    state = sum(t.nbytes for fragment in shard.held for t in fragment.tensors.values())
    saving = growth(lambda: files.save(progress(1), wait=True))
    return state, saving, growth(lambda: files.load(folder.committed(Path(root))))


def growth(work: Callable[[], object]) -> int:
    """Peak resident bytes during `work` above those before it, pages of mapped files not counted (Linux)."""
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return max(0, peak - before)


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def compute(seconds: float) -> None:
    """Stands for forward and backward: matrix products for so long."""
    a, end = torch.randn(256, 256), time.perf_counter() + seconds
    while time.perf_counter() < end:
        a = torch.tanh(a @ a)


def write_raw(path: Path, values: list[torch.Tensor]) -> None:
    with open(path, "wb", buffering=0) as file:
        for value in values:
            file.write(memoryview(value.contiguous().view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
        os.fsync(file.fileno())
    path.unlink()


def kill_saves(config: RunConfig, root: Path, kills: int) -> None:
    """A process saves without pause and is killed at random; what is committed must always be whole."""
    draw, step, torn = random.Random(0), 0, 0
    for number in range(kills):
        child = os.fork()
        if child == 0:
            files = Checkpointer(config, single_process_layout(), Shard(0, 1, 2 << 20), root, lambda text: None)
            while True:
                step += 1
                files.save(progress(step))
        while not folder.committed(root):
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += len(list(root.glob(".*")))
        found = folder.committed(root)
        for path in found:
            if damages := list(SavedTensors(path).damages()):
                raise SystemExit(f"kill {number}: {damages}")
        step = folder.step_of(found[0]) or step
        folder.sweep(root)
    print(f"{kills} kills during {step} saves, {torn} of them left an unfinished one: the newest was always whole")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where to write (default: the temporary folder)")
    given = parser.parse_args()
    config = compose(["checkpoint.keep_last=1"])
    with tempfile.TemporaryDirectory(dir=given.dir) as root:
        if given.kills:
            kill_saves(config, Path(root), given.kills)
            return
        peaks = run_ranks(memory_peaks, config, root, int(given.gb * 1e9), nprocs=given.ranks)
        found = run_ranks(measure, config, root, int(given.gb * 1e9), nprocs=given.ranks)
    worst = {kind: [max(rank[kind][i] for rank in found) for i in range(REPEATS)] for kind in found[0]}
    middle = {kind: statistics.median(times) for kind, times in worst.items()}
    for kind, times in worst.items():
        print(f"{kind:<9} median {middle[kind]:6.2f} s, {given.gb / middle[kind]:6.2f} GB/s   "
              + " ".join(f"{t:.2f}" for t in times))  # fmt: skip
    print(f"blocking is {100 * middle['blocking'] / middle['sync']:.1f} % of a synchronous save (target: at most 10)")
    saving, loading = (max(100 * peak[i] / peak[0] for peak in peaks) for i in (1, 2))
    print(f"memory: saving adds {saving:.1f} % of a rank's state, loading {loading:.1f} % (target: below 10)")
    print(f"write rate is {100 * middle['raw'] / middle['sync']:.0f} % of raw write + fsync (target: at least 90)")


if __name__ == "__main__":
    main()
