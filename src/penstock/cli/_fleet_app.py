"""The commands of `penstock fleet`; their work is in `_fleet` and `_simulate`."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli._answer import Answer
from penstock.cli._choices import Scheduler, job_names
from penstock.cli._command import command
from penstock.cli._document import say_renamed
from penstock.cli._paths import FOLDER, INPUT, OUTPUT
from penstock.cli._progress import Steps

fleet_app = typer.Typer(no_args_is_help=True, help="Train many models on few devices, and inspect and control them.")

_Sweep = Annotated[
    Path,
    typer.Argument(
        metavar="SWEEP", help="YAML or JSON file: the function that makes jobs, their parameters, the fleet."
    ),
    INPUT,
]
_RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of the fleet: its --run-dir.")]
_Job = Annotated[
    str,
    typer.Argument(metavar="JOB", help="Name of the job, as shown by `penstock fleet ps`.", autocompletion=job_names),
]


@command(fleet_app, trains=True)
def run(
    steps: Steps,
    sweep: _Sweep,
    devices: Annotated[str | None, typer.Option(help="Devices to train on, such as cuda:0,cuda:1 or cpu,cpu.")] = None,
    budget: Annotated[str | None, typer.Option(help="Limit on peak memory per device, such as 40GiB.")] = None,
    host: Annotated[str | None, typer.Option(help="Limit on host memory for what is not on a device.")] = None,
    disk: Annotated[
        list[str] | None, typer.Option(help="Directory on an SSD for what is not on a device. Repeatable.")
    ] = None,
    run_dir: Annotated[str | None, typer.Option(help="Folder for checkpoints, metrics and state.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the fleet in the run's folder.")] = False,
    host_budget: Annotated[str | None, typer.Option(hidden=True, help="The earlier name of --host.")] = None,
) -> Answer:
    """Train the jobs of a sweep. Command-line options override the file. Exit code 1 if a job failed.

    Ctrl-C and SIGTERM write checkpoints and end the run with exit code 130; --resume continues from the checkpoints.

    Example: penstock fleet run sweep.yaml --devices cpu,cpu --budget 2GiB --run-dir runs/1
    """
    from penstock.cli import _fleet

    if host_budget is not None:
        say_renamed("--host-budget", "--host")
        host = host_budget if host is None else host
    names = None if devices is None else [name.strip() for name in devices.split(",")]
    options = {
        "devices": names, "budget": budget, "host": host, "disk": disk or None, "run_dir": run_dir,
    }  # fmt: skip
    return _fleet.run(sweep, options, resume, steps)


@command(fleet_app)
def simulate(
    steps: Steps,
    problem: Annotated[
        Path,
        typer.Argument(
            metavar="PROBLEM", help="YAML or JSON file with devices, and jobs with the costs of their shards."
        ),
        INPUT,
    ],
    scheduler: Annotated[Scheduler, typer.Option(help="Scheduler for the picture of --gantt.")] = Scheduler.FAIR,
    gantt: Annotated[
        Path | None,
        typer.Option(help="File for a picture of which job is on which device when.", show_default=False),
        OUTPUT,
    ] = None,
) -> Answer:
    """Simulate how long jobs of known costs take under every scheduler, on devices that need not exist.

    A minimal file: {jobs: [{name: gpt, copies: 6, num_steps: 50, shards: [{copies: 8, forward_s: 0.1,
    backward_s: 0.2, parameter_bytes: 400MB}]}], devices: [{name: cuda, copies: 2, in_bandwidth_bytes_per_s: 25GB/s}]}.

    Example: penstock fleet simulate problem.yaml --gantt gantt.png
    """
    from penstock.cli import _simulate

    return _simulate.answer(problem, scheduler.value, gantt, steps)


@command(fleet_app)
def ps(steps: Steps, run_dir: _RunDir) -> Answer:  # noqa: ARG001
    """List the jobs of a fleet, whether or not a process is running it now.

    Example: penstock fleet ps runs/1
    """
    from penstock.cli import _fleet

    return _fleet.jobs_of(run_dir)


@command(fleet_app)
def draw(
    steps: Steps,
    run_dir: _RunDir,
    folder: Annotated[
        Path | None,
        typer.Option("--to", help="Folder to write to; by default the run's folder.", show_default=False),
        FOLDER,
    ] = None,
    last_s: Annotated[
        float, typer.Option("--last", help="Seconds that the picture of units covers, up to the end.")
    ] = 60.0,
) -> Answer:
    """Draw the losses and which job was on which device, and write a trace for ui.perfetto.dev.

    Example: penstock fleet draw runs/1
    """
    from penstock.cli import _fleet

    return _fleet.draw(run_dir, folder, last_s, steps)


@command(fleet_app)
def pause(steps: Steps, run_dir: _RunDir, job: _Job) -> Answer:
    """Pause a job after its current mini-batch. Continue it with `penstock fleet resume`.

    Example: penstock fleet pause runs/1 "gpt lr=0.001,batch=4"
    """
    return _ask(run_dir, "pause", job, f"{job} pauses after its current mini-batch.", steps)


@command(fleet_app)
def resume(steps: Steps, run_dir: _RunDir, job: _Job) -> Answer:
    """Continue a paused job.

    Example: penstock fleet resume runs/1 "gpt lr=0.001,batch=4"
    """
    return _ask(run_dir, "resume", job, f"{job} continues.", steps)


@command(fleet_app)
def stop(steps: Steps, run_dir: _RunDir, job: _Job) -> Answer:
    """Stop a job after its current mini-batch and write a checkpoint.

    Example: penstock fleet stop runs/1 "gpt lr=0.01,batch=4"
    """
    return _ask(run_dir, "stop", job, f"{job} stops after its current mini-batch, with a checkpoint.", steps)


@command(fleet_app)
def clone(
    steps: Steps,
    run_dir: _RunDir,
    job: _Job,
    new_name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new job.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a parameter, such as lr=1e-3. Repeatable.")
    ] = None,
    warm: Annotated[
        bool, typer.Option("--warm", help="Start from the model parameters in the job's checkpoint.")
    ] = False,
) -> Answer:
    """Add a copy of a job. Change its parameters with --set.

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
