"""Pictures of a fleet's run, from the files in its folder: during the run or afterwards, from any process."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from penstock.arguments import checked
from penstock.errors import PenstockError
from penstock.report._pictures import curves, gantt
from penstock.tiers import Event, write_trace

_MOST = 1e15
"""Larger numbers are damaged: their line is left out."""


class UnitLine(NamedTuple):
    """A line of ``units.jsonl``, with fields of ``fleet.UnitRecord``."""

    job: str
    kind: str
    shard: int
    device: int
    start_s: float
    end_s: float
    stall_s: float
    recompute_s: float


@checked("penstock.report.draw_fleet('runs/1')")
def draw_fleet(run_dir: str | Path, folder: str | Path | None = None, *, last_s: float = 60.0) -> list[Path]:
    """Draw a fleet's run into ``folder`` (by default ``run_dir``) and return the files.

    ``units.png`` shows which job was on which device in the last ``last_s`` seconds, ``losses.png`` every job's losses
    by step, and ``units.trace.json`` is a trace of all units and stalls for ui.perfetto.dev. Raises ``PenstockError``
    if ``run_dir`` holds no units, or matplotlib is missing.
    """
    if last_s <= 0:
        raise PenstockError(f"the picture of units shows the last {last_s} s, which is nothing; give last_s=60")
    run_dir = Path(run_dir)
    folder = run_dir if folder is None else Path(folder)
    units = read_units(run_dir)
    if not units:
        raise PenstockError(
            f"{run_dir} holds no units of a fleet; give the run_dir of one that has trained: draw_fleet('runs/1')"
        )
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in ("units.png", "losses.png", "units.trace.json")]
    _draw_units(files[0], units, last_s)
    losses = read_losses(run_dir)
    curves(files[1], {name: values for name, values in losses.items() if values}, title="Losses")
    write_trace(files[2], events_of(units), name=f"penstock fleet {run_dir.name}")
    return files


def read_units(run_dir: Path) -> list[UnitLine]:
    """Return all units that ran, in the order in which they were recorded."""
    lines = ({"recompute_s": 0.0, **line} for line in _lines(run_dir / "units.jsonl"))
    whole_lines = [line for line in lines if _is_unit(line)]
    return [UnitLine(**{name: line[name] for name in UnitLine._fields}) for line in whole_lines]


def read_losses(run_dir: Path) -> dict[str, list[float]]:
    """Return the losses of every job, by step."""
    return {
        path.parent.name: [float(line["loss"]) for line in _lines(path) if isinstance(line.get("loss"), int | float)]
        for path in sorted((run_dir / "jobs").glob("*/metrics.jsonl"))
    }


def events_of(units: Iterable[UnitLine]) -> Iterator[Event]:
    """Yield units and their stalls as events of a trace."""
    for unit in units:
        lane, computes_s = f"device {unit.device}", unit.start_s + unit.stall_s
        what = f"shard {unit.shard} of {unit.job}"
        if unit.stall_s > 0:
            yield Event(lane=lane, kind="stall", label=what, size_bytes=0, start_s=unit.start_s, end_s=computes_s)
        yield Event(lane=lane, kind=unit.kind, label=what, size_bytes=0, start_s=computes_s, end_s=unit.end_s)


def _draw_units(path: Path, units: Sequence[UnitLine], last_s: float) -> None:
    end_s = max(unit.end_s for unit in units)
    shown = [unit for unit in units if unit.end_s > end_s - last_s]
    begin_s = min(unit.start_s for unit in shown)
    rows: dict[str, list[tuple[float, float, str]]] = {}
    for unit in sorted(shown, key=lambda unit: (unit.device, unit.start_s)):
        computes_s = unit.start_s + unit.stall_s - begin_s
        rows.setdefault(f"device {unit.device}", []).append((computes_s, unit.end_s - begin_s, unit.job))
    gantt(path, rows, title="Which job is on which device")


def _lines(path: Path) -> Iterator[dict[str, Any]]:  # any: JSON
    """Yield the JSON objects in a file, without lines that are damaged or cut off."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row


def _is_unit(line: dict[str, Any]) -> bool:  # any: JSON
    """Whether a line has every field that pictures show; damaged lines are left out."""
    kinds = {"job": str, "kind": str, "shard": int, "device": int}
    return all(isinstance(line.get(key), kinds.get(key, int | float)) for key in UnitLine._fields) and all(
        abs(line[key]) < _MOST for key in UnitLine._fields if kinds.get(key) is not str
    )
