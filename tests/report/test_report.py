"""The report: what it says of a run, side by side, of damaged folders, and that nothing of a run becomes markup."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt3d.launch import RankFailed
from gpt3d.report import main
from gpt3d.reporting.curves import MOST_POINTS, charts, thin
from gpt3d.reporting.draw import svg, ticks
from gpt3d.reporting.facts import facts, history, memory_rows, step_split
from gpt3d.reporting.read import ReportError, read_run
from gpt3d.reporting.write import write_report
from gpt3d.tracking.tracker import record_failure
from tests.report.folder import write_run

VOID = {"meta", "img", "br"}


class Checker(HTMLParser):
    """Tags are balanced; collects tags, text, and everything that a browser would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.tags, self.fetched, self.words = list[str](), set[str](), list[str](), ""
        self.feed(page)
        self.close()
        assert self.open == [], "not closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.fetched += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.words += data


def report(*folders: Path) -> Checker:
    to = folders[0] / "report.html"
    write_report(folders, to, pictures=False)
    return Checker(to.read_text())


def test_what_was_run_and_what_came_of_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    run = read_run(folder)
    results = {fact.name: fact.value for fact in facts(run).results}
    assert results["validation loss"] == "5.2500" and results["steps"] == "6 of 6" and results["MFU"] == "n/a"
    assert results["time"] == "2:34" and results["tokens/s"] == "1,003"
    assert [line["loss"] for line in run.with_key("loss")] == [9.0, 8.0, 7.0, 6.0, 5.0], "the steps that count"
    by_tokens = next(chart for chart in charts([run]) if chart.title == "Loss by tokens")
    assert by_tokens.curves[0].points[-1] == (6 * 8 * 32, 5.0)
    rows, _ = memory_rows(run)
    assert rows == [("stage 0", 2.0, 2.0), ("stage 1", 1.0, 1.0)], "the plan without its margin"
    assert [row[2] for row in history(run)] == ["start", "restart 1", "skipped: its gradients are not finite", "end"]
    split = dict(step_split(run))
    assert sum(split.values()) == pytest.approx(1) and split["pipeline bubble"] == pytest.approx(0.3)
    page = report(folder)
    for word in ("1,234 parameters", "TP 1 x PP 2 x DP 1", "restart 1", "To be", "c0ffee", "finished", "MFU"):
        assert word in page.words, word


def test_nothing_is_fetched_and_no_text_becomes_markup(tmp_path: Path) -> None:
    evil = "</pre><script>alert(1)</script><img src=http://x/y.png> & \x00 \ud83d"
    page = report(write_run(tmp_path / "<b>run", sample=evil.replace("\ud83d", "")))
    assert "script" not in page.tags and "b" in page.tags
    assert all(source.startswith("data:") for source in page.fetched) and len(page.fetched) == 1, "the timeline"
    assert "<script>alert(1)</script>" in page.words and "a<b>" in page.words


def test_runs_side_by_side(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run", lr=3e-3)
    page = report(a, b)
    different = page.words.split("Settings that differ")[1].split("Results")[0]
    assert "optimizer.lr" in different and "0.003" in different and "seed" not in different
    assert "dp: null" in page.words, "as it is typed"
    assert "x/run" in page.words and "y/run, validation" in page.words, "labels tell them apart"
    assert page.words.index("Settings that differ") < page.words.index("Results") < page.words.index("Curves")


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "events.jsonl", "plan.json", "environment.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "binary", "another kind"])
def test_a_damaged_file_is_named_and_the_rest_is_shown(tmp_path: Path, name: str, damage: str) -> None:
    folder = write_run(tmp_path / "run")
    path, whole = folder / name, (folder / name).read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {"empty": b"", "cut": whole[:-9], "binary": b"\x00\xff{[" * 99, "another kind": b"[1]"}[damage]
        )
    page = report(folder)
    if damage != "empty" and not (name == "config.yaml" and damage == "cut"):
        assert name in page.words.split("This report is not complete")[1].split("What was run")[0]
    assert "Curves" in page.words and "Samples" in page.words


def test_values_of_the_wrong_kind_cost_only_themselves(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    odd = [{"step": "7", "loss": 1}, {"step": 8, "loss": None}, {"step": 9, "loss": "x"}, {"loss": 3}, {"step": 10}]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in odd))
    (folder / "events.jsonl").write_text('{"event": "skipped"}\n{"event": "end", "time": "late"}\n')
    (folder / "plan.json").write_text('{"stages": [3, {"total": "x"}], "layout": 4, "parameters": null}')
    (folder / "config.yaml").write_text("trainer: 3\nparallel: [1]\nmodel:\n")
    assert "5.2500" in report(folder).words


def test_what_is_no_run_or_no_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no such folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ReportError, match="not the folder of a run"):
        read_run(tmp_path)
    mine = tmp_path / "mine.html"
    mine.write_text("<p>not yours</p>")
    with pytest.raises(SystemExit, match="is there already and is no report"):
        main([str(write_run(tmp_path / "run")), "--to", str(mine)])
    assert mine.read_text() == "<p>not yours</p>"
    with pytest.raises(SystemExit, match="there is no folder"):
        main([str(tmp_path / "run"), "--to", str(tmp_path / "no" / "x.html")])
    with pytest.raises(SystemExit, match="not the folder of a run, it has runs in it: name those"):
        main([str(tmp_path)])


def test_a_picture_of_somebody_else_s_is_never_overwritten(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "run"))
    (tmp_path / "loss.png").write_bytes(b"mine")
    with pytest.raises(SystemExit, match=r"loss.png is there already and is no report"):
        main([run, "--to", str(tmp_path / "loss.html")])
    assert (tmp_path / "loss.png").read_bytes() == b"mine" and not (tmp_path / "loss.html").exists()
    with pytest.raises(SystemExit, match="a page of HTML is wanted"):
        main([run, "--to", str(tmp_path / "new.png")])
    for _ in range(2):
        main([run, "--to", str(tmp_path / "again.html")])


def test_the_one_validation_of_a_short_run_is_seen(tmp_path: Path) -> None:
    (by_tokens,) = (c for c in charts([read_run(write_run(tmp_path / "run"))]) if c.title == "Loss by tokens")
    assert len(by_tokens.curves[1].points) == 1 and svg(by_tokens).count("<circle") == 1


def test_the_supervisor_tells_what_a_killed_rank_could_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    record_failure(folder, RankFailed("rank 0 was killed by SIGKILL\nlogs of the ranks"), report=True)
    page = (folder / "report.html").read_text()
    assert '<span class="bad">failed: rank 0 was killed by SIGKILL</span>' in page
    assert history(read_run(folder))[-1][2] == "failed: rank 0 was killed by SIGKILL"


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    code = f"import sys; from gpt3d.report import main; main([{str(folder)!r}]); assert 'torch' not in sys.modules"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert out.stdout.split() == [str(folder / "report.html"), str(folder / "report.png")]
    assert (folder / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_without_matplotlib_there_is_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert write_report([write_run(tmp_path / "run")], tmp_path / "r.html") == [tmp_path / "r.html"]


numbers = st.floats(-1e12, 1e12, allow_subnormal=False)


@given(numbers, numbers)
def test_ticks_span_what_they_should(a: float, b: float) -> None:
    low, high = sorted((a, b))
    found = ticks(low, high, 5)
    assert 2 <= len(found) <= 9 and found == sorted(set(found))
    slack = 1e-6 * max(high - low, abs(low))
    assert found[0] <= low + slack and found[-1] >= high - slack


@given(st.lists(st.tuples(numbers, numbers), max_size=3 * MOST_POINTS))
def test_thinning_keeps_the_end(points: list[tuple[float, float]]) -> None:
    found = thin(points)
    assert len(found) == min(len(points), MOST_POINTS) and found[-1:] == points[-1:]


def test_curves_lie_within_the_picture(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_report([folder], folder / "report.html", pictures=False)
    points = re.findall(r'points="([^"]+)"', (folder / "report.html").read_text())
    assert len(points) >= 5
    for x, y in (map(float, pair.split(",")) for line in points for pair in line.split()):
        assert 0 <= x <= 480 and 0 <= y <= 290
