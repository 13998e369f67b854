"""How a command says that it cannot."""

from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape


def fail(error: Exception | str) -> NoReturn:
    """One paragraph on standard error, no traceback; exit code 1."""
    Console(stderr=True).print(f"[bold red]penstock:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    raise typer.Exit(1) from None
