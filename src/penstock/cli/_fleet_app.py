"""The commands of `penstock fleet`; what they do is in `_fleet` and `_simulate`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.cli._fail import fail
from penstock.errors import PenstockError

fleet_app = typer.Typer(no_args_is_help=True, help="Train many models on few devices, and see and steer them.")

_Sweep = Annotated[
    Path, typer.Argument(help="YAML or JSON: the function that makes jobs, their parameters, the fleet.")
]
_RunDir = Annotated[Path, typer.Argument(help="The fleet's --run-dir.")]
_Job = Annotated[str, typer.Argument(help="Name of the job, as `penstock fleet ps` shows it.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_FAULTS = (PenstockError, OSError, ValueError, TypeError)


@fleet_app.command()
def run(
    sweep: _Sweep,
    devices: Annotated[str | None, typer.Option(help="Such as cuda:0,cuda:1 or cpu,cpu.")] = None,
    budget: Annotated[str | None, typer.Option(help="Bytes of true peak per device, such as 40GiB.")] = None,
    host_budget: Annotated[str | None, typer.Option(help="Main memory for what is not on a device.")] = None,
    disk: Annotated[list[str] | None, typer.Option(help="Directory on an SSD for the same; may be repeated.")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Folder of checkpoints, metrics and state.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the fleet in the run's folder.")] = False,
    as_json: _Json = False,
) -> None:
    """Train the jobs of a sweep. Options here come before those in its file; exit code 1 if a job failed.

    Ctrl-C and SIGTERM end it with checkpoints, from which --resume goes on; exit code 130.

    Example: penstock fleet run sweep.yaml --devices cuda:0,cuda:1 --budget 40GiB --disk /nvme --run-dir runs/1
    """
    from penstock.cli import _fleet
    from penstock.cli._sweep import read_sweep

    names = None if devices is None else [one.strip() for one in devices.split(",")]
    try:
        file = read_sweep(sweep)
        settings = file.sweep.fleet.overridden(
            devices=names, budget=budget, host_budget=host_budget, disk=disk or None, run_dir=run_dir
        )
        with _fleet.terminated_as_interrupted():
            trained = _fleet.train(file, settings, resume=resume)
    except KeyboardInterrupt:
        typer.echo("penstock: interrupted; the same command with --resume goes on from the checkpoints", err=True)
        raise typer.Exit(130) from None
    except _FAULTS as error:
        fail(error)
    if as_json:
        typer.echo(_fleet.trained_as_json(trained))
    else:
        _fleet.show_trained(trained, Console())
    if trained.has_failed:
        raise typer.Exit(1)


@fleet_app.command()
def simulate(
    problem: Annotated[Path, typer.Argument(help="YAML or JSON: jobs with the costs of their shards, and devices.")],
    scheduler: Annotated[str, typer.Option(help="The one that --gantt draws.")] = "sharded-lrtf",
    gantt: Annotated[Path | None, typer.Option(help="Picture of which job is on which device when.")] = None,
    as_json: _Json = False,
) -> None:
    """Show how long jobs of known costs take on devices that need not exist, under every scheduler.

    Example: penstock fleet simulate problem.yaml --gantt gantt.png. A file needs no more than
    {jobs: [{name: gpt, copies: 6, num_steps: 50, shards: [{copies: 8, forward_s: 0.1, backward_s: 0.2, parameter_bytes:
    400MB}]}], devices: [{name: cuda, copies: 2, in_bandwidth_bytes_per_s: 25GB/s}]}.
    """
    from penstock.cli import _simulate

    if scheduler not in _simulate.SCHEDULERS:
        fail(f"--scheduler: one of {', '.join(_simulate.SCHEDULERS)}, not {scheduler!r}")
    try:
        found = _simulate.compare(problem, None if gantt is None else scheduler)  # type: ignore[arg-type]
        if gantt is not None:
            found.draw(gantt, scheduler)  # type: ignore[arg-type]
    except _FAULTS as error:
        fail(error)
    if as_json:
        typer.echo(found.as_json())
    else:
        _simulate.show(found, Console())


@fleet_app.command()
def ps(run_dir: _RunDir, as_json: _Json = False) -> None:
    """Show the jobs of a fleet, whether or not a process runs it now.

    Example: penstock fleet ps runs/1
    """
    from penstock.cli import _fleet

    try:
        if as_json:
            typer.echo(_fleet.jobs_as_json(run_dir))
        else:
            _fleet.show_jobs(run_dir, Console())
    except _FAULTS as error:
        fail(error)


@fleet_app.command()
def draw(
    run_dir: _RunDir,
    folder: Annotated[Path | None, typer.Option("--to", help="Where to; by default the run's folder.")] = None,
    last_s: Annotated[float, typer.Option("--last", help="Seconds that the picture of units shows.")] = 60.0,
) -> None:
    """Draw which job was on which device and all losses, and write a trace for ui.perfetto.dev.

    Example: penstock fleet draw runs/1
    """
    from penstock.report import draw_fleet

    try:
        for file in draw_fleet(run_dir, folder, last_s=last_s):
            typer.echo(f"wrote {file}")
    except _FAULTS as error:
        fail(error)


@fleet_app.command()
def pause(run_dir: _RunDir, job: _Job) -> None:
    """Have a job leave its device after the mini-batch at hand, until it is resumed.

    Example: penstock fleet pause runs/1 "gpt lr=0.001,batch=4"
    """
    _ask(run_dir, "pause", job, f"{job} pauses after the mini-batch at hand.")


@fleet_app.command()
def resume(run_dir: _RunDir, job: _Job) -> None:
    """Have a paused job go on.

    Example: penstock fleet resume runs/1 "gpt lr=0.001,batch=4"
    """
    _ask(run_dir, "resume", job, f"{job} goes on.")


@fleet_app.command()
def stop(run_dir: _RunDir, job: _Job) -> None:
    """End a job after the mini-batch at hand, with a checkpoint.

    Example: penstock fleet stop runs/1 "gpt lr=0.01,batch=4"
    """
    _ask(run_dir, "stop", job, f"{job} stops after the mini-batch at hand, with a checkpoint.")


@fleet_app.command()
def clone(
    run_dir: _RunDir,
    job: _Job,
    new_name: Annotated[str, typer.Argument(help="Name of the new job.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="A parameter of its own, as lr=1e-3; may be repeated.")
    ] = None,
    warm: Annotated[bool, typer.Option("--warm", help="Begin with the parameters of the job's checkpoint.")] = False,
) -> None:
    """Add a job like another, with other parameters.

    Example: penstock fleet clone runs/1 "gpt lr=0.001,batch=4" faster --set lr=3e-3 --warm
    """
    from penstock.cli import _fleet

    try:
        arguments = {"name": new_name, "warm": warm, "changes": _fleet.changes_of(changes or [])}
    except ValueError as error:
        fail(error)
    _ask(run_dir, "clone", job, f"{new_name} was added.", arguments)


def _ask(run_dir: Path, verb: str, job: str, said: str, arguments: dict[str, object] | None = None) -> None:
    from penstock.cli import _fleet

    try:
        _fleet.ask(run_dir, verb, job, arguments)
    except _FAULTS as error:
        fail(error)
    typer.echo(said)
