"""Pictures of a run, from the files in its folder: while it goes on or afterwards, from any process."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.report._pictures import curves, gantt
from penstock.tiers import Event, write_trace

_MOST = 1e15
"""Seconds and losses beyond it are damage."""


def draw_fleet(run_dir: str | Path, folder: str | Path | None = None, *, last_s: float = 60.0) -> list[Path]:
    """Draws a fleet's run into ``folder`` (by default ``run_dir``) and returns the files.

    ``units.png`` shows which job was on which device in the last ``last_s`` seconds, ``losses.png`` every job's losses
    by step, and ``units.trace.json`` is a trace of all units and stalls for ui.perfetto.dev. Raises ``PenstockError``
    where ``run_dir`` holds no units, or matplotlib is missing.
    """
    if last_s <= 0:
        raise PenstockError(f"the picture of units shows the last {last_s} s, which is nothing; give last_s=60")
    run_dir = Path(run_dir)
    folder = run_dir if folder is None else Path(folder)
    units = [one for one in _lines(run_dir / "units.jsonl") if _is_unit(one)]
    if not units:
        raise PenstockError(
            f"{run_dir} holds no units of a fleet; give the run_dir of one that has trained: draw_fleet('runs/1')"
        )
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in ("units.png", "losses.png", "units.trace.json")]
    _draw_units(files[0], units, last_s)
    losses = {
        path.parent.name: [float(one["loss"]) for one in _lines(path) if _is_number(one.get("loss"))]
        for path in sorted((run_dir / "jobs").glob("*/metrics.jsonl"))
    }
    curves(files[1], {name: values for name, values in losses.items() if values}, title="Losses")
    write_trace(files[2], _events(units), name=f"penstock fleet {run_dir.name}")
    return files


def _draw_units(path: Path, units: list[dict[str, Any]], last_s: float) -> None:  # any: JSON
    end_s = max(one["end_s"] for one in units)
    shown = [one for one in units if one["end_s"] > end_s - last_s]
    begin_s = min(one["start_s"] for one in shown)
    rows: dict[str, list[tuple[float, float, str]]] = {}
    for one in sorted(shown, key=lambda one: (one["device"], one["start_s"])):
        computes_s = one["start_s"] + one["stall_s"] - begin_s
        rows.setdefault(f"device {one['device']}", []).append((computes_s, one["end_s"] - begin_s, one["job"]))
    gantt(path, rows, title="Which job is on which device")


def _events(units: list[dict[str, Any]]) -> Iterator[Event]:  # any: JSON
    for one in units:
        lane, computes_s = f"device {one['device']}", one["start_s"] + one["stall_s"]
        what = f"shard {one['shard']} of {one['job']}"
        if one["stall_s"] > 0:
            yield Event(lane=lane, kind="stall", label=what, size_bytes=0, start_s=one["start_s"], end_s=computes_s)
        yield Event(lane=lane, kind=one["kind"], label=what, size_bytes=0, start_s=computes_s, end_s=one["end_s"])


def _lines(path: Path) -> Iterator[dict[str, Any]]:  # any: JSON
    """Of a file that may end in the middle of one."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found


def _is_unit(one: dict[str, Any]) -> bool:  # any: JSON
    """Whether a line has what pictures show; one that was damaged is left out."""
    numbers = [one.get(key) for key in ("start_s", "end_s", "stall_s")]
    return all(_is_number(value) for value in numbers) and all(
        isinstance(one.get(key), kind) for key, kind in (("job", str), ("kind", str), ("device", int), ("shard", int))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < _MOST
