"""The report of a run: one self-contained HTML file, and traces for Perfetto."""

from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.arguments import checked
from penstock.tiers import Size
from penstock.units import parse_bytes


@checked("penstock.report.write_html('run.html', offloader)")
def write_html(path: str | Path, *things: Any, title: str | None = None, rated_bytes: Size | None = None) -> list[Path]:
    """Write one HTML file that shows what ``things`` did; return its path and those of its traces (``*.trace.json``).

    ``things`` may be, in any mix and number: an ``offload.Offloader`` or ``offload.Training``; a
    ``remat.OptimizedStep`` or ``remat.Planned``; a fleet's ``Results`` or its ``run_dir``; ``unified.TieredFeatures``;
    a ``tiers.Budget``; the result of ``penstock.advise``; a ``probe.PeakReport``; or a folder that `save` or ``penstock
    plan --out`` or ``penstock demo --out`` wrote. A ``PeakReport`` also shows the copies that an ``Offloader`` in the
    same call made while the peak was measured.

    ``rated_bytes`` is the amount of writes that your SSD is rated for (TBW in its data sheet, such as ``"600TB"``); the
    page projects the life of the SSD from it. The file loads nothing from the network or the disk, runs no script, and
    stays below about 2 MB for a run of any length. Names that users chose appear in it as text only.

    Raises ``ValueError`` if nothing is given, ``TypeError`` for a thing that a report cannot show, and
    ``PenstockError`` for a folder that holds nothing to report on or is damaged.
    """
    from penstock.report._page import page
    from penstock.report._part import trace_names
    from penstock.report._parts import parts_of  # loads every room

    path = Path(path)
    rated = None if rated_bytes is None else parse_bytes(rated_bytes)
    parts = parts_of(things)
    names = trace_names(parts, prefix=f"{path.stem}.")
    if title is None:
        title = "Penstock report"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = page(title, [part.section for part in parts], names, rated_bytes=rated, now=datetime.now().astimezone())
    path.write_text(text, encoding="utf-8")
    files = [path]
    for part, name in zip(parts, names, strict=True):
        if name is not None:
            files.append(path.parent / name)
            part.write_trace(files[-1])
    return files


@checked("penstock.report.save('run', offloader)")
def save(folder: str | Path, *things: Any) -> Path:
    """Write to ``folder``, as JSON, what a page of ``things`` needs, and return the file.

    ``write_html("run.html", folder)`` makes the page from it, in any process and at any time. Raises the same errors
    as `write_html`.
    """
    from penstock.report import _saved
    from penstock.report._parts import parts_of

    return _saved.write(Path(folder), parts_of(things))
