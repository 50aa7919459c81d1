"""Compare a layout with one plain process, and say in a table whether they are equal."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpt3d.config.schema import RunConfig
from gpt3d.launch import RankFailed, run_ranks
from gpt3d.parallel import device
from gpt3d.verification import compare
from gpt3d.verification.compare import Differences, Disagreement, RankResult, Result

TIMEOUT_SECONDS = 300.0  # a layout that takes longer hangs


@dataclass(frozen=True)
class Tolerance:
    """Largest difference that counts as equal: absolute for losses [nats] and weights, relative for norms."""

    loss: float
    norm: float
    weight: float


# fp32 only sums in another order. Low precision rounds each activation and is compared with fp32: where a gradient is
# nearly zero, rounding turns whole Adam steps (lr 1e-3, 5 of them) around, so there loss and norm are what tells.
TOLERANCES = {
    "fp32": Tolerance(loss=2e-6, norm=5e-5, weight=5e-6),
    "bf16": Tolerance(loss=2e-3, norm=1e-2, weight=5e-3),
    "fp16": Tolerance(loss=1e-3, norm=5e-3, weight=5e-3),
}


@dataclass(frozen=True)
class Verdict:
    """The comparison of one layout. `problem`: why there are no differences to show, or where they begin."""

    config: RunConfig
    differences: Differences | None
    problem: str
    seconds: float

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.config.precision.dtype]

    @property
    def equal(self) -> bool:
        d, t = self.differences, self.tolerance
        return d is not None and d.loss <= t.loss and d.norm <= t.norm and d.weight <= t.weight


RankBody = Callable[[RunConfig], RankResult]


def verify(
    config: RunConfig, device_kind: str, plain: Result | None = None, body: RankBody = compare.train_rank
) -> Verdict:
    """Train `config` in its layout, and `plain` unless given; on failure also find where they first depart."""
    begun = time.monotonic()
    try:
        found: Differences | None = compare.differences(
            _train(config, device_kind, body), plain or compare.train_plain(config)
        )
        problem = ""
    except (Disagreement, RankFailed) as error:
        found, problem = None, str(error)
    verdict = Verdict(config, found, problem, time.monotonic() - begun)
    if found is not None and not verdict.equal:
        first = first_departure(config, device_kind, body)
        verdict = dataclasses.replace(verdict, problem=first)
    return verdict


def first_departure(config: RunConfig, device_kind: str, body: RankBody = compare.train_rank) -> str:
    """The first step after which a weight differs by more than the tolerance, and the weights, worst first."""
    tolerance = TOLERANCES[config.precision.dtype].weight
    for steps in range(1, config.trainer.steps + 1):
        short = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, steps=steps))
        try:
            weights = compare.differences(_train(short, device_kind, body), compare.train_plain(short)).weights
        except Disagreement as error:
            return f"after step {steps}: {error}"
        wrong = sorted((name for name in weights if not weights[name] <= tolerance), key=lambda name: -weights[name])
        if wrong:
            listed = ", ".join(f"{name} by {weights[name]:.1e}" for name in wrong[:5])
            return f"departs first in step {steps}, in {len(wrong)} of {len(weights)} parameters: {listed}"
    return "no weight departs: look at the loss and the gradient norm"


def _train(config: RunConfig, device_kind: str, body: RankBody) -> Result:
    p = config.parallel
    ranks = p.tp * p.cp * p.pp * (p.dp or 1)
    config = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, device=device_kind))
    return compare.assemble(
        run_ranks(_on_rank, body, config, nprocs=ranks, device=device_kind, timeout=TIMEOUT_SECONDS)
    )


def _on_rank(body: RankBody, config: RunConfig) -> RankResult:
    selected = device.select(int(os.environ["LOCAL_RANK"]), config.cluster.device)
    device.init_process_group(selected, timeout_minutes=TIMEOUT_SECONDS / 60)
    result = body(config)
    device.destroy_process_group()
    return result


def table(verdict: Verdict) -> str:
    """Loss, gradient norm and weights by kind: difference, tolerance, verdict."""
    if verdict.differences is None:
        return f"DIFFERENT: {verdict.problem}"
    d, t = verdict.differences, verdict.tolerance
    kinds: dict[str, float] = {}
    for name, value in d.weights.items():
        kind = kind_of(name)
        kinds[kind] = max(kinds.get(kind, 0.0), value)
    rows = [("loss [nats]", d.loss, t.loss), ("gradient norm (relative)", d.norm, t.norm)]
    rows += [(f"weights {kind}", value, t.weight) for kind, value in kinds.items()]
    width = max(len(row[0]) for row in rows)
    lines = [f"{'largest difference in':<{width}}  {'found':>8}  {'bound':>8}  verdict"]
    for what, value, bound in rows:
        lines.append(f"{what:<{width}}  {value:>8.1e}  {bound:>8.1e}  {'equal' if value <= bound else 'DIFFERENT'}")
    end = "equal to one plain process" if verdict.equal else f"DIFFERENT from one plain process: {verdict.problem}"
    return "\n".join([*lines, end])


def kind_of(name: str) -> str:
    """A parameter's canonical name without its layer."""
    return re.sub(r"^layers\.\d+\.", "", name)


def markdown(verdicts: dict[str, Verdict]) -> str:
    """One row a layout."""
    lines = ["| layout | ranks | loss | gradient norm | weights | verdict |", "|---|--:|--:|--:|--:|---|"]
    for name, verdict in verdicts.items():
        p, d = verdict.config.parallel, verdict.differences
        numbers = [f"{x:.1e}" for x in (d.loss, d.norm, d.weight)] if d is not None else ["-"] * 3
        word = "equal" if verdict.equal else "**different**"
        lines.append(f"| {name} | {p.tp * p.cp * p.pp * (p.dp or 1)} | {' | '.join(numbers)} | {word} |")
    return "\n".join(lines)
