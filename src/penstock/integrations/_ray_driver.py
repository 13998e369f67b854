"""The driver of a fleet on Ray: it assigns jobs to nodes, hears their reports, and recovers the jobs of lost nodes."""

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from penstock.errors import NodeLostError, NodeLostWarning
from penstock.fleet import FleetState, Job, JobResult, JobRow, JobState, Results, Stopper, Tracker, stored_result
from penstock.integrations._ray_cluster import GRACE_S, MOST_LOSSES, Cluster
from penstock.integrations._ray_known import Devices, KnownJob, KnownNode, first_row
from penstock.integrations._ray_node import Report
from penstock.integrations._ray_observers import Observers
from penstock.integrations._ray_outbox import Ending
from penstock.integrations._ray_plan import assign, move

_LINES_S = 30.0
_LEAST_GAIN_S = 1.0


class Driver:
    """The process that the user started. It decides, and computes nothing."""

    def __init__(
        self,
        ray: Any,  # any: the module
        jobs: Iterable[Job],
        run_dir: Path,
        devices: Devices | Mapping[str, Devices] | None,
        options: Mapping[str, Any],
        resume: bool,
        stopper: Stopper | None,
        trackers: Sequence[Tracker],
    ):
        self._run_dir, self._resume = run_dir, resume
        self._observers = Observers(stopper, trackers)
        self._cluster = Cluster(ray, run_dir / "nodes", devices, options, asks_stopper=stopper is not None)
        self._state = FleetState(run_dir)
        self._state.refuse_strangers(resume=resume)
        self._jobs: dict[str, KnownJob] = {}
        rows = {row.name: row for row in self._state.jobs()} if self._state.exists else {}
        for job in jobs:
            if job.name in self._jobs:
                raise ValueError(f"two jobs are called {job.name!r}; names must differ: Job(name='lr=3e-4', ...)")
            if not resume and (self._folder(job) / "checkpoints").exists():
                raise ValueError(f"{self._folder(job)} has checkpoints of another run; give another run_dir")
            self._jobs[job.name] = self._known(job, rows.get(job.name))
        self._said_s = time.monotonic()

    def __enter__(self) -> Self:
        self._cluster.make_folder()
        self._state.create(resume=self._resume)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._cluster.end()
        finally:
            self._write()
            self._state.say_ended()
            self._observers.close()

    def run(self, progress: str | None) -> Results:
        """Run until every job is over; return the results."""
        while any(known.result is None for known in self._jobs.values()):
            self._look_for_nodes()
            self._listen()
            self._obey()
            self._spread()
            self._write()
            if progress is not None and time.monotonic() - self._said_s > _LINES_S:
                self._show()
        self._cluster.end()
        results = [known.result for known in self._jobs.values() if known.result is not None]
        return Results(results, self._cluster.past, self._run_dir, None)

    # Jobs

    def _known(self, job: Job, row: JobRow | None) -> KnownJob:
        """Return a job as the driver knows it; ``row`` is that of an earlier run."""
        from ray import cloudpickle

        try:
            packed = cloudpickle.dumps(job)
        except Exception as error:
            raise TypeError(
                f"job {job.name!r} cannot be sent to a node: {error}. Its factories may create what cannot be pickled, "
                "but must not hold it: model=lambda: Model(), data=lambda: open_data(path)"
            ) from error
        place = len(self._jobs)
        known = KnownJob(job, place, packed, first_row(job, place) if row is None else replace(row, place=place))
        if row is not None and JobState(row.state).is_over:
            known.result = stored_result(job, self._folder(job), JobState(row.state), row.error, row.seconds_per_step)
        return known

    def _folder(self, job: Job) -> Path:
        return self._run_dir / "jobs" / job.name

    def _spread(self) -> None:
        """Give waiting jobs to nodes; if none waits, move a job from a loaded node to an idle one."""
        now_s = time.monotonic()
        waits = [
            known
            for known in self._jobs.values()
            if known.result is None and known.node is None and known.row.state != JobState.PAUSED.value
        ]
        free = [known for known in waits if known.free_from_s <= now_s]
        loads = [node.load() for node in self._cluster.nodes.values() if node.is_ready]
        for chosen in assign(loads, [known.load(is_leaving=False) for known in free]):
            self._send(self._jobs[chosen.job], self._cluster.nodes[chosen.node])
        if not waits and (moved := move(loads, _LEAST_GAIN_S)) is not None:
            source = self._cluster.nodes[moved.source]
            source.leaving[moved.job] = moved.target
            source.actor.release.remote(moved.job)

    def _send(self, known: KnownJob, node: KnownNode) -> None:
        # read before another node writes there; the lost process does not any more, since its grace period is over
        if known.num_losses:
            self._observers.catch_up(known.job, self._folder(known.job) / "metrics.jsonl")
        known.node, node.jobs[known.job.name] = node, known
        known.sent_s, known.begin_s = time.monotonic(), 0.0
        node.actor.add.remote(known.job.name, known.packed, is_paused=known.row.state == JobState.PAUSED.value)

    # Nodes

    def _look_for_nodes(self) -> None:
        reason = self._cluster.look_for_nodes()
        if reason is not None:
            num_over = sum(known.result is not None for known in self._jobs.values())
            raise NodeLostError(
                f"no live node can run these jobs: {reason}. {num_over} of {len(self._jobs)} jobs are over; their "
                f"checkpoints are in {self._run_dir}. Continue when there are nodes: run_on_ray(..., resume=True)"
            )

    def _listen(self) -> None:
        for node, news in self._cluster.news():
            if isinstance(news, str):
                self._lose(node, news)
            else:
                self._cluster.answer(node, self._hear(node, news))

    def _hear(self, node: KnownNode, report: Report) -> dict[tuple[str, int], bool | str]:
        """Note what a node reports; return the stopper's verdicts on its questions."""
        for row in report.rows:
            known = node.jobs.get(row.name)
            if known is not None:
                known.note(node, row, report.sizes.get(row.name))
        for name, step, metrics in report.metrics:
            self._observers.log(self._jobs[name].job, step, metrics)
        for ending in report.endings:
            self._take_back(node, ending)
        node.note_devices(report.devices)
        return {
            (name, step): self._observers.verdict(self._jobs[name].job, step, metrics)
            for name, step, metrics in report.questions
        }

    def _take_back(self, node: KnownNode, ending: Ending) -> None:
        known = node.jobs.pop(ending.name)
        target = self._cluster.nodes.get(node.leaving.pop(ending.name, ""))
        known.node = None
        if ending.state is None:
            known.row = replace(known.row, state=JobState.PENDING.value)
            if target is not None:
                self._send(known, target)
            return
        result = JobResult(
            job=known.job,
            state=ending.state,
            losses=ending.losses,
            validations=ending.validations,
            error=ending.error,
            seconds_per_step=ending.seconds_per_step or known.row.seconds_per_step,
            checkpoint=ending.checkpoint,
        )
        self._finish(known, result)

    def _finish(self, known: KnownJob, result: JobResult) -> None:
        known.result = result
        known.row = replace(known.row, state=result.state.value, error=result.error, updated_s=time.time())
        self._observers.end(known.job, result.state)

    def _lose(self, node: KnownNode, reason: str) -> None:
        self._cluster.lose(node, reason)
        for known in node.jobs.values():
            # its process may live on until it sees that its lease is gone; two would damage the job's folder
            known.node, known.free_from_s = None, time.monotonic() + GRACE_S
            known.num_losses = 1 if known.row.step > known.lost_at_step else known.num_losses + 1
            known.lost_at_step = known.row.step
            if known.row.state in (JobState.RUNNING.value, JobState.WAITING.value):
                known.row = replace(known.row, state=JobState.PENDING.value)
            if known.num_losses >= MOST_LOSSES:
                error = f"{known.num_losses} nodes were lost while they trained it, at step {known.row.step}: {reason}"
                stored = stored_result(
                    known.job, self._folder(known.job), JobState.FAILED, error, known.row.seconds_per_step
                )
                self._finish(known, stored)
        if not node.is_ready:
            return
        names = ", ".join(repr(name) for name, known in node.jobs.items() if known.result is None) or "none"
        warnings.warn(
            f"node {node.name} was lost ({reason}); jobs that continue elsewhere from their last checkpoints: {names}",
            NodeLostWarning,
            stacklevel=2,
        )

    # Commands of the user

    def _obey(self) -> None:
        """Do what other processes ask for through the state."""
        for command in self._state.commands():
            known = self._jobs.get(command.job)
            if command.verb not in ("pause", "resume", "stop"):
                answer = f"a fleet on Ray supports pause, resume and stop, not {command.verb}"
            elif known is None or known.result is not None:
                answer = f"no job {command.job!r} is running"
            elif known.node is None:
                answer = self._obey_alone(known, command.verb)
            else:
                answer = self._cluster.obey(known.node, command.verb, command.job)
            self._state.answer(command.id, answer)

    def _obey_alone(self, known: KnownJob, verb: str) -> str:
        if verb == "stop":
            folder = self._folder(known.job)
            self._finish(known, stored_result(known.job, folder, JobState.STOPPED, None, known.row.seconds_per_step))
        else:
            state = JobState.PAUSED if verb == "pause" else JobState.PENDING
            known.row = replace(known.row, state=state.value)
        return ""

    def _write(self) -> None:
        self._state.say_alive()
        self._state.write([known.row for known in self._jobs.values()])

    def _show(self) -> None:
        self._said_s = time.monotonic()
        rows = [known.row for known in self._jobs.values()]
        counts = {state.value: sum(row.state == state.value for row in rows) for state in JobState}
        said = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        steps = sum(row.step for row in rows)
        Console(stderr=True).print(f"fleet on {len(self._cluster.nodes)} nodes: {said}; {steps} steps", highlight=False)
