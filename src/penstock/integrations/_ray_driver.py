"""The driver of a fleet on Ray: it assigns jobs to nodes, hears their reports, and recovers the jobs of lost nodes."""

import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from penstock.errors import NodeLostError, NodeLostWarning, TrackerWarning
from penstock.fleet import (
    DeviceStatistics,
    FleetState,
    Job,
    JobResult,
    JobRow,
    JobState,
    Results,
    Stopper,
    Tracker,
    stored_result,
)
from penstock.integrations._ray_known import Devices, Node, Task, first_row, kind, num_cpus
from penstock.integrations._ray_node import Ending, NodeFleet, Report
from penstock.integrations._ray_plan import assign, move

_REPORT_S = 0.5
_LOOK_S = 5.0
_GRACE_S = 2.0
_BEGIN_S = 300.0
_CLOSE_S = 60.0
_LINES_S = 30.0
_LEAST_GAIN_S = 1.0
_MOST_LOSSES = 3
"""Number of nodes lost in a row with the same job, without progress in between, at which the job fails."""


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
        self._ray, self._run_dir, self._given, self._options = ray, run_dir, devices, options
        self._stopper, self._trackers = stopper, list(trackers)
        self._state = FleetState(run_dir)
        self._state.refuse_strangers(resume=resume)
        self._tasks: dict[str, Task] = {}
        known = {row.name: row for row in self._state.jobs()} if self._state.exists else {}
        for job in jobs:
            if job.name in self._tasks:
                raise ValueError(f"two jobs are called {job.name!r}; names must differ: Job(name='lr=3e-4', ...)")
            if not resume and (self._folder(job) / "checkpoints").exists():
                raise ValueError(f"{self._folder(job)} has checkpoints of another run; give another run_dir")
            self._tasks[job.name] = self._task(job, known.get(job.name))
        self._nodes: dict[str, Node] = {}
        self._past: list[DeviceStatistics] = []
        self._num_begun: dict[str, int] = {}
        self._looked_s = -math.inf
        self._started_s = self._said_s = time.monotonic()
        self._last_loss: str | None = None

    def __enter__(self) -> Self:
        leases = self._run_dir / "nodes"
        leases.mkdir(parents=True, exist_ok=True)
        for stale in leases.glob("*.lease"):
            stale.unlink(missing_ok=True)  # its actor belongs to a driver that is gone
        self._state.create()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._end_nodes()
        finally:
            self._write()
            self._state.say_ended()
            self._tell(lambda tracker: tracker.close())

    def run(self, progress: str | None) -> Results:
        """Run until every job is over; return the results."""
        while any(task.result is None for task in self._tasks.values()):
            self._look_for_nodes()
            self._listen()
            self._obey()
            self._spread()
            self._write()
            if progress is not None and time.monotonic() - self._said_s > _LINES_S:
                self._show()
        self._end_nodes()
        results = [task.result for task in self._tasks.values() if task.result is not None]
        return Results(results, self._past, self._run_dir, None)

    # Jobs

    def _task(self, job: Job, known: JobRow | None) -> Task:
        from ray import cloudpickle

        try:
            packed = cloudpickle.dumps(job)
        except Exception as error:
            raise TypeError(
                f"job {job.name!r} cannot be sent to a node: {error}. Its factories may create what cannot be pickled, "
                "but must not hold it: model=lambda: Model(), data=lambda: open_data(path)"
            ) from error
        place = len(self._tasks)
        task = Task(job, place, packed, first_row(job, place) if known is None else replace(known, place=place))
        if known is not None and JobState(known.state).is_over:
            state = JobState(known.state)
            task.result = stored_result(job, self._folder(job), state, known.error, known.seconds_per_step)
        return task

    def _folder(self, job: Job) -> Path:
        return self._run_dir / "jobs" / job.name

    def _spread(self) -> None:
        """Give waiting jobs to nodes; if none waits, move a job from a loaded node to an idle one."""
        now_s = time.monotonic()
        waits = [
            task
            for task in self._tasks.values()
            if task.result is None and task.node is None and task.row.state != JobState.PAUSED.value
        ]
        free = [task for task in waits if task.free_from_s <= now_s]
        loads = [node.load() for node in self._nodes.values() if node.is_ready]
        for chosen in assign(loads, [task.load(is_leaving=False) for task in free]):
            self._send(self._tasks[chosen.job], self._nodes[chosen.node])
        if not waits and (moved := move(loads, _LEAST_GAIN_S)) is not None:
            source = self._nodes[moved.source]
            source.leaving[moved.job] = moved.target
            source.actor.release.remote(moved.job)

    def _send(self, task: Task, node: Node) -> None:
        if task.num_losses:
            self._catch_up(task)
        task.node, node.tasks[task.job.name] = node, task
        task.sent_s, task.begin_s = time.monotonic(), 0.0
        node.actor.add.remote(task.job.name, task.packed, is_paused=task.row.state == JobState.PAUSED.value)

    # Nodes

    def _look_for_nodes(self) -> None:
        if time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._looked_s = time.monotonic()
        for found in self._ray.nodes():
            id_ = found["NodeID"]
            if found["Alive"] and id_ not in self._nodes and self._num_begun.get(id_, 0) < _MOST_LOSSES:
                devices = self._devices_of(found)
                if devices:
                    self._begin(found, devices)
        if not self._nodes:
            self._give_up(self._last_loss or "the cluster has no suitable node; see `ray status` and devices_per_node=")
        if not any(node.is_ready for node in self._nodes.values()):
            since_s = min(node.begun_s for node in self._nodes.values())
            if time.monotonic() - since_s > _BEGIN_S:
                self._give_up(
                    f"none started within {_BEGIN_S:.0f} s; others may use its CPUs or GPUs, see `ray status`"
                )

    def _devices_of(self, found: Mapping[str, Any]) -> Devices:
        resources = found["Resources"]
        if isinstance(self._given, Mapping):
            keys = ("NodeID", "NodeManagerAddress", "NodeManagerHostname")
            return next((self._given[found[key]] for key in keys if found.get(key) in self._given), ())
        given: Devices = [f"cuda:{at}" for at in range(int(resources.get("GPU", 0)))] or ["cpu"]
        given = given if self._given is None else self._given
        num_cuda = sum(kind(one) != "cpu" for one in given)
        fits = num_cuda <= resources.get("GPU", 0) and resources.get("CPU", 0) > 0
        return given if fits else ()

    def _begin(self, found: Mapping[str, Any], devices: Devices) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        id_ = found["NodeID"]
        self._num_begun[id_] = self._num_begun.get(id_, 0) + 1
        lease = self._run_dir / "nodes" / f"{id_[:12]}-{time.time_ns()}.lease"
        lease.write_text(f"{found['NodeManagerAddress']}\n")
        actor = (
            self._ray.remote(NodeFleet)
            .options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(id_, soft=False),
                num_cpus=num_cpus(devices, found["Resources"]),
                num_gpus=sum(kind(one) != "cpu" for one in devices),
                max_concurrency=8,
            )
            .remote()
        )
        options = {**self._options, "devices": list(devices)}
        news = actor.begin.remote(lease, asks_stopper=self._stopper is not None, options=options)
        name = f"{found['NodeManagerAddress']}/{id_[:6]}"
        self._nodes[id_] = Node(id_, name, actor, lease, len(devices), news)

    def _listen(self) -> None:
        ray = self._ray
        futures = {node.news: node for node in self._nodes.values()}
        if not futures:
            time.sleep(_REPORT_S)  # a lost node may come back
            return
        first, _ = ray.wait(list(futures), num_returns=1, timeout=2 * _REPORT_S)
        ready, _ = ray.wait(list(futures), num_returns=len(futures), timeout=0) if first else ([], [])
        for future in ready:
            node = futures[future]
            try:
                said = ray.get(future)
            except ray.exceptions.RayTaskError as error:
                if not node.is_ready:
                    raise error.cause from None  # invalid settings
                self._lose(node, str(error.cause))
            except ray.exceptions.RayError as error:
                self._lose(node, type(error).__name__)
            else:
                verdicts: dict[tuple[str, int], bool | str] = {}
                if node.is_ready:
                    verdicts = self._hear(node, said)
                else:
                    node.is_ready, node.host_bytes = True, said
                node.news = node.actor.report.remote(verdicts, _REPORT_S)

    def _hear(self, node: Node, report: Report) -> dict[tuple[str, int], bool | str]:
        for row in report.rows:
            task = node.tasks.get(row.name)
            if task is not None:
                self._note(task, node, row, report.sizes.get(row.name))
        for name, step, metrics in report.metrics:
            self._log(self._tasks[name], step, metrics)
        for ending in report.endings:
            self._take_back(node, ending)
        node.devices = self._named(node, report.devices)
        return {
            (name, step): self._verdict(self._tasks[name], step, metrics) for name, step, metrics in report.questions
        }

    def _note(self, task: Task, node: Node, row: JobRow, size_bytes: int | None) -> None:
        is_begun = row.seconds_per_step > 0
        if is_begun and not task.begin_s:
            task.begin_s = time.monotonic() - task.sent_s
        task.size_bytes = size_bytes or task.size_bytes
        known = task.row
        task.row = replace(
            row,
            place=task.place,
            device=f"{node.name} {row.device}".strip(),
            step=row.step if is_begun else known.step,
            num_steps=row.num_steps or known.num_steps,
            seconds_per_step=row.seconds_per_step or known.seconds_per_step,
        )

    def _take_back(self, node: Node, ending: Ending) -> None:
        task = node.tasks.pop(ending.name)
        target = self._nodes.get(node.leaving.pop(ending.name, ""))
        task.node = None
        if ending.state is None:
            task.row = replace(task.row, state=JobState.PENDING.value)
            if target is not None:
                self._send(task, target)
            return
        result = JobResult(
            job=task.job,
            state=ending.state,
            losses=ending.losses,
            validations=ending.validations,
            error=ending.error,
            seconds_per_step=ending.seconds_per_step or task.row.seconds_per_step,
            checkpoint=ending.checkpoint,
        )
        self._finish(task, result)

    def _finish(self, task: Task, result: JobResult) -> None:
        task.result = result
        task.row = replace(task.row, state=result.state.value, error=result.error, updated_s=time.time())
        self._tell(lambda tracker: tracker.end(task.job, result.state))

    def _log(self, task: Task, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics, except those of steps that are repeated after a loss."""
        is_validation = any(key.startswith("validation/") for key in metrics)
        if step > task.logged.get(is_validation, -1):
            task.logged[is_validation] = step
            self._tell(lambda tracker: tracker.log(task.job, step, metrics))

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        """Call all trackers. One that raises is not called again, as in a local fleet."""
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                text = (
                    f"{type(tracker).__name__} raised {type(error).__name__}: {error}, and receives no further updates."
                )
                warnings.warn(f"{text} Training goes on.", TrackerWarning, stacklevel=4)

    def _catch_up(self, task: Task) -> None:
        """Log what a lost node recorded and did not report, since steps up to the checkpoint are not repeated."""
        file = self._folder(task.job) / "metrics.jsonl"
        for line in file.read_text().splitlines() if file.is_file() else ():
            with suppress(ValueError):  # a line that was not finished
                metrics = json.loads(line)
                step = int(metrics.pop("step"))
                del metrics["time_s"]
                self._log(task, step, metrics)

    def _verdict(self, task: Task, step: int, metrics: Mapping[str, float]) -> bool | str:
        """Return the stopper's verdict, asking once per validation even if a loss makes it come again."""
        assert self._stopper is not None
        if step not in task.verdicts:
            try:
                task.verdicts[step] = bool(self._stopper(task.job, step, metrics))
            except Exception as error:
                task.verdicts[step] = f"{type(error).__name__}: {error}"
        return task.verdicts[step]

    def _lose(self, node: Node, reason: str) -> None:
        self._end(node)
        self._looked_s = time.monotonic() - _LOOK_S + _GRACE_S  # only the actor may have died, and can be started anew
        self._last_loss = f"the last node, {node.name}, was lost: {reason}"
        for task in node.tasks.values():
            task.node, task.free_from_s = None, time.monotonic() + _GRACE_S
            task.num_losses = 1 if task.row.step > task.lost_at_step else task.num_losses + 1
            task.lost_at_step = task.row.step
            if task.row.state in (JobState.RUNNING.value, JobState.WAITING.value):
                task.row = replace(task.row, state=JobState.PENDING.value)
            if task.num_losses >= _MOST_LOSSES:
                error = f"{task.num_losses} nodes were lost while they trained it, at step {task.row.step}: {reason}"
                stored = stored_result(
                    task.job, self._folder(task.job), JobState.FAILED, error, task.row.seconds_per_step
                )
                self._finish(task, stored)
        if not node.is_ready:
            return
        names = ", ".join(repr(name) for name, task in node.tasks.items() if task.result is None) or "none"
        warnings.warn(
            f"node {node.name} was lost ({reason}); jobs that continue elsewhere from their last checkpoints: {names}",
            NodeLostWarning,
            stacklevel=2,
        )

    def _end_nodes(self) -> None:
        """End all nodes after their current mini-batches, with checkpoints of unfinished jobs."""
        ray = self._ray
        ending = {node.actor.finish.remote(): node for node in self._nodes.values() if node.is_ready}
        done, _ = ray.wait(list(ending), num_returns=len(ending), timeout=_CLOSE_S) if ending else ([], [])
        for future in done:
            with suppress(ray.exceptions.RayError):
                ending[future].devices = self._named(ending[future], ray.get(future))
        for node in list(self._nodes.values()):
            self._end(node)

    def _end(self, node: Node) -> None:
        del self._nodes[node.id]
        self._past.extend(node.devices)
        node.lease.unlink(missing_ok=True)
        with suppress(Exception):  # it is dead already
            self._ray.kill(node.actor)

    def _give_up(self, reason: str) -> None:
        num_over = sum(task.result is not None for task in self._tasks.values())
        raise NodeLostError(
            f"no live node can run these jobs: {reason}. {num_over} of {len(self._tasks)} jobs are over; their "
            f"checkpoints are in {self._run_dir}. Continue when there are nodes: run_on_ray(..., resume=True)"
        )

    @staticmethod
    def _named(node: Node, devices: Iterable[DeviceStatistics]) -> tuple[DeviceStatistics, ...]:
        return tuple(replace(one, name=f"{node.name} {one.name}") for one in devices)

    # Commands of the user

    def _obey(self) -> None:
        """Do what other processes ask for through the state."""
        for command in self._state.commands():
            task = self._tasks.get(command.job)
            if command.verb not in ("pause", "resume", "stop"):
                answer = f"a fleet on Ray supports pause, resume and stop, not {command.verb}"
            elif task is None or task.result is not None:
                answer = f"no job {command.job!r} is running"
            elif task.node is None:
                answer = self._obey_alone(task, command.verb)
            else:
                try:
                    asked = task.node.actor.ask.remote(command.verb, command.job)
                    answer = str(self._ray.get(asked, timeout=_CLOSE_S))
                except self._ray.exceptions.RayError as error:
                    answer = f"its node does not answer: {type(error).__name__}"
            self._state.answer(command.id, answer)

    def _obey_alone(self, task: Task, verb: str) -> str:
        if verb == "stop":
            folder = self._folder(task.job)
            self._finish(task, stored_result(task.job, folder, JobState.STOPPED, None, task.row.seconds_per_step))
        else:
            state = JobState.PAUSED if verb == "pause" else JobState.PENDING
            task.row = replace(task.row, state=state.value)
        return ""

    def _write(self) -> None:
        self._state.say_alive()
        self._state.write([task.row for task in self._tasks.values()])

    def _show(self) -> None:
        self._said_s = time.monotonic()
        rows = [task.row for task in self._tasks.values()]
        counts = {state.value: sum(row.state == state.value for row in rows) for state in JobState}
        said = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        steps = sum(row.step for row in rows)
        Console(stderr=True).print(f"fleet on {len(self._nodes)} nodes: {said}; {steps} steps", highlight=False)
