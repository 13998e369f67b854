"""The commands of `penstock fleet`; what they do is in `_fleet` and `_simulate`."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli._answer import Answer
from penstock.cli._choices import Scheduler, job_names
from penstock.cli._command import command
from penstock.cli._paths import FOLDER, INPUT, OUTPUT
from penstock.cli._progress import Steps

fleet_app = typer.Typer(no_args_is_help=True, help="Train many models on few devices, and see and steer them.")

_Sweep = Annotated[
    Path, typer.Argument(help="YAML or JSON: the function that makes jobs, their parameters, the fleet."), INPUT
]
_RunDir = Annotated[Path, typer.Argument(help="The fleet's --run-dir.")]
_Job = Annotated[
    str, typer.Argument(help="Name of the job, as `penstock fleet ps` shows it.", autocompletion=job_names)
]


@command(fleet_app, trains=True)
def run(
    steps: Steps,
    sweep: _Sweep,
    devices: Annotated[str | None, typer.Option(help="Such as cuda:0,cuda:1 or cpu,cpu.")] = None,
    budget: Annotated[str | None, typer.Option(help="Bytes of true peak per device, such as 40GiB.")] = None,
    host_budget: Annotated[str | None, typer.Option(help="Main memory for what is not on a device.")] = None,
    disk: Annotated[list[str] | None, typer.Option(help="Directory on an SSD for the same; may be repeated.")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Folder of checkpoints, metrics and state.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the fleet in the run's folder.")] = False,
) -> Answer:
    """Train the jobs of a sweep. Options here come before those in its file; exit code 1 if a job failed.

    Ctrl-C and SIGTERM end it with checkpoints, from which --resume goes on; exit code 130.

    Example: penstock fleet run sweep.yaml --devices cpu,cpu --budget 2GiB --run-dir runs/1
    """
    from penstock.cli import _fleet

    names = None if devices is None else [one.strip() for one in devices.split(",")]
    given = {
        "devices": names, "budget": budget, "host_budget": host_budget, "disk": disk or None, "run_dir": run_dir,
    }  # fmt: skip
    return _fleet.run(sweep, given, resume, steps)


@command(fleet_app)
def simulate(
    steps: Steps,
    problem: Annotated[
        Path, typer.Argument(help="YAML or JSON: jobs with the costs of their shards, and devices."), INPUT
    ],
    scheduler: Annotated[Scheduler, typer.Option(help="The one that --gantt draws.")] = Scheduler.FAIR,
    gantt: Annotated[
        Path | None, typer.Option(help="Picture of which job is on which device when.", show_default=False), OUTPUT
    ] = None,
) -> Answer:
    """Show how long jobs of known costs take on devices that need not exist, under every scheduler.

    A file needs no more than {jobs: [{name: gpt, copies: 6, num_steps: 50, shards: [{copies: 8, forward_s: 0.1,
    backward_s: 0.2, parameter_bytes: 400MB}]}], devices: [{name: cuda, copies: 2, in_bandwidth_bytes_per_s: 25GB/s}]}.

    Example: penstock fleet simulate problem.yaml --gantt gantt.png
    """
    from penstock.cli import _simulate

    return _simulate.answer(problem, scheduler.value, gantt, steps)


@command(fleet_app)
def ps(steps: Steps, run_dir: _RunDir) -> Answer:  # noqa: ARG001
    """Show the jobs of a fleet, whether or not a process runs it now.

    Example: penstock fleet ps runs/1
    """
    from penstock.cli import _fleet

    return _fleet.jobs_of(run_dir)


@command(fleet_app)
def draw(
    steps: Steps,
    run_dir: _RunDir,
    folder: Annotated[
        Path | None, typer.Option("--to", help="Where to; by default the run's folder.", show_default=False), FOLDER
    ] = None,
    last_s: Annotated[float, typer.Option("--last", help="Seconds that the picture of units shows.")] = 60.0,
) -> Answer:
    """Draw which job was on which device and all losses, and write a trace for ui.perfetto.dev.

    Example: penstock fleet draw runs/1
    """
    from penstock.cli import _fleet

    return _fleet.draw(run_dir, folder, last_s, steps)


@command(fleet_app)
def pause(steps: Steps, run_dir: _RunDir, job: _Job) -> Answer:
    """Have a job leave its device after the mini-batch at hand, until it is resumed.

    Example: penstock fleet pause runs/1 "gpt lr=0.001,batch=4"
    """
    return _ask(run_dir, "pause", job, f"{job} pauses after the mini-batch at hand.", steps)


@command(fleet_app)
def resume(steps: Steps, run_dir: _RunDir, job: _Job) -> Answer:
    """Have a paused job go on.

    Example: penstock fleet resume runs/1 "gpt lr=0.001,batch=4"
    """
    return _ask(run_dir, "resume", job, f"{job} goes on.", steps)


@command(fleet_app)
def stop(steps: Steps, run_dir: _RunDir, job: _Job) -> Answer:
    """End a job after the mini-batch at hand, with a checkpoint.

    Example: penstock fleet stop runs/1 "gpt lr=0.01,batch=4"
    """
    return _ask(run_dir, "stop", job, f"{job} stops after the mini-batch at hand, with a checkpoint.", steps)


@command(fleet_app)
def clone(
    steps: Steps,
    run_dir: _RunDir,
    job: _Job,
    new_name: Annotated[str, typer.Argument(help="Name of the new job.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="A parameter of its own, as lr=1e-3; may be repeated.")
    ] = None,
    warm: Annotated[bool, typer.Option("--warm", help="Begin with the parameters of the job's checkpoint.")] = False,
) -> Answer:
    """Add a job like another, with other parameters.

    Example: penstock fleet clone runs/1 "gpt lr=0.001,batch=4" faster --set lr=3e-3 --warm
    """
    from penstock.cli import _fleet

    arguments = {"name": new_name, "warm": warm, "changes": _fleet.changes_of(changes or [])}
    return _ask(run_dir, "clone", job, f"{new_name} was added.", steps, arguments)


def _ask(
    run_dir: Path, verb: str, job: str, said: str, steps: Steps, arguments: dict[str, object] | None = None
) -> Answer:
    from penstock.cli import _fleet

    steps.phase(f"waiting for the fleet in {run_dir}")
    _fleet.ask(run_dir, verb, job, arguments)
    data = {"run_dir": str(run_dir), "verb": verb, "job": job, **(arguments or {})}
    return Answer(data=data, show=lambda console: console.print(said, highlight=False, markup=False, soft_wrap=True))
