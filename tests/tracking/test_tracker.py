"""wandb and TensorBoard files read back: alone, and of a run on two ranks that is continued from an older step."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpt3d.config.load import compose
from gpt3d.config.schema import RunConfig
from gpt3d.tracking import tracker as module
from gpt3d.tracking.metrics import METRICS, Metrics, grouped, metric
from gpt3d.tracking.tracker import Tracker
from gpt3d.tracking.wandb_sink import sync_command, wanted_mode
from gpt3d.train import name_in_sweep
from tests.config.conftest import Make
from tests.tracking import wandb_file

World = Callable[..., list[Any]]
SMALL = [
    "parallel=pp2", "tracking=wandb_offline", "tracking.tensorboard=true", "tracking.log_interval=1",
    "data.seq_len=32", "model.num_layers=2", "trainer.global_batch_size=4", "trainer.micro_batch_size=2",
    "trainer.eval_interval=2", "trainer.eval_batches=1", "trainer.sample_tokens=0", "checkpoint.interval=2",
    "lr=constant", "tracking.node_metrics=true", "tracking.layer_norms_interval=2",
]  # fmt: skip


def train(steps: int, run_dir: str) -> None:
    from gpt3d.parallel import device
    from gpt3d.trainer import Trainer

    resume = "checkpoint.resume=auto" if steps > 4 else "checkpoint.resume=none"
    config = compose([*SMALL, f"trainer.steps={steps}", f"run_dir={run_dir}", resume])
    Trainer(config, device.select(0, "cpu")).run()


def lines(run_dir: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in found]


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def starts(run_dir: Path) -> list[wandb_file.WandbFile]:
    return [wandb_file.read(folder) for folder in sorted((run_dir / "wandb").glob("offline-run-*"))]


def test_a_run_that_goes_on_from_an_older_step(world: World, tmp_path: Path) -> None:
    """The second of two ranks owns the loss: one run at wandb, in two parts, with the numbers of metrics.jsonl."""
    world(train, 4, str(tmp_path), n=2, timeout=180)
    first = len(lines(tmp_path))
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    time.sleep(max(0.0, 1.0 - time.time() % 1))  # wandb names its folders by the second
    world(train, 6, str(tmp_path), n=2, timeout=180)
    want = lines(tmp_path)
    assert [m["step"] for m in want if "loss" in m] == [1, 2, 3, 4, 3, 4, 5, 6]
    a, b = starts(tmp_path)
    assert a.id == b.id == (tmp_path / "wandb_id").read_text().strip()
    state = json.loads((tmp_path / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert state["progress"]["tracking"]["wandb_id"] == a.id
    own = [{k: v for k, v in entry.items() if not k.startswith("_")} for entry in a.history + b.history]
    assert own == [pytest.approx(grouped(m)) for m in want], "wandb has other numbers than metrics.jsonl"
    assert [entry["_step"] for entry in a.history + b.history] == list(range(len(want))), "an upload would hide entries"
    assert len(a.history) == first and (a.exit_code, b.exit_code) == (0, 0)
    assert a.step_metrics == {"step": "", "*": "step"}
    assert a.config["trainer"]["steps"] == 4 and a.config["environment"]["packages"]["torch"]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert a.config["plan"] == plan and len(plan["stages"]) == 2 and plan["layout"]["pp"] == 2
    assert [e["event"] for e in events(tmp_path)] == ["start", "end", "start", "end"]
    assert [e["step"] for e in events(tmp_path) if e["event"] == "start"] == [0, 2]
    page = (tmp_path / "report.html").read_text()
    assert "restart 1" in page and "Pipeline bubble" in page
    logged = {name for line in want for name in line}
    assert {metric(name) for name in logged} == set(METRICS.values()), "documented and logged are the same"
    tensorboard_has(tmp_path / "tensorboard", want)


def tensorboard_has(folder: Path, want: list[dict[str, Any]]) -> None:
    """Each step once, with its last values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    got = {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}
    assert len(got) == sum(len(events.Scalars(tag)) for tag in events.Tags()["scalars"])
    last = {(tag, line["step"]): value for line in want for tag, value in grouped(line).items() if tag != "step"}
    assert got == pytest.approx(last, rel=1e-6)


def fail_without_a_key(run_dir: str, overrides: list[str], environment: dict[str, str]) -> list[str]:
    """In a rank: wandb online cannot be; then the run fails. Returns what was said."""
    module.FAILED_SECONDS = 100.0  # a busy machine
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        os.environ.pop(name, None)
    os.environ |= {"HOME": run_dir, "NETRC": f"{run_dir}/none", **environment}
    patient = "tracking.finish_seconds=100"
    config = compose(["tracking=wandb", patient, "tracking.wandb.tags=[a,b]", f"run_dir={run_dir}", *overrides])
    name_in_sweep(config, "my_sweep", "7_run")
    tracker, said = Tracker(config, Path(run_dir), is_main=True), list[str]()
    tracker.console.print = said.append  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError), tracker:
        for step in (1, 2):
            tracker.log({"step": step, "pipeline_bubble": 0.5})
        while not list(Path(run_dir).glob("wandb/offline-run-*/*.wandb")):  # the error path waits for seconds only
            time.sleep(0.05)
        raise ZeroDivisionError
    return said


def test_without_a_key_nothing_is_lost_and_a_failure_is_recorded(world: World, tmp_path: Path) -> None:
    (said,) = world(fail_without_a_key, str(tmp_path), [], {}, n=1, init=False, timeout=180)
    (run,) = starts(tmp_path)
    assert run.exit_code == 1
    assert [(e["step"], e["speed/pipeline_bubble"]) for e in run.history] == [(1, 0.5), (2, 0.5)]
    assert (run.name, run.group, run.job_type, run.tags) == ("7_run", "my_sweep", "sweep", ["a", "b"])
    assert len(said) == 2 and said[0].startswith("warning: wandb cannot be used online (no API key"), said
    assert sync_command(tmp_path, run.id) in said[1] and f"wandb sync --id {run.id} {tmp_path}" in said[1]
    assert [m["step"] for m in lines(tmp_path)] == [1, 2]


@pytest.mark.slow
def test_without_a_network_too(world: World, tmp_path: Path) -> None:
    unreachable = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    fast = ["tracking.wandb.start_seconds=2"]
    (said,) = world(fail_without_a_key, str(tmp_path), fast, unreachable, n=1, init=False, timeout=180)
    run = starts(tmp_path)[-1]
    assert [e["step"] for e in run.history] == [1, 2] and run.exit_code == 1
    assert sum("warning: wandb cannot be used online" in text for text in said) == 1


class Hanging:
    """Stands for wandb on a host whose network swallows packets; `over`: somebody has waited for it to the end."""

    over = False

    def __init__(self, *_: object) -> None:
        threading.Event().wait(100)
        Hanging.over = True


def test_a_hanging_tracker_leaves_metrics_complete(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "WandbSink", Hanging)
    config = make({"tracking.wandb.mode": "offline", "tracking.finish_seconds": 1.0})
    with Tracker(config, tmp_path, is_main=True) as tracker:
        for step in range(100):
            tracker.log({"step": step})
    assert len(lines(tmp_path)) == 100 and not Hanging.over, "training waited"
    assert capfd.readouterr().out.count("warning: wandb did not finish in time at the end") == 1


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread, no tracker: only what is decided before."""

    class Nothing:
        def __init__(self, *_: object) -> None: ...
        def log(self, metrics: Metrics) -> None: ...
        def close(self, exit_code: int, seconds: float) -> None: ...

    monkeypatch.setattr(module, "Background", Nothing)


def run_id(config: RunConfig, folder: Path, saved: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    tracker = Tracker(config, folder, is_main=True)
    if saved:
        tracker.restore(4, saved)
    with tracker:
        state = tracker.state()
    return f"{state['wandb_id']}"


def test_which_run_is_continued(make: Make, quiet: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make({"tracking.wandb.mode": "online"})
    forked = make({"tracking.wandb.mode": "online", "tracking.wandb.fork": True})
    first = run_id(config, tmp_path / "a", {})
    saved = {"wandb_id": first, "lines": 12}
    assert run_id(config, tmp_path / "a", {}) == first, "same folder, before its first checkpoint"
    assert run_id(config, tmp_path / "a", {"wandb_id": "older", "lines": 2}) == first
    assert run_id(config, tmp_path / "b", saved) == first and "tracking.wandb.fork=true" in capsys.readouterr().out
    fork = run_id(forked, tmp_path / "c", saved)
    assert fork != first and run_id(forked, tmp_path / "c", saved) == fork
    assert run_id(config, tmp_path / "d", {"wandb_id": None, "lines": 3}) not in (first, fork)


def test_an_id_that_cannot_be_stored_costs_one_warning(
    make: Make, quiet: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make({"tracking.wandb.mode": "online"})
    (tmp_path / "wandb_id").mkdir()
    assert len(run_id(config, tmp_path, {})) == 8
    assert capsys.readouterr().out.count("wandb_id could not be written") == 1
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "wandb_id").write_text("")
    assert len(run_id(config, tmp_path / "full", {})) == 8, "an empty file is no id"


def test_entries_of_a_run_continued_in_another_folder_are_numbered_on(make: Make, tmp_path: Path) -> None:
    tracker = Tracker(make({"tracking.wandb.mode": "online"}), tmp_path, is_main=True)
    tracker.restore(4, {"wandb_id": "abc", "lines": 12})
    tracker.log({"step": 5})
    assert tracker.state() == {"wandb_id": "abc", "lines": 13}


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (SystemExit(143), 143), (SystemExit(), 0), (SystemExit("no"), 1), (KeyboardInterrupt(), 1)],
)
def test_exit_code(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, code: int
) -> None:
    seen: list[int] = []

    class Closing:
        def __init__(self, *_: object) -> None: ...
        def close(self, exit_code: int, seconds: float) -> None:
            seen.append(exit_code)
            assert 0 < seconds <= (module.FAILED_SECONDS if exit_code else 30)

    monkeypatch.setattr(module, "Background", Closing)
    with contextlib.suppress(BaseException), Tracker(make({"tracking.tensorboard": True}), tmp_path, is_main=True):
        if error is not None:
            raise error
    assert seen == [code]


def test_other_ranks_do_nothing(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make({"tracking.wandb.mode": "online", "tracking.tensorboard": True})
    with Tracker(config, tmp_path, is_main=False) as tracker:
        tracker.restore(3, {})
        tracker.log({"step": 1})
        tracker.say("hello")
        tracker.advance()
        assert tracker.state() == {}
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_the_environment_can_only_turn_wandb_down(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    online, disabled = make({"tracking.wandb.mode": "online"}).tracking.wandb, make().tracking.wandb
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert (wanted_mode(online), wanted_mode(disabled)) == ("online", "disabled")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert (wanted_mode(online), wanted_mode(disabled)) == ("offline", "disabled")


def test_a_report_that_fails_and_a_full_disk_cost_a_warning(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.html").write_text("mine")
    (tmp_path / "plan.json").mkdir()
    with Tracker(make(), tmp_path, is_main=True, plan={"fits": True}) as tracker:
        tracker.log({"step": 1})
    said = capsys.readouterr().out
    assert "plan.json could not be written (IsADirectoryError" in said
    assert "report.html could not be written (ReportError" in said and (tmp_path / "report.html").read_text() == "mine"


def test_a_failed_run_has_a_report_that_says_so(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Tracker(make(), tmp_path, is_main=True) as tracker:
        tracker.log({"step": 1})
        tracker.event("skipped", step=1, why="its gradients are not finite")
        raise ZeroDivisionError("by nothing")
    page = (tmp_path / "report.html").read_text()
    assert "ended with exit code 1: ZeroDivisionError: by nothing" in page and "gradients are not finite" in page
    assert not (tmp_path / "report.png").exists(), "the message of a failure does not wait for pictures"


def test_no_report_when_none_is_wanted(make: Make, tmp_path: Path) -> None:
    with Tracker(make({"tracking.report": False}), tmp_path, is_main=True):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "events.jsonl"}
