"""The `penstock` command.

- `app`: the command line, a typer application: `penstock probe`, `penstock demo`.
"""

from penstock.cli._app import app as app
