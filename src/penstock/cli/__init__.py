"""The `penstock` command.

- `app`: the command line, a typer application: `penstock probe`, `penstock demo`, `penstock plan`, and
  `penstock fleet` with commands of its own.
"""

from penstock.cli._app import app as app
