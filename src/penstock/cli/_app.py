"""The commands and their options; each does its work in a file of its own."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock._version import __version__
from penstock.cli._fail import fail
from penstock.cli._fleet_app import fleet_app
from penstock.errors import PenstockError

app = typer.Typer(
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, help="Train what does not fit."
)
app.add_typer(fleet_app, name="fleet")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[  # noqa: ARG001  # its callback does the work
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train what does not fit."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # PyTorch's profiler, which measures peaks, chats on standard error


@app.command()
def probe(
    disk: Annotated[Path, typer.Option(help="Directory in which to spill; 256 MiB are used for a moment.")] = Path("."),
    refresh: Annotated[bool, typer.Option(help="Measure anew, rather than use results of the last week.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show devices, tiers, capacities, bandwidths, and what is supported here or why not.

    Example: penstock probe --disk /nvme --json
    """
    from penstock.cli._probe import show
    from penstock.probe import machine

    try:
        report = machine(disk, refresh=refresh)
    except (PenstockError, OSError) as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        show(report, Console())


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("penstock-demo"),
    disk: Annotated[
        Path | None, typer.Option(help="Directory in which to spill; by default the results folder.")
    ] = None,
    steps: Annotated[int, typer.Option(min=3, help="Training steps to compare.")] = 6,
) -> None:
    """Train a transformer under a hard memory cap that kills the same script without Penstock.

    Example: penstock demo --disk /nvme
    """
    from penstock.cli._demo import run

    try:
        run(out, out if disk is None else disk, steps, Console())
    except (PenstockError, OSError) as error:
        fail(error)


@app.command()
def plan(
    target: Annotated[
        str, typer.Argument(help="FILE.py:FACTORY or MODULE:FACTORY; it returns (step, example_inputs).")
    ],
    budget: Annotated[list[str] | None, typer.Option(help="Also this budget, such as 6GiB; may be repeated.")] = None,
    disk: Annotated[
        Path | None, typer.Option(help="Directory on an SSD to swap to; without it, recompute only.")
    ] = None,
    method: Annotated[str, typer.Option(help="hybrid, recompute or swap.")] = "hybrid",
    out: Annotated[Path | None, typer.Option(help="Folder for problem.json, pareto.png and memory.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what byte budgets cost a training step, before it is trained.

    Example: penstock plan train.py:make_step --budget 6GiB --disk /nvme --out plans. A factory with a parameter
    `batch` is also asked for the largest batch that each given budget takes.
    """
    from penstock.cli import _plan

    if method not in ("hybrid", "recompute", "swap"):
        fail(ValueError(f"the method is hybrid, recompute or swap, not {method!r}"))
    try:
        found = _plan.make(target, budget or [], disk, method)  # type: ignore[arg-type]
        files = _plan.write(found, out) if out is not None else []
    except (PenstockError, OSError, ValueError) as error:
        fail(error)
    if as_json:
        typer.echo(_plan.as_json(found))
        return
    console = Console()
    _plan.show(found, console)
    for file in files:
        console.print(f"  {file}", highlight=False)
