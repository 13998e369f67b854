"""The commands and their options. Each command's work is in its own file, which is imported when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from penstock._version import __version__
from penstock.cli._answer import Answer
from penstock.cli._bench_names import benchmark_names
from penstock.cli._choices import DemoRoom, DeviceChoice, MachineName, PlanMethod
from penstock.cli._command import DEBUG, command, size
from penstock.cli._fleet_app import fleet_app
from penstock.cli._paths import FOLDER, OUTPUT, PROBED, SPILLS
from penstock.cli._progress import Steps

_EXIT_CODES = (
    "Exit codes: 0 success; 1 the run or one of its jobs failed; 2 misuse; 3 a budget cannot be met; 130 "
    "interrupted. With --json every command prints one JSON document to standard output and nothing else."
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Train what does not fit into device memory.",
    epilog=_EXIT_CODES,
)
app.add_typer(fleet_app, name="fleet")

_Host = Annotated[
    int | None, typer.Option(parser=size, metavar="SIZE", help="Host memory to offload to (CUDA), such as 8GiB.")
]
_Machine = Annotated[
    MachineName | None,
    typer.Option(help="Take times from this machine's data sheet instead of measuring.", show_default=False),
]
_Disk = Annotated[Path | None, typer.Option(help="Directory on an SSD to offload to.", show_default=False), SPILLS]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001  # its callback does the work
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train what does not fit into device memory: large models, many models, and graph models."""
    ctx.meta[DEBUG] = debug


@command(app)
def probe(
    steps: Steps,
    disk: Annotated[Path, typer.Option(help="Directory to offload to; 256 MiB in it are used briefly."), PROBED] = Path(
        "."
    ),
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Ignore results of the last week and measure again.")
    ] = False,
) -> Answer:
    """Show devices, tiers, capacities and bandwidths, and which features work here or why not.

    Example: penstock probe --disk /tmp --json
    """
    from penstock.cli import _probe

    return _probe.probe(disk, refresh, steps)


@command(app, trains=True)
def demo(
    steps: Steps,
    out: Annotated[Path, typer.Option(help="Folder for the results."), FOLDER] = Path("penstock-demo"),
    disk: Annotated[
        Path | None, typer.Option(help="Directory to offload to; by default the results folder."), SPILLS
    ] = None,
    num_steps: Annotated[int, typer.Option("--steps", min=3, help="Training steps of a transformer.")] = 6,
    room: Annotated[DemoRoom | None, typer.Option(help="Show this room instead of the tour of activations.")] = None,
) -> Answer:
    """Train within a hard memory cap under which the same script fails without Penstock.

    Example: penstock demo --disk /tmp
    """
    from penstock.cli import _demo, _demo_rooms

    if room is not None:
        return _demo_rooms.run(room, out, out if disk is None else disk, num_steps, steps)
    return _demo.run(out, out if disk is None else disk, num_steps, steps)


@command(app, trains=True)
def plan(
    steps: Steps,
    target: Annotated[
        str, typer.Argument(help="FACTORY() must return (step, inputs[, optimizer]).", metavar="FILE.py:FACTORY")
    ],
    budget: Annotated[
        list[int] | None,
        typer.Option(parser=size, metavar="SIZE", help="Plan for this budget too, such as 6GiB. Repeatable."),
    ] = None,
    disk: _Disk = None,
    host: _Host = None,
    method: Annotated[PlanMethod, typer.Option(help="Techniques that plans may use.")] = PlanMethod.HYBRID,
    machine: _Machine = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write the problem and pictures to.", show_default=False), FOLDER
    ] = None,
    training: Annotated[
        bool,
        typer.Option(
            "--training", help="Plan a model whose state exceeds the device. FACTORY() must return (model, batch)."
        ),
    ] = False,
    micro_batches: Annotated[int, typer.Option(min=1, help="With --training: micro-batches for each update.")] = 1,
    host_rate: Annotated[
        int | None,
        typer.Option(
            parser=size, metavar="SIZE", help="With --training: bytes a second of host memory, to update there too."
        ),
    ] = None,
) -> Answer:
    """Show what memory budgets cost a training step, before you train. Exit code 3 if a given budget cannot be met.

    If the factory has a parameter `batch`, the command also finds the largest batch for each given budget. You can also
    give MODULE:FACTORY.

    With --machine nothing is measured, and workspaces of operators are not counted.

    With --training, parameters, gradients and state leave the device too (penstock.offload.training). That needs a
    --machine.

    Example: penstock plan train.py:make_step --budget 6GiB --disk /tmp --out plans
    """
    from penstock.cli import _plan, _plan_training
    from penstock.machines import machine_named

    described = None if machine is None else machine_named(machine.value)
    if training:
        unused = {"--disk": disk, "--host": host, "--out": out}
        for name, value in unused.items():
            if value is not None:
                raise typer.BadParameter("not with --training, which plans for host memory", param_hint=name)
        if method is not PlanMethod.HYBRID:
            raise typer.BadParameter("not with --training, which recomputes nothing", param_hint="--method")
        if described is None:
            raise typer.BadParameter("needed with --training: --machine h200", param_hint="--machine")
        return _plan_training.answer(target, budget or [], described, micro_batches, host_rate, steps)
    if host_rate is not None or micro_batches > 1:
        raise typer.BadParameter("only with --training", param_hint="--host-rate, --micro-batches")
    options = {"disk": disk, "host": host, "method": method.value, "machine": described}
    return _plan.answer(target, budget or [], options, out, steps)


@command(app, trains=True)
def advise(
    steps: Steps,
    target: Annotated[
        str,
        typer.Argument(
            help="FACTORY() must return (model, batch), or a mapping, which may also hold loss and optimizer.",
            metavar="FILE.py:FACTORY",
        ),
    ],
    budget: Annotated[
        int | None,
        typer.Option(parser=size, metavar="SIZE", help="Limit on peak device memory, such as 6GiB."),
    ] = None,
    host: _Host = None,
    disk: _Disk = None,
    machine: _Machine = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of times to time each option.")] = 5,
) -> Answer:
    """Find the room or mix of rooms that fits a model into a budget best, with code to paste. Exit code 3 if none fits.

    The batch holds the arguments of the model: a tensor, a tuple, or a mapping of keywords. `loss` takes (model, batch)
    and returns a scalar; without it the model must return its own loss. You can also give MODULE:FACTORY.

    With --machine nothing is measured: times come from its data sheet. Leave out --budget to allow all of its memory.

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
        typer.Argument(
            metavar="[NAME]...", help="Benchmarks to run; by default `step`.", autocompletion=benchmark_names
        ),
    ] = None,
    is_list: Annotated[bool, typer.Option("--list", help="List the available benchmarks.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use small sizes and few rounds, to check that it runs.")
    ] = False,
    device: Annotated[DeviceChoice, typer.Option(help="Device to compute on.")] = DeviceChoice.CPU,
    disk: Annotated[Path, typer.Option(help="Directory to offload to."), SPILLS] = Path("."),
    out: Annotated[
        Path | None, typer.Option(help="Folder to write one JSON file per benchmark to.", show_default=False), FOLDER
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Number of GPT layers in `step`.")] = None,
    width: Annotated[int | None, typer.Option(min=8, help="Width of the GPT in `step` (multiple of 8).")] = None,
    length: Annotated[int | None, typer.Option(min=8, help="Tokens per sample in `step`.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per batch in `step`.")] = None,
    rounds: Annotated[int | None, typer.Option(min=2, help="Number of timed rounds in `step`.")] = None,
) -> Answer:
    """Measure plain, checkpointed, offloaded and planned training on this machine, one step of each in turn.

    `step` comes with the package. The other benchmarks, one per claim, need the source tree.

    Example: penstock bench --quick --disk /tmp
    """
    from penstock.cli import _bench

    options = {"num_layers": layers, "width": width, "length": length, "batch": batch, "rounds": rounds}
    sizes = {key: value for key, value in options.items() if value is not None}
    if is_list:
        return _bench.listed()
    return _bench.answer(names or ["step"], quick, device.value, disk, out, sizes, steps)


@command(app)
def report(
    steps: Steps,
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Folders of runs: a fleet, a demo, plans, or report.save."),
    ],
    out: Annotated[Path, typer.Option(help="File to write the page to."), OUTPUT] = Path("run.html"),
    title: Annotated[str | None, typer.Option(help="Title of the page.", show_default=False)] = None,
    rated: Annotated[
        int | None,
        typer.Option(parser=size, metavar="SIZE", help="Writes that your SSD is rated for (TBW), such as 600TB."),
    ] = None,
) -> Answer:
    """Write a report of runs as one self-contained HTML page.

    Example: penstock report runs/1 --out run.html
    """
    from penstock.cli import _report

    return _report.answer(folders, out, title, rated, steps)
