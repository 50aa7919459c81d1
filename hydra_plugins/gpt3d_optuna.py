"""A Hydra sweeper over Optuna: `hydra/sweeper=gpt3d_optuna`, or one of the ready options of `sweep=`.

In this package because Hydra takes sweepers from nowhere else. The published hydra-optuna-sweeper wants optuna below 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from gpt3d.config.load import conf_dir
from gpt3d.config.overrides import mistakes, quote_overrides
from gpt3d.config.problems import ConfigError
from gpt3d.sweep.jobs import SweepFailed

Values = dict[str, Any]


class OptunaSweeper(Sweeper):
    """Trials of Optuna as jobs. What is searched: `choice(a,b)`, `a,b`, `range(1,8)`, `interval(0.1,1)`,
    `tag(log,interval(1e-4,1e-2))`, `int(interval(1,8))`, in `params` or as overrides, which take precedence.

    The objective is the run's `objective`; its direction follows. A job that fails is a failed trial, and the search
    goes on. A combination that was tried is told from memory, not run again.
    """

    def __init__(
        self, n_trials: int, n_jobs: int, startup_trials: int, seed: int | None, storage: str | None,
        study_name: str | None, params: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.n_trials, self.n_jobs, self.startup_trials, self.seed = n_trials, n_jobs, startup_trials, seed
        self.storage, self.study_name, self.params = storage, study_name, dict(params or {})
        self.tried: dict[tuple[str, ...], float | None] = {}
        self.jobs = 0

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra's way to hand over what a sweeper works with."""
        self.context, self.master = hydra_context, config
        self.runner = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> float:
        """Run the trials; returns the best objective."""
        optuna = _optuna()
        fixed, space = self._space(optuna, arguments)
        maximize = self.master.objective == "tokens_per_s"
        study = optuna.create_study(
            direction="maximize" if maximize else "minimize",
            sampler=optuna.samplers.TPESampler(seed=self.seed, n_startup_trials=self.startup_trials),
            storage=self.storage, study_name=self.study_name, load_if_exists=True,
        )  # fmt: skip
        for _ in range(math.ceil(self.n_trials / self.n_jobs)):
            count = min(self.n_jobs, self.n_trials - len(study.trials))
            self._batch(optuna, study, [study.ask(space) for _ in range(count)], fixed)
        finished = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
        if not finished:
            raise SweepFailed(f"none of {len(study.trials)} trials succeeded; the table has their reasons")
        best = {"params": dict(study.best_params), "value": study.best_value, "objective": self.master.objective}
        OmegaConf.save(OmegaConf.create(best), Path(self.master.hydra.sweep.dir) / "optuna.yaml")
        return float(study.best_value)

    def _batch(self, optuna: Any, study: Any, trials: Sequence[Any], fixed: Sequence[str]) -> None:
        """Run some trials through the launcher, together if it can, and tell the study."""
        wanted = [_overrides(trial.params) for trial in trials]
        new = list(dict.fromkeys(own for own in wanted if own not in self.tried))
        if new:
            jobs = [quote_overrides([*fixed, *own], conf_dir()) for own in new]
            results = self.runner.launch(jobs, initial_job_idx=self.jobs)
            self.jobs += len(new)
            self.tried |= {own: _objective(result) for own, result in zip(new, results, strict=True)}
        for trial, own in zip(trials, wanted, strict=True):
            value = self.tried[own]
            if value is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, value)

    def _space(self, optuna: Any, arguments: Sequence[str]) -> tuple[list[str], Values]:
        """(overrides of all jobs, distributions by key)."""
        parser = OverridesParser.create(config_loader=self.context.config_loader)
        texts = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        folders = [Path(source.path) for source in self.master.hydra.runtime.config_sources if source.schema == "file"]
        if problems := mistakes(texts, folders, sweep=True):  # before the first trial, not when one happens to draw it
            raise ConfigError(problems)
        given = parser.parse_overrides(texts)
        by_key = {override.get_key_element(): override for override in given}
        space = {key: distribution(optuna, o) for key, o in by_key.items() if o.is_sweep_override()}
        fixed = [f"{key}={o.get_value_element_as_str()}" for key, o in by_key.items() if not o.is_sweep_override()]
        if not space:
            raise SweepFailed("nothing to search: give a key a range, e.g. 'optimizer.lr=tag(log,interval(1e-4,1e-2))'")
        return fixed, space


def distribution(optuna: Any, override: Override) -> Any:
    """Optuna's distribution for what Hydra's grammar says about one key."""
    sweep = override.value()
    if isinstance(sweep, IntervalSweep):
        assert sweep.start is not None and sweep.end is not None
        log = "log" in sweep.tags
        if isinstance(sweep.start, int) and isinstance(sweep.end, int):
            return optuna.distributions.IntDistribution(sweep.start, sweep.end, log=log)
        return optuna.distributions.FloatDistribution(float(sweep.start), float(sweep.end), log=log)
    if isinstance(sweep, RangeSweep):
        return optuna.distributions.CategoricalDistribution([str(number) for number in sweep.range()])
    return optuna.distributions.CategoricalDistribution(list(override.sweep_string_iterator()))


def _overrides(params: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in params.items())


def _objective(result: JobReturn) -> float | None:
    """What a job returned; None if it failed or has no finite objective."""
    if result.status != JobStatus.COMPLETED:
        return None
    value = result.return_value
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise SweepFailed("this sweeper needs the package optuna: pip install 'gpt3d[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
