"""The jobs of a fleet by name: those of this process, and those that an earlier process brought to their end."""

import time
from dataclasses import replace
from typing import Any, Literal

from penstock.errors import CheckpointError
from penstock.fleet import _checkpoint
from penstock.fleet._engine import Engine
from penstock.fleet._feed import Position
from penstock.fleet._job import Job, JobSource
from penstock.fleet._life import JobRun, JobState
from penstock.fleet._records import Records
from penstock.fleet._results import JobResult, stored_result
from penstock.fleet._state import Command, FleetState, JobRow
from penstock.fleet._training import JobTraining

_WRITE_S = 0.5
_WAITS_S = 1.0
"""Time between two turns after which a job is shown as waiting."""


class Roster:
    """The jobs of a fleet, which are added, change their state, and leave.

    ``resume`` continues from what `known` says about them; ``"failed"`` also tries those again that had failed.
    """

    def __init__(self, engine: Engine, records: Records, *, resume: bool | Literal["failed"]):
        self.known: dict[str, JobRow] = {}
        """Jobs of an earlier process, by name."""
        self._engine, self._records = engine, records
        self.resumes, self._tries_failed = bool(resume), resume == "failed"
        self._sources: dict[str, JobSource] = {}
        self._over: dict[str, JobResult] = {}
        self._num_places = 0

    def recall(self, state: FleetState) -> None:
        """Read what an earlier process knew about its jobs, if the fleet resumes."""
        if self.resumes:
            self.known = {row.name: row for row in state.jobs()}

    def __contains__(self, name: object) -> bool:
        return name in self._over or any(run.job.name == name for run in self._engine.runs)

    def add(self, job: Job, source: JobSource | None = None) -> None:
        """Add a job. Raise ``ValueError`` if its name is taken."""
        folder = self._records.folder(job)
        with self._engine.condition:
            if job.name in self:
                raise ValueError(
                    f"two jobs are called {job.name!r}; each job must have its own name: Job(name='lr=3e-4', ...)"
                )
            place, self._num_places = self._num_places, self._num_places + 1
            if source is not None:
                self._sources[job.name] = source
            known = self.known.get(job.name)
            if not self.resumes and _checkpoint.latest(folder) is not None:
                raise ValueError(
                    f"{folder} already holds checkpoints of a job with this name; continue from them with "
                    "fleet.run(..., resume=True), or give another run_dir"
                )
            if known is not None and self._is_over(job, JobState(known.state)):
                state = JobState(known.state)
                self._over[job.name] = stored_result(job, folder, state, known.error, known.seconds_per_step)
                return
            run = JobRun(job=job, place=place, training=JobTraining(job))
            if known is not None and known.state == JobState.PAUSED.value:
                run.state = JobState.PAUSED
            self._engine.add(run)

    def _is_over(self, job: Job, state: JobState) -> bool:
        """Whether a job of an earlier process has nothing left to do."""
        if state is JobState.FAILED:
            return not self._tries_failed
        path = _checkpoint.latest(self._records.folder(job)) if state is JobState.DONE else None
        if path is None:
            return state.is_over
        try:
            return Position(**_checkpoint.read_state(path)["position"]).is_end_of(job)
        except (CheckpointError, KeyError, TypeError):  # who asks for its model gets the error
            return True

    @property
    def left_failed(self) -> list[str]:
        """Names of the jobs that had failed in an earlier process, and stay so."""
        return [name for name, result in self._over.items() if result.state is JobState.FAILED]

    def want(self, name: str, state: JobState) -> None:
        """Request a state for the end of the job's turn. Raise ``ValueError`` if the job is over."""
        run = self._find(name)
        with self._engine.condition:
            if run.state.is_over:
                raise ValueError(f"job {name!r} is {run.state.value} already")
            run.wanted = state
            self._engine.condition.notify_all()

    def forget(self, name: str) -> None:
        """Remove a job that is over. Raise ``ValueError`` if it is not."""
        if self._over.pop(name, None) is not None:
            return
        run = self._find(name)
        with self._engine.condition:
            if not run.state.is_over:
                raise ValueError(f"job {name!r} is {run.state.value}; stop it first")
            self._engine.runs.remove(run)

    def clone(self, name: str, new_name: str, *, warm: bool = False, **changes: Any) -> None:  # any: hyperparameters
        """Add a new job like ``name``, as `Fleet.clone` does."""
        over = self._over.get(name)
        original = self._find(name).job if over is None else over.job
        if new_name in self:
            raise ValueError(f"there is a job named {new_name!r} already; give the clone another name")
        source = self._sources.get(name)
        if source is not None:
            parameters = {**source.parameters, **changes}
            job = source.make(**parameters).with_changes(name=new_name)
            source = replace(source, parameters=parameters)
        else:
            job = original.with_changes(name=new_name, **changes)
        if warm:
            _checkpoint.copy_newest(self._records.folder(original), self._records.folder(job) / "origin", name)
        self.add(job, source)

    def can_be_made_again(self, name: str) -> bool:
        """Whether the job was given by import path, so that another process can make one like it."""
        return name in self._sources

    def rows(self) -> list[JobRow]:
        """Return what is known now about the jobs of this process, in the order in which they were added."""
        with self._engine.condition:
            rows = [self._row_of(run) for run in self._engine.runs]
        return sorted([*rows, *(self.known[name] for name in self._over)], key=lambda row: row.place)

    def results(self) -> list[JobResult]:
        """Return the results so far, in the same order."""
        results = [self._result_of(run) for run in self._engine.runs] + list(self._over.values())
        order = {row.name: row.place for row in self.rows()}
        return sorted(results, key=lambda result: order.get(result.name, len(order)))

    def sizes(self) -> dict[str, int]:
        """Return the bytes of parameters, gradients and optimizer state of each job that has started."""
        with self._engine.condition:
            return {run.job.name: run.size_bytes for run in self._engine.runs if run.size_bytes}

    def _find(self, name: str) -> JobRun:
        with self._engine.condition:
            for run in self._engine.runs:
                if run.job.name == name:
                    return run
            if name in self._over:
                raise ValueError(
                    f"job {name!r} is {self._over[name].state.value} already, since an earlier run; "
                    "fleet.run(..., resume='failed') tries jobs again that have failed, and a job with more epochs or "
                    "steps than it was trained for goes on"
                )
            names = [*(run.job.name for run in self._engine.runs), *self._over]
            raise ValueError(f"there is no job named {name!r}; there are {', '.join(names) or 'none'}")

    def _row_of(self, run: JobRun) -> JobRow:
        training, source, known = run.training, self._sources.get(run.job.name), self.known.get(run.job.name)
        losses, validations = training.history.losses, training.history.validations
        is_fresh = run.is_prepared or known is None
        return JobRow(
            name=run.job.name,
            place=run.place,
            state=self._shown_state(run).value,
            step=training.position.step if is_fresh or known is None else known.step,
            num_steps=run.plan.num_steps or (known.num_steps if known else run.job.steps or 0),
            epoch=training.position.epoch,
            loss=losses[-1] if losses else (known.loss if known and not is_fresh else None),
            validation=dict(validations[-1]) if validations else {},
            device="" if run.home is None else f"{run.home.device} #{run.home.index}",
            seconds_per_step=run.plan.seconds_per_step,
            error=run.error,
            tags=dict(run.job.tags),
            source=None if source is None else {"path": source.path, "parameters": dict(source.parameters)},
            updated_s=time.time(),
        )

    def _shown_state(self, run: JobRun) -> JobState:
        waits = run.state is JobState.RUNNING and not run.is_taken
        return JobState.WAITING if waits and self._engine.now_s - run.since_s >= _WAITS_S else run.state

    def _result_of(self, run: JobRun) -> JobResult:
        return JobResult(
            job=run.job,
            state=run.state,
            losses=tuple(run.training.history.losses),
            validations=tuple(run.training.history.validations),
            error=run.error,
            seconds_per_step=run.plan.seconds_per_step,
            weights=run.training.history.weights,
            checkpoint=_checkpoint.latest(self._records.folder(run.job)),
            best_checkpoint=_checkpoint.latest(self._records.folder(run.job), "best"),
        )


class Board:
    """A view of a fleet for other processes, and their requests to it. The thread that waits for the fleet keeps it."""

    def __init__(self, state: FleetState, roster: Roster):
        self._state, self._roster = state, roster
        self._written_s = 0.0

    def update(self) -> None:
        """Carry out requests, and write the state twice a second."""
        self._obey()
        if time.time() - self._written_s > _WRITE_S:
            self.write()

    def write(self) -> None:
        """Write the state."""
        self._written_s = time.time()
        self._state.say_alive()
        self._state.write(self._roster.rows())

    def _obey(self) -> None:
        """Carry out the requests that have arrived, and answer them."""
        for command in self._state.commands():
            try:
                self._carry_out(command)
            except Exception as error:  # a user's function may raise anything; the fleet continues
                self._state.answer(command.id, str(error) or type(error).__name__)
            else:
                self._state.answer(command.id, "")

    def _carry_out(self, command: Command) -> None:
        if command.verb == "clone":
            arguments = dict(command.arguments)
            if not self._roster.can_be_made_again(command.job):
                raise ValueError(
                    f"job {command.job!r} was not given by import path, so another process cannot create a job like "
                    "it; call fleet.clone(...) in the process that created it"
                )
            changes = arguments.get("changes", {})
            self._roster.clone(command.job, arguments["name"], warm=arguments.get("warm", False), **changes)
            return
        if command.verb not in _WANTED:
            raise ValueError(f"a command must be pause, resume, stop or clone, got {command.verb!r}")
        self._roster.want(command.job, _WANTED[command.verb])


_WANTED = {"pause": JobState.PAUSED, "resume": JobState.RUNNING, "stop": JobState.STOPPED}
