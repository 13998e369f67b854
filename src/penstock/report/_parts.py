"""Dispatch from the things that a user passes to the parts of a page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import fleet, offload, probe, remat, tiers, unified
from penstock.errors import PenstockError
from penstock.report import (
    _of_advice,
    _of_demo,
    _of_fleet,
    _of_offload,
    _of_remat,
    _of_room,
    _of_tiers,
    _of_training,
    _of_unified,
    _saved,
)
from penstock.report._part import Part

_KINDS = (
    "an Offloader, a Training, an OptimizedStep or Planned, a fleet's Results or run_dir, TieredFeatures, a Budget, an "
    "Advice, a PeakReport, or a folder that report.save wrote"
)


def parts_of(things: Sequence[Any]) -> list[Part]:
    """Return the parts, in the order of ``things``.

    Raises ``ValueError`` for no things, ``TypeError`` for one that a report cannot show.
    """
    if not things:
        raise ValueError(f"there is nothing to report on: write_html('run.html', offloader). It takes {_KINDS}")
    events = [event for thing in things if isinstance(thing, offload.Offloader) for event in thing.trace()]
    parts: list[Part] = []
    for thing in things:
        if isinstance(thing, str | Path):
            parts += parts_of_folder(Path(thing))
        elif isinstance(thing, probe.PeakReport):
            parts.append(_of_tiers.part_of_peak(thing, events))
        elif isinstance(thing, remat.OptimizedStep):
            parts += _of_remat.parts_of_step(thing)
        else:
            parts.append(_part_of(thing))
    return parts


def parts_of_folder(folder: Path) -> list[Part]:
    """Return the parts for a folder: those that `save` wrote; a demo's; or a fleet's run, a planned problem, or both.

    Raises ``PenstockError`` for any other folder.
    """
    if not folder.is_dir():
        raise PenstockError(f"{folder} is no folder; give one that report.save wrote, or a fleet's run_dir")
    if _saved.is_saved(folder):
        return _saved.load(folder)
    parts = [_of_demo.part_of_demo(folder)] if _of_demo.is_demo(folder) else []
    parts += [_of_room.part_of_room(folder)] if _of_room.is_room(folder) else []
    for file in sorted((folder / "runs").glob(f"*/{_saved.REPORT_FILE}")):
        parts += _saved.load(file.parent)
    if _of_fleet.is_run_dir(folder):
        parts.append(_of_fleet.part_of_run_dir(folder))
    if (folder / "problem.json").is_file():
        try:
            parts.append(_of_remat.part_of_problem(folder / "problem.json"))
        except ValueError as error:
            raise PenstockError(str(error)) from error
    if not parts:
        raise PenstockError(
            f"{folder} holds nothing to report on: no report.json (of report.save), no units.jsonl or fleet.db (of a "
            "fleet), no problem.json (of `penstock plan --out`)"
        )
    return parts


def _part_of(thing: Any) -> Part:  # any: recognized by its type or its attributes
    if isinstance(thing, offload.Offloader):
        return _of_offload.part_of_offloader(thing)
    if isinstance(thing, offload.OffloadedModule):
        return _of_offload.part_of_offloader(thing.offloader)
    if isinstance(thing, offload.Training):
        return _of_training.part_of_training(thing)
    if isinstance(thing, remat.Planned):
        return _of_remat.part_of_planned(thing)
    if isinstance(thing, fleet.Results):
        return _of_fleet.part_of_results(thing)
    if isinstance(thing, unified.TieredFeatures):
        return _of_unified.part_of_features(thing)
    if isinstance(thing, tiers.Budget):
        return _of_tiers.part_of_budget(thing)
    if {"options", "best"} <= set(dir(thing)):  # `best` raises where there is none
        return _of_advice.part_of_advice(thing)
    raise TypeError(f"a report shows {_KINDS}, not {type(thing).__name__}")
