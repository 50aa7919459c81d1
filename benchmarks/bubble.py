"""Does the executor reach the ideal step time of its schedule? Sleep stands in for compute, all else is real.

    python benchmarks/bubble.py [--limit 1.06] [--repeats 3] [--kinds 1f1b zb_h1]

Each stage sleeps 20 ms for a forward and 40 ms for a backward of a microbatch (20 + 20 ms in halves; divided by the
chunks when interleaved), and sends activations of 393 KB over gloo. Ideal: the simulator's makespan with these times
and free messages, (m + p - 1) x 60 ms for 1F1B. On a busy machine sleeps last longer than asked; the last column
compares with the ideal for the times they really took. Exit code 1 if a step takes over `--limit` times the ideal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpt3d.launch import run_ranks
from gpt3d.parallel import device
from gpt3d.parallel.layout import Sizes, create_layout
from gpt3d.parallel.placement import Placement
from gpt3d.parallel.split_backward import WeightGradients
from gpt3d.pipeline.executor import Executor, Microbatch
from gpt3d.pipeline.recorder import Recorder
from gpt3d.pipeline.schedule import all_ranks
from gpt3d.pipeline.simulate import Timeline, ideal_of, simulate
from gpt3d.pipeline.transport import connect
from gpt3d.zero.engine import StepResult

FORWARD, BACKWARD = 0.020, 0.040  # seconds a stage and microbatch
SHAPE = (128, 1, 768)  # [s, b, h] in fp32: 393 KB a message
MICROBATCHES = (1, 2, 4, 8, 16)


class Setting(NamedTuple):
    """One row of the table."""

    kind: str
    stages: int
    chunks: int
    microbatches: int

    def ideal(self) -> Timeline:
        schedules = all_ranks(self.kind, self.stages, self.chunks, self.microbatches)
        return simulate(schedules, FORWARD / self.chunks, BACKWARD / self.chunks)


class Measured(NamedTuple):
    """The best of the repeats: seconds of a step between two barriers, and when each action ran."""

    seconds: float
    timeline: Timeline | None


class SleepingEngine:
    """An engine (see gpt3d.zero.engine.Engine) whose compute takes an exact time and no CPU."""

    loss_scale = 1.0

    def __init__(self, chunks: int) -> None:
        self.module, self.chunks = nn.Module(), chunks

    def forward(
        self, chunk: int, x: Tensor, seed: int, labels: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        time.sleep(FORWARD / self.chunks)
        out = x + 0.0 if x.is_floating_point() else torch.zeros(SHAPE, requires_grad=True) + 0.0
        return out if labels is None else out.flatten()[0]

    def backward(self, output: Any, grad: Tensor, last: bool) -> None:
        time.sleep(BACKWARD / self.chunks)
        torch.autograd.backward(output, grad)

    def backward_input(self, output: Any, grad: Tensor, x: Tensor) -> tuple[Tensor, WeightGradients]:
        time.sleep(BACKWARD / self.chunks / 2)
        return torch.autograd.grad(output, x, grad)[0], WeightGradients()

    def backward_weight(self, gradients: WeightGradients, last: bool) -> None:
        time.sleep(BACKWARD / self.chunks / 2)

    def step(self, lr: float) -> StepResult:
        raise NotImplementedError

    def master_weights(self) -> Iterator[tuple[Placement, Tensor]]:
        return iter(())

    held_weights = master_weights


def measure(settings: list[Setting], repeats: int) -> list[Measured]:
    """Runs on every rank; the numbers are those of rank 0."""
    selected = device.select(0, "cpu")
    device.init_process_group(selected)
    layout = create_layout(Sizes(pp=settings[0].stages), torch.device("cpu"))
    transport = connect(layout, SHAPE, torch.float32, ring=True)
    row = torch.zeros((1, SHAPE[0]), dtype=torch.long)
    results = []
    for setting in settings:
        executor = Executor(layout, SleepingEngine(setting.chunks), transport, setting.kind, setting.chunks)
        microbatches = [Microbatch(row, row, i) for i in range(setting.microbatches)]
        best = Measured(float("inf"), None)
        for _ in range(repeats):
            executor.recorder = Recorder(layout)
            dist.barrier()
            begun = time.perf_counter()
            executor.train(microbatches, 1.0)
            dist.barrier()
            seconds = time.perf_counter() - begun
            timeline = executor.recorder.gather()
            if timeline is not None and seconds < best.seconds:
                best = Measured(seconds, timeline)
        results.append(best)
    device.destroy_process_group()
    return results


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=1.06)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=["1f1b", "zb_h1", "interleaved"])
    options = parser.parse_args()
    print(f"{'schedule':<12}  p   m  ideal ms  step ms  ratio  bubble ideal/measured  ratio for real sleeps")
    worst = 0.0
    for stages in (2, 4):
        settings = [
            Setting(kind, stages, 2 if kind == "interleaved" else 1, count)
            for kind in options.kinds
            for count in MICROBATCHES
            if kind != "interleaved" or count % stages == 0
        ]
        measured = run_ranks(measure, settings, options.repeats, nprocs=stages)[0]
        for setting, result in zip(settings, measured, strict=True):
            ideal = setting.ideal()
            ratio = result.seconds / ideal.makespan
            worst = max(worst, ratio)
            assert result.timeline is not None
            real = result.seconds / ideal_of(result.timeline, setting.chunks).makespan
            print(
                f"{setting.kind:<12} {stages:>2} {setting.microbatches:>3} {ideal.makespan * 1e3:>9.0f} "
                f"{result.seconds * 1e3:>8.1f} {ratio:>6.3f}  {ideal.bubble:>6.1%} / {result.timeline.bubble:<6.1%}"
                f"{real:>21.3f}",
                flush=True,
            )
    print(f"worst ratio {worst:.3f}, limit {options.limit}")
    sys.exit(worst > options.limit)


if __name__ == "__main__":
    main()
