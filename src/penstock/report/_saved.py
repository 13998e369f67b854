"""The data of a page as files in a folder, so that a run can be shown after its process has ended."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from penstock.errors import PenstockError
from penstock.report._model import Section
from penstock.report._part import Part, trace_names

_FORMAT = 1
REPORT_FILE = "report.json"
"""The file that `save` writes to a folder."""
_MOST_BYTES = 32 * 2**20
_TRACE = re.compile(r"[a-z]+(-\d+)?\.trace\.json")


@dataclass(frozen=True, slots=True)
class _SavedPart:
    section: Section
    trace: str | None


@dataclass(frozen=True, slots=True)
class _SavedReport:
    format: int
    parts: Annotated[tuple[_SavedPart, ...], Field(max_length=1000)]


def is_saved(folder: Path) -> bool:
    """Whether `write` has written to the folder."""
    return (folder / REPORT_FILE).is_file()


def write(folder: Path, parts: list[Part]) -> Path:
    """Write ``report.json`` atomically, and a trace for each part that has one."""
    folder.mkdir(parents=True, exist_ok=True)
    names = trace_names(parts)
    for part, name in zip(parts, names, strict=True):
        if name is not None:
            part.write_trace(folder / name)
    saved = _SavedReport(
        _FORMAT, tuple(_SavedPart(part.section, name) for part, name in zip(parts, names, strict=True))
    )
    path = folder / REPORT_FILE
    draft = folder / f"{REPORT_FILE}.{os.getpid()}"
    draft.write_bytes(TypeAdapter(_SavedReport).dump_json(saved))
    draft.replace(path)
    return path


def load(folder: Path) -> list[Part]:
    """Return the parts that `write` saved. Raises ``PenstockError`` if the file is damaged, too large or outdated."""
    path = folder / REPORT_FILE
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes, and no report has more than {_MOST_BYTES:,}")
        saved = TypeAdapter(_SavedReport).validate_json(path.read_bytes())
        if saved.format != _FORMAT:
            raise ValueError(f"it is of format {saved.format}, and this version of Penstock reads {_FORMAT}")
        for part in saved.parts:
            _check(part)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise _damaged(path, f"{where}: {fault['msg']}" if where else fault["msg"]) from None
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None
    return [Part(section=part.section, saved_trace=_trace_of(folder, part.trace)) for part in saved.parts]


def _check(part: _SavedPart) -> None:
    """Check what types cannot: the trace's name, the length of table lines, and the groups of bars."""
    if part.trace is not None and not _TRACE.fullmatch(part.trace):
        raise ValueError(f"a trace is a file beside it, not {part.trace!r}")
    for table in part.section.tables:
        if any(len(line) != len(table.columns) for line in table.lines):
            raise ValueError(
                f"the table {table.title!r} has lines of another length than its {len(table.columns)} columns"
            )
    for chart in part.section.charts:
        if chart.kind == "bars" and any(
            not 0 <= group < len(chart.groups) for row in chart.rows for _, _, group in row.bars
        ):
            raise ValueError(f"a bar of {chart.title!r} is of a group that is not there")


def _trace_of(folder: Path, name: str | None) -> Path | None:
    return folder / name if name is not None and (folder / name).is_file() else None


def _damaged(path: Path, why: str) -> PenstockError:
    return PenstockError(
        f"{path} cannot be read as a saved report: {why}. It is damaged, or something else wrote it; write it again "
        f"where the run is at hand: report.save({str(path.parent)!r}, offloader)"
    )
