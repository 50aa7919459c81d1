"""What the report says about one run in words and numbers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from gpt3d.reporting.read import Run, is_number
from gpt3d.tracking.sinks import clock, short

GB = 2**30
MOST_SKIPPED = 20  # of them are listed one by one


class Fact(NamedTuple):
    """A name and its value, as text."""

    name: str
    value: str


class Facts(NamedTuple):
    """What came of a run, and what it was; facts that are not known are left out."""

    results: list[Fact]
    settings: list[Fact]


class Sample(NamedTuple):
    """Text that the model wrote after a step."""

    step: Any
    text: str


def facts(run: Run) -> Facts:
    """Results as tiles, settings as a table."""
    results: list[Fact] = []

    def add(name: str, value: Any, text: Callable[[Any], str]) -> None:
        if is_number(value):
            results.append(Fact(name, text(value)))

    validation = run.with_key("validation_loss")
    add("validation loss", run.last("validation_loss"), lambda v: f"{v:.4f}")
    add("perplexity", run.last("validation_perplexity"), lambda v: f"{v:,.2f}")
    if len(validation) > 2:
        best = min(validation, key=lambda line: line["validation_loss"])
        if best is not validation[-1]:
            results.append(Fact("best validation", f"{best['validation_loss']:.4f} at step {best['step']:,}"))
    add("training loss, smoothed", run.last("loss_ema"), lambda v: f"{v:.4f}")
    steps = run.setting("trainer.steps")
    of = f" of {steps:,}" if isinstance(steps, int) else ""
    add("steps", max((line["step"] for line in run.with_key("step")), default=None), lambda v: f"{v:,}{of}")
    add("tokens", run.last("tokens"), short)
    add("tokens/s", _middle(run, "tokens_per_s"), lambda v: f"{v:,.0f}")
    add("MFU", _middle(run, "mfu"), lambda v: f"{v:.1%}")
    if run.with_key("loss") and _middle(run, "mfu") is None:
        results.append(Fact("MFU", "n/a"))
    add("memory, peak", run.last("memory_gb"), lambda v: f"{v:.2f} GB")
    times = [entry["time"] for entry in (*run.events, *run.lines) if is_number(entry.get("time"))]
    add("time", max(times) - min(times) if times else None, clock)
    return Facts(results, _settings(run))


def _settings(run: Run) -> list[Fact]:
    at, rows = run.setting, list[Fact]()
    if not run.config:
        return rows
    parameters = run.plan.get("parameters")
    count = f", {parameters:,} parameters" if isinstance(parameters, int) else ""
    rows.append(Fact("model", f"{at('model.name')}{count}"))
    layout = run.plan.get("layout")
    dp = layout.get("dp") if isinstance(layout, dict) else at("parallel.dp")
    axes = f"TP {at('parallel.tp')} x PP {at('parallel.pp')} x DP {dp or '?'}"
    schedule = f", {at('pipeline.schedule')}" if (at("parallel.pp") or 1) > 1 else ""
    rows.append(Fact("layout", f"{axes}, ZeRO-{at('zero.stage')}{schedule}, recompute {at('recompute')}"))
    rows.append(Fact("precision", f"{at('precision.dtype')}, gradients {at('precision.grad_dtype')}"))
    rows.append(Fact("batch", f"{at('trainer.global_batch_size')} sequences of {at('data.seq_len')} tokens, "
                              f"{at('trainer.micro_batch_size')} a microbatch"))  # fmt: skip
    rows.append(Fact("optimizer", f"{at('optimizer.name')}, lr {at('optimizer.lr')} ({at('lr.schedule')}), "
                                  f"clip {at('optimizer.grad_clip')}, seed {at('seed')}"))  # fmt: skip
    git = run.environment.get("git")
    if isinstance(git, dict):
        rows.append(Fact("source", f"{str(git.get('commit'))[:12]}{', with changes' if git.get('dirty') else ''}"))
    packages = run.environment.get("packages")
    if isinstance(packages, dict):
        shown = ", ".join(f"{name} {packages.get(name)}" for name in ("torch", "deepspeed") if packages.get(name))
        rows.append(Fact("machine", f"{run.environment.get('host')}, {shown}"))
    return rows


def _middle(run: Run, name: str) -> float | None:
    """The median: the first line, with its warm-up, does not move it."""
    values = sorted(float(line[name]) for line in run.with_key(name))
    return values[len(values) // 2] if values else None


def step_split(run: Run) -> list[tuple[str, float]]:
    """Shares of a step's time, median of the lines: they add up to 1."""
    if not run.with_key("forward_backward"):
        return []
    wait, work = _middle(run, "data_wait") or 0.0, _middle(run, "forward_backward") or 0.0
    idle = work * (_middle(run, "pipeline_bubble") or 0.0)
    update, logging = _middle(run, "optimizer") or 0.0, _middle(run, "logging") or 0.0
    named = [("waiting for data", wait), ("forward and backward", work - idle), ("pipeline bubble", idle),
             ("reduction and optimizer", update), ("logging", logging)]  # fmt: skip
    return [*named, ("other", max(0.0, 1 - sum(share for _, share in named)))]


def memory_rows(run: Run) -> tuple[list[tuple[str, float, float | None]], str]:
    """(stage, highest measured, planned) in GB, and what to know about them."""
    stages = run.plan.get("stages")
    planned = [_planned(stage) for stage in stages] if isinstance(stages, list) else []
    rows: list[tuple[str, float, float | None]] = []
    measured = _by_stage(run) or [run.last("memory_gb")]
    for i, value in enumerate(measured):
        if is_number(value):
            rows.append((f"stage {i}", value, planned[i] if i < len(planned) else None))
    cpu = run.plan.get("device") == "cpu"
    note = "Measured: the whole process, Python and its libraries included" if cpu else "Measured: tensors"
    return rows, f"{note}; the fullest rank of the stage. Plan: weights, gradients, optimizer, activations, buffers."


def _planned(stage: Any) -> float | None:
    if not isinstance(stage, dict) or not is_number(stage.get("total")):
        return None
    margin = stage.get("margin")
    return (stage["total"] - (margin if is_number(margin) else 0)) / GB


def _by_stage(run: Run) -> list[Any]:
    lines = run.with_key("memory_gb_stage_0")
    count = sum(name.startswith("memory_gb_stage_") for name in lines[-1]) if lines else 0
    return [lines[-1].get(f"memory_gb_stage_{i}") for i in range(count)]


def history(run: Run) -> list[list[str]]:
    """Rows of (time, step, what happened): starts, ends, skipped steps."""
    rows, starts = [], 0
    skipped = run.happened("skipped")
    for event in run.events:
        name, step = event.get("event"), event.get("step", "")
        if name == "start":
            starts += 1
            rows.append([_utc(event), str(step), "start" if starts == 1 else f"restart {starts - 1}"])
        elif name == "skipped" and (len(skipped) <= MOST_SKIPPED or event in skipped[:MOST_SKIPPED]):
            rows.append([_utc(event), str(step), f"skipped: {event.get('why', '')}"])
        elif name == "end":
            code, why = event.get("exit_code"), event.get("why") or ""
            rows.append([_utc(event), "", "end" if code == 0 else f"end of rank 0, exit code {code}: {why}"])
        elif name == "failed":  # the supervisor's word, which knows which rank was the cause
            rows.append([_utc(event), "", f"failed: {event.get('why', '')}"])
    if len(skipped) > MOST_SKIPPED:
        rows.append(["", "", f"and {len(skipped) - MOST_SKIPPED} more skipped steps"])
    return rows


def samples(run: Run) -> list[Sample]:
    """Texts of the run, the last one last."""
    return [Sample(event.get("step"), str(event.get("text", ""))) for event in run.happened("sample")]


def _utc(event: dict[str, Any]) -> str:
    try:
        return datetime.fromtimestamp(event["time"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return "?"
