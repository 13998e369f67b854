"""Optuna for a fleet: its pruners stop jobs, and its samplers choose the next ones."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from penstock.arguments import checked, must_be
from penstock.fleet import Device, Fleet, FleetState, Job, JobState, Results
from penstock.tiers import Budget, Size

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.study import Study
    from optuna.trial import Trial

Direction = Literal["minimize", "maximize"]
"""The direction in which a metric improves."""


@checked("search(study, make_job, num_trials=20, at_once=4)")
def search(
    study: "Study",
    make_job: "Callable[[Trial], Job]",
    *,
    num_trials: int,
    at_once: int,
    metric: str = "loss",
    devices: Sequence[str | torch.device | Device] | None = None,
    budget: Size | Budget | None = None,
    **options: Any,  # those of Fleet
) -> Results:
    """Train the jobs of ``num_trials`` trials of ``study`` in one fleet; return the results.

    ``make_job`` makes a job from a trial, which suggests its hyperparameters; it runs on the calling thread. At most
    ``at_once`` jobs are alive at any time. When one ends, the study is told before it is asked for the next. More jobs
    at once keep devices busy, fewer let the sampler know more. Jobs are told as ``COMPLETE`` with their last ``metric``
    (as `JobResult.value`), as ``FAIL`` if they failed or the metric is not a number, or as ``PRUNED`` if they were
    stopped, by the study's pruner after a validation or by hand. ``TrialPruned`` from ``make_job`` skips a trial. When
    the search ends early, by an error or ``KeyboardInterrupt``, unfinished trials are told as ``FAIL``.

    The trial's parameters are put before the job's tags, and the job's name is the trial's user attribute ``"job"``:
    ``results[study.best_trial.user_attrs["job"]]``. If a job's name is taken, the trial's number is appended to it.
    ``options`` are those of `Fleet`, without ``stopper`` and ``resume``: to go on with a study, search again. The
    scheduler is ``"fifo"`` by default, so that jobs end one by one and the sampler learns from them.

    Raises ``ValueError`` or ``TypeError`` for settings that cannot work, ``ValueError`` if jobs do not have the metric,
    ``ImportError`` without Optuna, and what ``make_job`` and `Fleet.wait` raise.
    """
    example = "search(study, make_job, num_trials=20, at_once=4)"
    if not hasattr(study, "directions"):
        raise must_be("study", "an optuna.Study", study, example)
    if not callable(make_job):
        raise must_be("make_job", "a function of a trial", make_job, example)
    _refuse(study, num_trials, at_once, options)
    alive = _Alive(metric)
    searching = _Search(study, make_job, num_trials, at_once, alive)
    options.setdefault("scheduler", "fifo")
    trackers = [*options.pop("trackers", ()), alive]
    try:
        with Fleet(devices, budget, stopper=alive.prunes, trackers=trackers, **options) as fleet:
            return fleet.wait(more=partial(searching.goes_on, fleet))
    finally:
        searching.tell_the_rest()


class OptunaStopper:
    """A `fleet.Stopper` that asks one of Optuna's pruners after each validation. Several threads can use it at once.

    ``metric`` is a metric of the validation. All jobs of a fleet train at the same time. So take a pruner that compares
    with jobs that still run, such as ``SuccessiveHalvingPruner(min_resource=100)`` (steps), or one that looks at one
    job alone, such as ``ThresholdPruner`` or ``PatientPruner``. Median and percentile pruners compare with finished
    jobs, which the stopper knows only if it is a tracker too::

        stopper = OptunaStopper(optuna.pruners.MedianPruner())
        fleet.run(jobs, stopper=stopper, trackers=[stopper], scheduler="fifo")

    A job whose validation does not have the metric fails with a ``ValueError``. Raises ``ImportError`` without Optuna.
    """

    @checked("OptunaStopper(optuna.pruners.PatientPruner(None, 3))")
    def __init__(self, pruner: "BasePruner", metric: str = "loss", direction: Direction = "minimize"):
        _optuna()
        if not hasattr(pruner, "prune"):
            raise must_be(
                "pruner", "one of optuna.pruners", pruner, "OptunaStopper(optuna.pruners.PatientPruner(None, 3))"
            )
        from optuna.study import create_study

        self._study = create_study(pruner=pruner, direction=direction)
        self._metric = metric
        self._lock = threading.Lock()
        self._trials: dict[str, Trial] = {}
        self._values: dict[str, float] = {}

    @checked("stopper(job, 10, {'loss': 0.5})")
    def __call__(self, job: Job, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether the pruner gives the job up."""
        if self._metric not in metrics:
            raise _no_metric(job, self._metric, metrics)
        with self._lock:
            if job.name not in self._trials:
                self._trials[job.name] = self._study.ask()
            self._values[job.name] = metrics[self._metric]
            return _prunes(self._trials[job.name], step, metrics[self._metric])

    @checked("stopper.log(job, 10, {'loss': 0.5})")
    def log(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing, since validations come by `__call__`."""

    @checked("stopper.end(job, JobState.DONE)")
    def end(self, job: Job, state: JobState) -> None:
        """Let other jobs be compared with this one from now on."""
        with self._lock:
            trial, value = self._trials.pop(job.name, None), self._values.pop(job.name, None)
            if trial is not None:
                _tell(self._study, trial, state, value)

    def close(self) -> None:
        """Stop comparing with jobs that are not over."""
        with self._lock:
            for trial in self._trials.values():
                _tell(self._study, trial, JobState.FAILED, None)
            self._trials.clear()


class _Search:
    """The state of `search`. Only the waiting thread uses it, since it alone asks and tells the study."""

    def __init__(
        self, study: "Study", make_job: "Callable[[Trial], Job]", num_trials: int, at_once: int, alive: "_Alive"
    ) -> None:
        self._study, self._make_job = study, make_job
        self._num_trials, self._at_once = num_trials, at_once
        self._num_asked = 0
        self._alive = alive
        self._untold: dict[int, Trial] = {}
        """Trials by number that the study has not been told about: alive ones, and of a job that is being made."""
        self._names: set[str] = set()

    def goes_on(self, fleet: Fleet) -> bool:
        """Tell the study what ended, and add jobs; return whether there is anything left to do."""
        self._tell_ended()
        if self._alive.fault is not None:
            raise self._alive.fault
        while len(self._alive) < self._at_once and self._num_asked < self._num_trials:
            self._num_asked += 1
            self._begin(fleet, self._study.ask())
        return len(self._alive) > 0

    def _begin(self, fleet: Fleet, trial: "Trial") -> None:
        from optuna.exceptions import TrialPruned

        self._untold[trial.number] = trial
        try:
            job = self._job_of(trial)
        except TrialPruned:
            self._tell(trial, JobState.STOPPED, None)
            return
        self._alive.add(job.name, trial)  # before the fleet has the job, whose threads ask for its trial
        self._names.add(job.name)
        fleet.add(job)

    def _job_of(self, trial: "Trial") -> Job:
        job = self._make_job(trial)
        if not isinstance(job, Job):
            raise TypeError(f"make_job(trial) must return a fleet.Job, got {type(job).__name__}")
        name = job.name if job.name not in self._names else f"{job.name}-{trial.number}"
        if name in self._names:
            raise ValueError(f"two jobs are called {name!r}; let make_job name jobs by their hyperparameters")
        trial.set_user_attr("job", name)
        return job.with_changes(name=name, tags={**trial.params, **job.tags})

    def _tell_ended(self) -> None:
        for trial, state, value in self._alive.take_ended():
            self._tell(trial, state, value)

    def _tell(self, trial: "Trial", state: JobState, value: float | None) -> None:
        _tell(self._study, trial, state, value)
        del self._untold[trial.number]

    def tell_the_rest(self) -> None:
        """Tell the study that unfinished trials have failed, after the fleet has ended."""
        self._tell_ended()
        for trial in list(self._untold.values()):
            self._tell(trial, JobState.FAILED, None)


class _Alive:
    """The trials of jobs that are alive, as the fleet's tracker and stopper. Device threads record what happens."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._trials: dict[str, Trial] = {}
        """Trials by the job's name."""
        self._values: dict[str, float] = {}
        """Per job, the metric of the last validation, or the loss of the last step."""
        self._validated: set[str] = set()
        self._ended: deque[tuple[str, JobState]] = deque()
        self._lock = threading.Lock()
        self.fault: Exception | None = None
        """The error that must end the search; device threads cannot raise it there."""

    def __len__(self) -> int:
        return len(self._trials)

    def add(self, name: str, trial: "Trial") -> None:
        """Add the trial of a job."""
        self._trials[name] = trial

    def take_ended(self) -> "Iterator[tuple[Trial, JobState, float | None]]":
        """Yield and forget trials whose jobs have ended: the trial, the job's state and its value."""
        while self._ended:
            name, state = self._ended.popleft()
            trial, value = self._trials.pop(name), self._values.pop(name, None)
            if state is JobState.DONE and value is None:
                self.fault = ValueError(
                    f"job {name!r} ended without the metric {self._metric!r}; give jobs validation= and metric=, or "
                    "search by metric='loss'"
                )
            yield trial, state, value

    # Methods that device threads call

    def prunes(self, job: Job, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether the study's pruner gives the job up, as the fleet's stopper."""
        if self._metric not in metrics:
            self.fault = _no_metric(job, self._metric, metrics)
            return True
        with self._lock:
            return _prunes(self._trials[job.name], step, metrics[self._metric])

    def log(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002  # a Tracker's
        """Keep the last value, as `JobResult.value` would find it."""
        key = f"validation/{self._metric}"
        if key in metrics:
            self._values[job.name] = metrics[key]
            self._validated.add(job.name)
        elif self._metric == "loss" and job.name not in self._validated and "loss" in metrics:
            self._values[job.name] = metrics["loss"]

    def end(self, job: Job, state: JobState) -> None:
        """Record that a job has ended; the waiting thread tells the study."""
        self._ended.append((job.name, state))

    def close(self) -> None:
        """Do nothing."""


def _refuse(study: "Study", num_trials: int, at_once: int, options: Mapping[str, Any]) -> None:
    _optuna()
    if num_trials < 1 or at_once < 1:
        raise ValueError(f"`num_trials` and `at_once` must be at least 1, got {num_trials} and {at_once}")
    if len(study.directions) != 1:
        raise ValueError(f"the study must have one direction, got {len(study.directions)}; a search has one metric")
    if "stopper" in options:
        raise TypeError("leave out `stopper`: search uses the study's pruner, optuna.create_study(pruner=...)")
    run_dir, again = options.get("run_dir"), "search(study, make_job, num_trials=..., at_once=..., run_dir='runs/2')"
    how = f"search again with another run_dir and the trials that are left; the study knows those that ended: {again}"
    if "resume" in options:
        raise TypeError(f"leave out `resume`: a search starts a new fleet. To go on with a study, {how}")
    if run_dir is not None and FleetState(Path(run_dir)).exists:
        raise ValueError(
            f"{run_dir} holds the fleet of an earlier search, and each search starts a new one. To go on with a study, "
            f"{how}"
        )


def _prunes(trial: "Trial", step: int, value: float) -> bool:
    trial.report(value, step)
    return bool(trial.should_prune())


def _tell(study: "Study", trial: "Trial", state: JobState, value: float | None) -> None:
    from optuna.trial import TrialState

    if state is JobState.STOPPED:
        study.tell(trial, state=TrialState.PRUNED)  # Optuna takes the value that it reported last
    elif state is JobState.DONE and value is not None and not math.isnan(value):
        study.tell(trial, value, state=TrialState.COMPLETE)
    else:
        study.tell(trial, state=TrialState.FAIL)


def _no_metric(job: Job, metric: str, metrics: Mapping[str, float]) -> ValueError:
    return ValueError(f"`metric` must be one that job {job.name!r} reports ({', '.join(metrics)}), got {metric!r}")


def _optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ImportError("this needs Optuna: pip install 'penstock[fleet]'") from error
