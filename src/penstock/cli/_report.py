"""`penstock report`: one page about runs."""

from pathlib import Path

from rich.console import Console

from penstock.cli._answer import Answer
from penstock.cli._progress import Steps
from penstock.errors import PenstockError


def answer(folders: list[Path], out: Path, title: str | None, rated_bytes: int | None, steps: Steps) -> Answer:
    """Write the page. Raises ``PenstockError`` if a path is not a folder, and the errors of `write_html`."""
    for folder in folders:
        if not folder.is_dir():
            raise PenstockError(
                f"{folder} is {'a file' if folder.exists() else 'not there'}; give the folder of a run, such as the "
                "--run-dir of a fleet, or the --out of a demo"
            )
    steps.phase(f"reading {folders[0]}" if len(folders) == 1 else f"reading {len(folders)} folders")
    from penstock.report import write_html

    files = write_html(out, *folders, title=title, rated_bytes=rated_bytes)

    def show(console: Console) -> None:
        for file in files:
            console.print(f"wrote {file}", highlight=False, markup=False, soft_wrap=True)

    return Answer(data={"files": [str(file) for file in files]}, show=show)
