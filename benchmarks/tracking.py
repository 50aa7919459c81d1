"""What tracking costs: logged steps against the unlogged ones between them, in one run.

    python -m benchmarks.tracking [--steps 120] [--interval 10]

Two ranks train the tiny model over PP 2 on the CPU. Every second step is logged, to the sinks of each row: what a
logged step takes longer (medians) is the cost of a line, its collectives and the recorded bubble included. The last
columns spread it over `--interval` steps; 10 is the default of tracking.log_interval. CPU time is steadier on a machine
with other work. On 2 idle cores:

    sinks                      unlogged     logged  of 10 steps  in CPU time
    metrics.jsonl and lines    250.0 ms   257.2 ms        0.29%        0.24%
    + TensorBoard              256.0 ms   263.6 ms        0.29%        0.21%
    + wandb, offline           250.9 ms   256.0 ms        0.20%        0.37%
    all                        240.3 ms   242.5 ms        0.09%       -0.07%
    all, load of machines      256.3 ms   258.1 ms        0.07%       -0.09%
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from gpt3d.launch import run_ranks

SINKS = {
    "metrics.jsonl and lines": [],
    "+ TensorBoard": ["tracking.tensorboard=true"],
    "+ wandb, offline": ["tracking=wandb_offline"],
    "all": ["tracking=wandb_offline", "tracking.tensorboard=true"],
    "all, load of machines": ["tracking=wandb_offline", "tracking.tensorboard=true", "tracking.node_metrics=true"],
}
WARM_UP = 20  # steps; by then the trackers are imported


def measure(sinks: list[str], steps: int, folder: str) -> list[float]:
    """On each rank, medians: seconds of an unlogged and of a logged step, the same in CPU time with all threads."""
    from gpt3d.config.load import compose
    from gpt3d.parallel import device
    from gpt3d.trainer import Trainer

    chosen = device.select(0, "cpu")
    device.init_process_group(chosen)
    keys = ["parallel=pp2", f"trainer.steps={steps + WARM_UP}", "tracking.log_interval=2", "checkpoint=none"]
    config = compose([*keys, "tracking.report=false", *sinks, f"run_dir={folder}"])
    wall: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer = Trainer(config, chosen)
        with trainer.tracker:
            while trainer.step < steps + WARM_UP:
                begun, used = time.perf_counter(), time.process_time()
                metrics = trainer.train_step()
                if metrics is not None:
                    trainer.log(metrics)
                if trainer.step > WARM_UP:
                    wall[metrics is not None].append(time.perf_counter() - begun)
                    cpu[metrics is not None].append(time.process_time() - used)
        trainer.batches.close()
    device.destroy_process_group()
    return [median(times[logged]) for times in (wall, cpu) for logged in (False, True)]


def main() -> None:
    """Measure all rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--interval", type=int, default=10)
    chosen = parser.parse_args()
    print(f"{'sinks':24} {'unlogged':>10} {'logged':>10} {f'of {chosen.interval} steps':>12} {'in CPU time':>12}")
    for name, sinks in SINKS.items():
        with tempfile.TemporaryDirectory() as folder:
            logs = Path(folder) / "logs"
            plain, logged, *cpu = run_ranks(measure, sinks, chosen.steps, folder, nprocs=2, log_dir=logs)[0]
        share, used = ((b - a) / (chosen.interval * a) for a, b in ((plain, logged), cpu))
        print(f"{name:24} {1e3 * plain:7.1f} ms {1e3 * logged:7.1f} ms {share:12.2%} {used:12.2%}")


if __name__ == "__main__":
    main()
