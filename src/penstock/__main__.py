"""The `penstock` command as ``python -m penstock``, for when its script is not on the path."""

from penstock.cli import app

if __name__ == "__main__":
    app(prog_name="penstock")
