"""`penstock fleet run` trains a sweep; `ps`, `pause`, `resume`, `stop` and `clone` work on one in another process."""

import json
import re
import signal
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.cli._answer import Answer, ExitCode
from penstock.cli._command import Interrupted
from penstock.cli._document import value_of
from penstock.cli._fault import Misuse
from penstock.cli._paths import check_folder, check_spill
from penstock.cli._progress import Steps
from penstock.cli._sweep import FleetSettings, Parameters, SweepFile, read_sweep
from penstock.cli._sweep_jobs import JobMaker, make_jobs, maker_of
from penstock.cli._tables import print_table
from penstock.errors import PenstockError, PenstockWarning
from penstock.fleet import Fleet, FleetState, Job, JobRow, JobSource, JobState, Results, jobs_table
from penstock.report import REPORT_FILE, draw_fleet, save

ANSWER_S = 60.0
_POLL_S = 1.0
_MOST_NAMES = 4
_OUR_CLASS = re.compile(r"^penstock\.errors\.\w+: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The outcome of a sweep."""

    results: Results = field(repr=False)
    """Results of all jobs, and statistics of all devices."""
    parameters: Mapping[str, Parameters] = field(repr=False)
    """Parameters of each job, without clones added during the run."""
    run_dir: str | None
    """The folder of the run; ``None`` if it was temporary and is gone."""

    @property
    def has_failed(self) -> bool:
        """Whether a job failed."""
        return any(result.state is JobState.FAILED for result in self.results.values())


def run(sweep: Path, given: Mapping[str, str | list[str] | None], resume: bool, steps: Steps) -> Answer:
    """Run `penstock fleet run`: read a sweep and train it; if it is interrupted, say how to continue."""
    kept = given.get("run_dir")
    try:
        file = read_sweep(sweep)
        settings = file.sweep.fleet.overridden(**given)
        kept = settings.run_dir
        _check_paths(settings, sweep, given)
        with terminated_as_interrupted():
            trained = train(file, settings, resume=resume, progress="auto" if steps.is_wanted else None)
    except KeyboardInterrupt:
        how = "; the same command with --resume goes on from the checkpoints"
        raise Interrupted(f"penstock fleet run: interrupted{how if kept else ', and nothing was kept'}.") from None
    return Answer(
        data=trained_as_data(trained),
        show=lambda console: show_trained(trained, console),
        exit_code=ExitCode.FAILED if trained.has_failed else ExitCode.GOOD,
    )


def _check_paths(settings: FleetSettings, sweep: Path, given: Mapping[str, object]) -> None:
    """Check, before anything is built, that the folder for checkpoints and the directories to offload to are usable."""
    run_dir, disk = (
        f"--{name.replace('_', '-')}" if given.get(name) else f"{sweep}, fleet.{name}" for name in ("run_dir", "disk")
    )
    if settings.run_dir is not None:
        check_folder(run_dir, Path(settings.run_dir))
    for directory in settings.disk or ():
        check_spill(disk, Path(directory))


def train(file: SweepFile, settings: FleetSettings, *, resume: bool = False, progress: str | None = "auto") -> Trained:
    """Make the jobs of a sweep and train them. ``resume`` continues those in the run's folder, including clones.

    Raises ``ValueError`` or `Misuse` for a sweep that cannot work, and the errors of `Fleet`.
    """
    if resume and settings.run_dir is None:
        raise Misuse("--resume goes on with the fleet of a folder; say which: --run-dir runs/1")
    state = None if settings.run_dir is None else FleetState(Path(settings.run_dir))
    if state is not None and state.exists and not resume:
        raise ValueError(
            f"{settings.run_dir} holds a fleet already; --resume goes on with it, another --run-dir begins anew"
        )
    maker = maker_of(file)
    jobs = make_jobs(file, maker)
    if state is not None and state.exists:
        jobs += _others(state, jobs, maker)
    with tempfile.TemporaryDirectory(prefix="penstock-fleet-") as temporary:
        options = {**settings.options(), "run_dir": settings.run_dir or f"{temporary}/run"}
        with Fleet(**options, resume=resume, progress=progress) as fleet:
            if settings.run_dir is not None:
                (Path(settings.run_dir) / REPORT_FILE).unlink(missing_ok=True)  # outdated once the run continues
            for job, source in jobs:
                fleet.add(job, source)
            results = fleet.wait()
    if settings.run_dir is not None:
        save(settings.run_dir, results)
    points = {job.name: dict(source.parameters) for job, source in jobs}
    return Trained(results=results, parameters=points, run_dir=settings.run_dir)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Treat ``SIGTERM``, which batch systems send, as Ctrl-C: a fleet ends with checkpoints. For the main thread."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def show_trained(trained: Trained, console: Console) -> None:
    """Print the table, and below it why jobs failed, once for all jobs with the same error."""
    table = trained.results.table()
    table.columns = [column for column in table.columns if column.header != "error"]
    print_table(table, console)
    _show_errors({job.name: job.error for job in trained.results.values() if job.error}, console)
    if trained.run_dir is None:
        console.print("Checkpoints went with a temporary folder; --run-dir runs/1 keeps them.", highlight=False)
    else:
        console.print(f"Checkpoints and metrics are in {trained.run_dir}.", highlight=False, markup=False)


def _show_errors(error_of: Mapping[str, str], console: Console) -> None:
    """Print why jobs failed, over the whole width, once for all jobs with the same error."""
    alike: dict[str, list[str]] = {}
    for name, error in error_of.items():
        alike.setdefault(error, []).append(name)
    for error, names in alike.items():
        who = names[0] if len(names) == 1 else f"{len(names)} jobs ({_shortened(names)})"
        why = _OUR_CLASS.sub("", error).removeprefix(f"job {names[0]!r}: ")
        console.print(f"{who}: {why}", highlight=False, markup=False, soft_wrap=True)


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")


def trained_as_data(trained: Trained) -> dict[str, object]:
    """Return the table for JSON."""
    jobs = [
        {
            "name": result.name,
            "state": result.state.value,
            "num_steps": len(result.losses),
            "loss": result.losses[-1] if result.losses else None,
            "validation": dict(result.validations[-1]) if result.validations else {},
            "seconds_per_step": result.seconds_per_step,
            "error": result.error,
            "parameters": trained.parameters.get(result.name),
            "checkpoint": None if result.checkpoint is None or trained.run_dir is None else str(result.checkpoint),
        }
        for result in trained.results.values()
    ]
    devices = [{**asdict(device), "useful_share": device.useful_share} for device in trained.results.devices]
    return {"run_dir": trained.run_dir, "jobs": jobs, "devices": devices}


def jobs_of(run_dir: Path) -> Answer:
    """Answer `penstock fleet ps`. Raises ``PenstockError`` if no fleet ever ran in ``run_dir``."""
    state = _state(run_dir)
    is_running, rows = state.is_alive, state.jobs()
    return Answer(
        data={"is_running": is_running, "jobs": [asdict(row) for row in rows]},
        show=lambda console: _show_jobs(is_running, rows, console),
    )


def draw(run_dir: Path, folder: Path | None, last_s: float, steps: Steps) -> Answer:
    """Run `penstock fleet draw`."""
    steps.phase(f"drawing {run_dir}")
    files = draw_fleet(run_dir, folder, last_s=last_s)

    def show(console: Console) -> None:
        for file in files:
            console.print(f"wrote {file}", highlight=False, markup=False, soft_wrap=True)

    return Answer(data={"files": [str(file) for file in files]}, show=show)


def ask(
    run_dir: Path, verb: str, job: str, arguments: Mapping[str, Any] | None = None, timeout_s: float = ANSWER_S
) -> None:
    """Send a request to the process that runs the fleet. Raises ``PenstockError`` if it refuses or does not answer."""
    state = _state(run_dir)
    if not state.is_alive:
        raise PenstockError(_nobody(run_dir))
    number, waited_s = state.ask(verb, job, arguments), 0.0
    why = "interrupted"
    try:
        while waited_s < timeout_s and state.is_alive:
            answer = state.answer_to(number, min(_POLL_S, timeout_s))
            if answer == "":
                return
            if answer is not None:
                raise PenstockError(answer)
            waited_s += _POLL_S
        why = f"no answer after {timeout_s:.0f} s" if state.is_alive else "the fleet ended before it could answer"
    finally:
        if state.answer_to(number, 0.0) is None:
            state.answer(number, why)  # withdraw the request, so that a resumed fleet does not carry it out
    raise PenstockError(f"{verb} {job!r}: {why}")


def changes_of(pairs: list[str]) -> Parameters:
    """Return ``["lr=1e-3"]`` as ``{"lr": 0.001}``. Raises `Misuse` for a text that is not a pair."""
    changes: Parameters = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise Misuse(f"--set {pair}: give a parameter and its value, as in --set lr=1e-3")
        changes[name] = value_of(text)
    return changes


def _show_jobs(is_running: bool, rows: list[JobRow], console: Console) -> None:
    print_table(jobs_table([replace(row, error=None) for row in rows]), console)
    _show_errors({row.name: row.error for row in rows if row.error}, console)
    said = "A process runs this fleet." if is_running else "No process runs this fleet now."
    console.print(said, highlight=False)


def _others(state: FleetState, jobs: list[tuple[Job, JobSource]], maker: JobMaker) -> list[tuple[Job, JobSource]]:
    """Return the jobs of the folder that are not in the sweep: clones.

    Raises ``ValueError`` for a job that the sweep has with other parameters.
    """
    ours = {job.name: source for job, source in jobs}
    others = []
    for row in state.jobs():
        known = row.source["parameters"] if row.source is not None else {}
        if row.name in ours:
            parameters = json.loads(json.dumps(dict(ours[row.name].parameters)))
            if row.source is not None and parameters != known:
                raise ValueError(
                    f"job {row.name!r} was begun with {known} and is now to have {parameters}; undo that, or give "
                    "another --run-dir"
                )
        elif row.source is not None and row.source["path"] == maker.path:
            others.append((maker(**known).with_changes(name=row.name), maker.source(known)))
        else:
            warnings.warn(f"job {row.name!r} was not made by {maker.path} and is left as it is", PenstockWarning, 2)
    return others


def _state(run_dir: Path) -> FleetState:
    if run_dir.is_file():
        raise PenstockError(f"RUN_DIR must be the folder of a fleet, got the file {run_dir}")
    state = FleetState(run_dir)
    if not state.exists:
        raise PenstockError(
            f"no fleet was ever run in {run_dir}; `penstock fleet run sweep.yaml --run-dir {run_dir}` runs one"
        )
    return state


def _nobody(run_dir: Path) -> str:
    return (
        f"no process runs the fleet in {run_dir}; `penstock fleet run SWEEP.yaml --run-dir {run_dir} --resume` goes on "
        "with it"
    )
