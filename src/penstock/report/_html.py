"""The report of a run: one HTML file that needs nothing beside it, and traces for Perfetto."""

from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.arguments import checked
from penstock.tiers import Size
from penstock.units import parse_bytes


@checked("penstock.report.write_html('run.html', offloader)")
def write_html(path: str | Path, *things: Any, title: str | None = None, rated_bytes: Size | None = None) -> list[Path]:
    """Writes what ``things`` did as one HTML file, and returns it with the traces beside it (``*.trace.json``).

    ``things`` are, in any mix and number: an ``offload.Offloader`` or ``offload.Training``; a ``remat.OptimizedStep``
    or ``remat.Planned``; a fleet's ``Results`` or its ``run_dir``; ``unified.TieredFeatures``; a ``tiers.Budget``; what
    ``penstock.advise`` returned; a ``probe.PeakReport``; or the folder of `save` or of ``penstock plan --out``. A
    ``PeakReport`` taken while an ``Offloader`` in the same call worked shows what moved meanwhile.

    ``rated_bytes`` is what your SSD is rated to stand in writes (``"600TB"``, its data sheet's TBW), for its projected
    life. The file loads nothing, from the network or the disk, runs no script, and stays below some 2 MB for a run of
    any length; everything that was named by a user is text in it.

    Raises ``ValueError`` where nothing is given, ``TypeError`` for a thing that has no picture, and ``PenstockError``
    for a folder that holds none or is damaged.
    """
    from penstock.report._page import page
    from penstock.report._part import trace_names
    from penstock.report._parts import parts_of  # which loads every room

    path = Path(path)
    rated = None if rated_bytes is None else parse_bytes(rated_bytes)
    parts = parts_of(things)
    names = trace_names(parts, prefix=f"{path.stem}.")
    if title is None:
        title = "Penstock report"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = page(title, [one.section for one in parts], names, rated_bytes=rated, now=datetime.now().astimezone())
    path.write_text(text, encoding="utf-8")
    files = [path]
    for part, name in zip(parts, names, strict=True):
        if name is not None:
            files.append(path.parent / name)
            part.write_trace(files[-1])
    return files


@checked("penstock.report.save('run', offloader)")
def save(folder: str | Path, *things: Any) -> Path:
    """Writes what a page of ``things`` needs into ``folder`` as JSON, and returns the file.

    ``write_html("run.html", folder)`` makes the page, in any process and at any time. Raises as `write_html` does.
    """
    from penstock.report import _saved
    from penstock.report._parts import parts_of

    return _saved.write(Path(folder), parts_of(things))
