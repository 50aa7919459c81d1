"""Training that is killed again and again, one rank or all at once, gives the curve of a run that was never killed.

    python -m benchmarks.kills --kills 200

Each attempt trains a tiny model that saves at every step, in the background, and resumes by itself. A rank, or all of
them, gets kill -9 at a random moment after the first step of the attempt. Each logged loss and gradient norm must be
the same bits as in the unbroken run; the layouts take turns.

On 2 shared CPU cores, 402 s:
    parallel=dp2 zero=1                   48 kills (19 of all ranks), 15 during a save: 150 steps equal, bit for bit
    parallel=pp2 zero=2                   52 kills (26 of all ranks), 20 during a save: 150 steps equal, bit for bit
    parallel=tp2 zero=0                   50 kills (34 of all ranks), 5 during a save: 150 steps equal, bit for bit
    parallel=dp2 zero=3 precision=bf16    50 kills (24 of all ranks), 6 during a save: 150 steps equal, bit for bit
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt3d.checkpoint import folder
from gpt3d.checkpoint.reader import SavedTensors
from gpt3d.config.load import compose
from gpt3d.launch import RankFailed, run_ranks

LAYOUTS = (
    ["parallel=dp2", "zero=1"],
    ["parallel=pp2", "zero=2"],
    ["parallel=tp2", "zero=0"],
    ["parallel=dp2", "zero=3", "precision=bf16"],
)
SMALL = [
    "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=2", "model.head_dim=16",
    "model.ffn_hidden_size=64", "model.hidden_dropout=0.1", "data.seq_len=32", "lr.warmup_steps=2",
    "trainer.global_batch_size=4", "trainer.micro_batch_size=2", "trainer.eval_batches=1", "trainer.sample_tokens=0",
    "tracking.log_interval=1", "checkpoint.interval=1", "checkpoint.resume=auto",
]  # fmt: skip
CURVE = ("loss", "loss_ema", "grad_norm", "parameter_norm", "lr", "tokens")


@dataclass(frozen=True)
class Kill:
    """Which ranks die, how many seconds after the first step of this attempt."""

    ranks: tuple[int, ...]
    seconds: float


def train(overrides: list[str], kill: Kill | None) -> None:
    """On each rank: train or resume; a rank that is to die arms its own end at its first step."""
    from gpt3d.parallel import device
    from gpt3d.trainer import Trainer

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    selected = device.select(0, "cpu")
    device.init_process_group(selected, timeout_minutes=1)
    trainer = Trainer(compose(overrides), selected)
    if kill is not None and int(os.environ["RANK"]) in kill.ranks:
        threading.Timer(kill.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    trainer.run()


def curve(run_dir: Path) -> dict[int, tuple[Any, ...]]:
    """What each step logged last; a step that was lost and made again must log the same again."""
    found: dict[int, tuple[Any, ...]] = {}
    for text in (run_dir / "metrics.jsonl").read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue  # the line that was being written at the kill
        if "loss" in line:
            values = tuple(line[key] for key in CURVE)
            if found.setdefault(line["step"], values) != values:
                raise SystemExit(f"{run_dir}: step {line['step']} was {found[line['step']]}, then {values}")
    return found


def kill_until_done(overrides: list[str], run_dir: Path, draw: random.Random, most: int) -> tuple[int, int, int]:
    """Train to the end through at most `most` kills: how many, how many of all ranks, how many tore a save."""
    kills = of_all = torn = 0
    run_dir.mkdir()
    while True:
        victims = (0, 1) if draw.random() < 0.5 else (draw.randrange(2),)
        kill = Kill(victims, draw.uniform(0.0, 0.4)) if kills < most else None
        try:
            run_ranks(train, [*overrides, f"run_dir={run_dir}"], kill, nprocs=2, timeout=120)
            return kills, of_all, torn
        except RankFailed as failure:
            if "SIGKILL" not in str(failure):
                raise
        kills += 1
        of_all += len(victims) == 2
        checkpoints = run_dir / "checkpoints"
        torn += any(checkpoints.glob(f"{folder.TEMPORARY}*"))
        for path in folder.committed(checkpoints):
            if damages := list(SavedTensors(path).damages()):
                raise SystemExit(f"kill {kills}: {damages}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=150, help="length of each run")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw, begun, total = random.Random(given.seed), time.monotonic(), 0
    with tempfile.TemporaryDirectory() as root:
        for number, layout in enumerate(LAYOUTS):
            overrides = [*SMALL, *layout, f"trainer.steps={given.steps}"]
            whole, broken = Path(root) / f"whole{number}", Path(root) / f"broken{number}"
            whole.mkdir()
            run_ranks(train, [*overrides, f"run_dir={whole}"], None, nprocs=2, timeout=600)
            share = given.kills * (number + 1) // len(LAYOUTS) - total
            kills, of_all, torn = kill_until_done(overrides, broken, draw, share)
            total += kills
            want, got = curve(whole), curve(broken)
            if want != got or len(want) != given.steps:
                raise SystemExit(f"{layout}: the curve differs: {[s for s in want if want[s] != got.get(s)][:5]}")
            print(f"{' '.join(layout):<36} {kills:3} kills ({of_all} of all ranks), {torn} during a save: "
                  f"{len(got)} steps equal to the unbroken run, bit for bit", flush=True)  # fmt: skip
    print(f"{total} kills in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
