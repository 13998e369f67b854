"""Work of a fleet around training, on the threads of its devices: metrics, stoppers, checkpoints."""

import contextlib
import time
import warnings
from collections.abc import Callable, Mapping

import torch

from penstock.errors import BudgetError, CaptureError, CheckpointError, JobRetriedWarning, TierDegradedWarning
from penstock.fleet import _checkpoint
from penstock.fleet._job import Job
from penstock.fleet._life import JobRun, JobState, metric_of, num_since_best
from penstock.fleet._records import Records
from penstock.fleet._worker import Worker

_SAVE_S = 600.0

Stopper = Callable[[Job, int, Mapping[str, float]], bool]
"""A function that is called after a validation with job, step and metrics, and returns whether the job must stop."""


class Upkeep:
    """Callbacks of the engine at certain moments of a job, called without its lock.

    ``every``: steps between checkpoints of a job; ``None``: ten minutes. ``retry``: how often a job that fails begins
    again. ``ended`` is called when a job is over.
    """

    def __init__(
        self,
        records: Records,
        stopper: Stopper | None,
        *,
        every: int | None,
        keep: int,
        resume: bool,
        retry: int,
        ended: Callable[[], None],
    ):
        self._records, self._stopper = records, stopper
        self._every, self._keep, self._resume = every, max(1, keep), resume
        self._ended, self._retry = ended, retry
        self._warned = False

    def stepped(self, run: JobRun) -> None:
        """Record the metrics of an optimizer step."""
        training = run.training
        rates = [group.get("lr") for group in training.optimizer.master.param_groups]
        metrics = {"loss": training.history.losses[-1], "epoch": float(training.position.epoch)}
        if rates and isinstance(rates[0], int | float | torch.Tensor):
            metrics["lr"] = float(rates[0])
        if run.plan.seconds_per_step:
            samples = training.position.num_samples / max(1, training.position.step)
            metrics["samples_per_s"] = samples / run.plan.seconds_per_step
        self._records.log(run.job, training.position.step, metrics)

    def validated(self, run: JobRun, worker: Worker, metrics: dict[str, float]) -> bool:
        """Record the metrics of a validation, keep it if it is the best one, and return whether the job must stop."""
        job, step = run.job, run.training.position.step
        self._records.log(job, step, {f"validation/{key}": value for key, value in metrics.items()})
        must_stop = self._stopper is not None and self._stopper(job, step, metrics)
        if job.best is None and job.patience is None:
            return must_stop
        name, _ = metric_of(job)
        if name not in metrics:
            raise ValueError(
                f"job {job.name!r}: its validations have no {name!r}, but {', '.join(map(repr, metrics))}; name the "
                f"metric: Job(best=({next(iter(metrics))!r}, 'min'), ...)"
            )
        num_since = num_since_best(job, run.training.history.validations)
        if job.best is not None and num_since == 0:
            self._keep_best(run, worker)
        return must_stop or (job.patience is not None and num_since is not None and num_since >= job.patience)

    def _keep_best(self, run: JobRun, worker: Worker) -> None:
        """Write the checkpoint of a validation. The one before it stays if that is not possible."""
        try:
            _checkpoint.save(run, worker.memory, self._records.folder(run.job), keep=1, kind="best")
        except CheckpointError as error:
            self._tell_unsaved(error)

    def save(self, run: JobRun, worker: Worker, *, is_last: bool = False) -> None:
        """Write a checkpoint, unless the job is in the middle of a step or has a checkpoint of this step.

        One that cannot be written is told, and tried again when the next is due. If it ``is_last``, the weights stay in
        memory, and ``CheckpointError`` is raised, so that the job does not claim what is not there.
        """
        training = run.training
        if training.position.micro or training.position.step in (0, run.milestones.saved_step):
            return
        run.milestones.saved_s = time.time()
        try:
            _checkpoint.save(run, worker.memory, self._records.folder(run.job), keep=self._keep)
        except CheckpointError as error:
            if is_last:
                training.history.weights = _checkpoint.tensors_of(run, worker.memory)
                raise CheckpointError(
                    f"{error}. The job ended in step {training.position.step}; its weights are in this process only: "
                    f"results[{run.job.name!r}].model()"
                ) from error
            self._tell_unsaved(error)
        else:
            run.milestones.saved_step = training.position.step

    def _tell_unsaved(self, error: CheckpointError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{error}. Training goes on, and later checkpoints are tried; this warning is shown once.",
                TierDegradedWarning,
                stacklevel=3,
            )

    def wants_save(self, run: JobRun) -> bool:
        """Whether a checkpoint is due."""
        if self._every is not None:
            return run.training.position.step % self._every == 0
        return time.time() - max(run.milestones.saved_s, run.milestones.started_s) > _SAVE_S

    def may_retry(self, run: JobRun, error: BaseException) -> bool:
        """Whether a job that has raised an error begins again from its last checkpoint, which is told."""
        if run.plan.num_retries >= self._retry or isinstance(error, BudgetError | CaptureError):
            return False
        path = _checkpoint.latest(self._records.folder(run.job))
        where = "the beginning" if path is None else f"its checkpoint of {path.name.replace('-', ' ')}"
        warnings.warn(
            f"job {run.job.name!r} failed in step {run.training.position.step + 1}: {type(error).__name__}: {error}. "
            f"It goes on from {where}; this is try {run.plan.num_retries + 2} of {self._retry + 1}",
            JobRetriedWarning,
            stacklevel=2,
        )
        return True

    def restore(self, run: JobRun) -> Callable[[], None] | None:
        """Load the last checkpoint, if any, into a job that begins.

        Replaces its tensors, and returns a function that restores the rest.
        """
        folder = self._records.folder(run.job)
        has_begun = run.plan.num_times_smaller or run.plan.num_retries
        path = _checkpoint.latest(folder) if self._resume or has_begun else None
        _checkpoint.forget_best_after(folder, path)
        if path is None:
            with contextlib.suppress(IsADirectoryError):  # then no line can be written either, and a warning says so
                (folder / "metrics.jsonl").unlink(missing_ok=True)
            origin = sorted((folder / "origin").glob("step-*"))
            return _checkpoint.restore(run, origin[-1], warm=True) if origin else None
        resume = _checkpoint.restore(run, path)
        run.milestones.saved_step = run.training.position.step
        run.milestones.last_validation = max(
            (int(validation["step"]) for validation in run.training.history.validations), default=-1
        )
        _checkpoint.forget_after(folder / "metrics.jsonl", run.training.position.step)
        return resume

    def ended(self, run: JobRun, state: JobState, trace: str) -> None:
        """Record that a job is over, just before others see it. ``trace`` is the traceback if it failed."""
        self._records.end(run.job, state, trace)
        self._ended()
