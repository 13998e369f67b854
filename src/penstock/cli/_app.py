"""The commands and their options; each does its work in a file of its own."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock._version import __version__
from penstock.errors import PenstockError

app = typer.Typer(
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, help="Train what does not fit."
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train what does not fit."""


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
        _fail(error)
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
    steps: Annotated[int, typer.Option(min=3, help="Training steps to compare.")] = 8,
) -> None:
    """Train a transformer under a hard memory cap that kills the same script without Penstock.

    Example: penstock demo --disk /nvme
    """
    from penstock.cli._demo import run

    try:
        run(out, out if disk is None else disk, steps, Console())
    except (PenstockError, OSError) as error:
        _fail(error)


def _fail(error: Exception) -> None:
    """One paragraph on standard error, no traceback."""
    Console(stderr=True).print(f"[bold red]penstock:[/] {error}", highlight=False, soft_wrap=True)
    raise typer.Exit(1) from None
