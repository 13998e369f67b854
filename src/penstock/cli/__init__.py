"""The `penstock` command.

- `app`: the command line, a typer application: `penstock probe`, `demo`, `plan`, `advise`, `bench`, `report`, and
  `fleet` with its own commands.
"""

from penstock.cli._app import app as app
