"""The commands and their options; each does its work in a file of its own, which loads when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from penstock._version import __version__
from penstock.cli._answer import Answer
from penstock.cli._bench_names import benchmark_names
from penstock.cli._choices import Device, MachineName, PlanMethod
from penstock.cli._command import DEBUG, command, size
from penstock.cli._fleet_app import fleet_app
from penstock.cli._paths import FOLDER, OUTPUT, PROBED, SPILLS
from penstock.cli._progress import Steps

_EXIT_CODES = (
    "Exit codes: 0 good; 1 the run failed, or one of its jobs; 2 misuse; 3 a budget that cannot be met; 130 "
    "interrupted. Every command takes --json, which prints one JSON document on standard output and nothing else."
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Train what does not fit.",
    epilog=_EXIT_CODES,
)
app.add_typer(fleet_app, name="fleet")

_Host = Annotated[
    int | None, typer.Option(parser=size, metavar="SIZE", help="Host memory to spill to (CUDA), such as 8GiB.")
]
_Machine = Annotated[
    MachineName | None,
    typer.Option(help="Take the times of this machine's data sheet instead of measuring.", show_default=False),
]
_Disk = Annotated[Path | None, typer.Option(help="Directory on an SSD to spill to.", show_default=False), SPILLS]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001  # its callback does the work
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train what does not fit: models, many models, and graph models beyond the memory of the device."""
    ctx.meta[DEBUG] = debug


@command(app)
def probe(
    steps: Steps,
    disk: Annotated[
        Path, typer.Option(help="Directory in which to spill; 256 MiB are used for a moment."), PROBED
    ] = Path("."),
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure anew, not use results of the last week.")] = False,
) -> Answer:
    """Show devices, tiers, capacities, bandwidths, and what is supported here or why not.

    Example: penstock probe --disk /tmp --json
    """
    from penstock.cli import _probe

    return _probe.probe(disk, refresh, steps)


@command(app, trains=True)
def demo(
    steps: Steps,
    out: Annotated[Path, typer.Option(help="Folder for the results."), FOLDER] = Path("penstock-demo"),
    disk: Annotated[
        Path | None, typer.Option(help="Directory in which to spill; by default the results folder."), SPILLS
    ] = None,
    num_steps: Annotated[int, typer.Option("--steps", min=3, help="Training steps to compare.")] = 6,
) -> Answer:
    """Train a transformer under a hard memory cap that kills the same script without Penstock.

    Example: penstock demo --disk /tmp
    """
    from penstock.cli import _demo

    return _demo.run(out, out if disk is None else disk, num_steps, steps)


@command(app, trains=True)
def plan(
    steps: Steps,
    target: Annotated[
        str, typer.Argument(help="FACTORY() returns (step, inputs[, optimizer]).", metavar="FILE.py:FACTORY")
    ],
    budget: Annotated[
        list[int] | None,
        typer.Option(parser=size, metavar="SIZE", help="Also this budget, such as 6GiB; may be repeated."),
    ] = None,
    disk: _Disk = None,
    host: _Host = None,
    method: Annotated[PlanMethod, typer.Option(help="What plans may use.")] = PlanMethod.HYBRID,
    machine: _Machine = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the problem and pictures.", show_default=False), FOLDER
    ] = None,
) -> Answer:
    """Show what byte budgets cost a training step, before it is trained. Exit code 3 if a given budget is refused.

    A factory with a parameter `batch` is also asked for the largest batch that each given budget takes. MODULE:FACTORY
    works too.

    With --machine nothing is measured, and operators take no workspaces.

    Example: penstock plan train.py:make_step --budget 6GiB --disk /tmp --out plans
    """
    from penstock.cli import _plan
    from penstock.machines import machine_named

    described = None if machine is None else machine_named(machine.value)
    options = {"disk": disk, "host": host, "method": method.value, "machine": described}
    return _plan.answer(target, budget or [], options, out, steps)


@command(app, trains=True)
def advise(
    steps: Steps,
    target: Annotated[
        str,
        typer.Argument(
            help="FACTORY() returns (model, batch), or a mapping that may have loss and optimizer too.",
            metavar="FILE.py:FACTORY",
        ),
    ],
    budget: Annotated[
        int | None,
        typer.Option(parser=size, metavar="SIZE", help="Bytes of the device at the true peak, such as 6GiB."),
    ] = None,
    host: _Host = None,
    disk: _Disk = None,
    machine: _Machine = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often every option is timed.")] = 5,
) -> Answer:
    """Say which room, or which mix, fits a model into a budget best, with the code to paste. Exit code 3 if none does.

    A batch is what the model is called with: a tensor, a tuple, or a mapping of keywords. `loss` takes (model, batch)
    and returns a scalar; without it the model returns its own. MODULE:FACTORY works too.

    With --machine nothing is measured: the times are those of its data sheet, and --budget may be left out for all of
    its memory.

    Example: penstock advise train.py:make --budget 6GiB --disk /tmp
    """
    from penstock.cli import _advise

    if machine is not None:
        from penstock.machines import machine_named

        return _advise.on_machine(target, budget, host, disk, machine_named(machine.value), steps)
    if budget is None:
        raise typer.BadParameter("needed without --machine: --budget 6GiB", param_hint="--budget")
    return _advise.answer(target, budget, host, disk, rounds, steps)


@command(app, trains=True)
def bench(
    steps: Steps,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Benchmarks; by default `step`.", autocompletion=benchmark_names),
    ] = None,
    is_list: Annotated[bool, typer.Option("--list", help="Show the benchmarks there are.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, few rounds: shows that it runs.")] = False,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.CPU,
    disk: Annotated[Path, typer.Option(help="Directory in which to spill."), SPILLS] = Path("."),
    out: Annotated[
        Path | None, typer.Option(help="Folder for one JSON file per benchmark.", show_default=False), FOLDER
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Of the GPT of `step`.")] = None,
    width: Annotated[int | None, typer.Option(min=8, help="Of the GPT of `step`: a multiple of its 8 heads.")] = None,
    length: Annotated[int | None, typer.Option(min=8, help="Tokens of a sample of `step`.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of a batch of `step`.")] = None,
    rounds: Annotated[int | None, typer.Option(min=2, help="Rounds of `step`.")] = None,
) -> Answer:
    """Measure plain, checkpointed, offloaded and planned training on this machine, in turn.

    `step` comes with the package. The others, one per claim, lie in the source tree, and run where it is.

    Example: penstock bench --quick --disk /tmp
    """
    from penstock.cli import _bench

    given = {"num_layers": layers, "width": width, "length": length, "batch": batch, "rounds": rounds}
    sizes = {key: value for key, value in given.items() if value is not None}
    if is_list:
        return _bench.listed()
    return _bench.answer(names or ["step"], quick, device.value, disk, out, sizes, steps)


@command(app)
def report(
    steps: Steps,
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Runs: of a fleet, a demo, plans, or what report.save left."),
    ],
    out: Annotated[Path, typer.Option(help="The page to write."), OUTPUT] = Path("run.html"),
    title: Annotated[str | None, typer.Option(help="Its title.", show_default=False)] = None,
    rated: Annotated[
        int | None,
        typer.Option(parser=size, metavar="SIZE", help="Writes that your SSD is rated to stand (TBW), such as 600TB."),
    ] = None,
) -> Answer:
    """Write one HTML page of what happened in runs: one file, which needs no network.

    Example: penstock report runs/1 --out run.html
    """
    from penstock.cli import _report

    return _report.answer(folders, out, title, rated, steps)
