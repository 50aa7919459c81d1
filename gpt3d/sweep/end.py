"""The end of a sweep, however it ends: the table, the best job, and what else was asked for (`report`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpt3d.sweep import layouts, scaling, table
from gpt3d.sweep.jobs import JOBS, Figures, Job, SweepFailed, figures, read_jobs
from gpt3d.sweep.record import SweepRecord

Report = Callable[[Sequence[Job], dict[int, Figures], Path], str]
REPORTS: dict[str, Report] = {"layouts": layouts.report, "scaling": scaling.report}


@contextmanager
def table_at_end() -> Iterator[None]:
    """Print and save the table of the sweep that ran inside, if one did; also after a failure or Ctrl-C.

    Hydra's own sweeper raises the first failure when all jobs have run. It was told when it happened: SweepFailed
    with the number of failures is raised instead, so that the table is the last to be seen.
    """
    try:
        yield
    except Exception as error:
        known = not getattr(error, "show_traceback", True) and not isinstance(error, SweepFailed)
        if SweepRecord.folder is None or not known:
            raise
        jobs = read_jobs(SweepRecord.folder)
        failed = sum(job.status == "failed" for job in jobs)
        raise SweepFailed(
            f"{failed} of {len(jobs)} jobs failed; their whole messages: {SweepRecord.folder / JOBS}"
        ) from error
    finally:
        if SweepRecord.folder is not None:
            print(finish(SweepRecord.folder), flush=True)


def finish(sweep_dir: Path) -> str:
    """Write `sweep.md` and `sweep.csv` into the sweep's folder; returns what the terminal shows."""
    jobs = read_jobs(sweep_dir)
    if not jobs:
        return f"sweep   no job has begun; folder {sweep_dir}"
    about = json.loads((sweep_dir / JOBS / "sweep.about").read_text())
    objective, report = about["objective"], about["report"]
    reached = {job.number: figures(Path(job.run_dir)) for job in jobs}
    body = table.rows(jobs, reached, sweep_dir)
    done = sum(job.status == "done" for job in jobs)
    lines = [f"sweep   {len(jobs)} jobs, {done} done, {len(jobs) - done} failed or interrupted; objective {objective}"]
    if (winner := table.best(jobs, objective)) is not None:
        own = table.varied(jobs)[winner.number]
        lines.append(f"best    job {winner.number}: {own} ({objective} {winner.objective:.6g})")
    more = REPORTS[report](jobs, reached, sweep_dir) if report in REPORTS else ""
    text = "\n".join(lines)
    summary = text.replace("\n", "\n\n")
    written = table.markdown(table.HEADS, body)
    (sweep_dir / "sweep.md").write_text(f"# Sweep {sweep_dir.name}\n\n{summary}\n\n{written}\n" + _section(more))
    table.write_csv(sweep_dir / "sweep.csv", jobs, reached)
    where = f"files   {sweep_dir / 'sweep.md'} and sweep.csv"
    return "\n".join(["", text, table.terminal(body), *([more] if more else []), where])


def _section(more: str) -> str:
    return f"\n```text\n{more}\n```\n" if more else ""
