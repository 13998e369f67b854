"""Run ``python -m penstock``: the `penstock` command, where its script is not on the path."""

from penstock.cli import app

if __name__ == "__main__":
    app(prog_name="penstock")
