"""Kinds of step that an earlier run of the same training has measured, so that this one begins with their plan.

A file of the user's cache has them. Nothing depends on whether they still hold: a step that does otherwise leaves its
plan, and the first step of each kind is measured again. Without a cache, the first steps are measured as ever.
"""

import contextlib
import hashlib
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from penstock._version import __version__
from penstock.files import cache_folder
from penstock.state._order import Details, StepOrder, UpdateOnDevice, UpdateOnHost
from penstock.state._problem import Rates

_MOST_FILES = 64
"""Trainings that are remembered; those of longest ago are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """The kinds of step in a turn, with what a plan of them needs."""

    orders: tuple[StepOrder, ...]
    """The kinds, in their order."""
    places: dict[Any, list[int]]  # any: a text, a number
    """The keys of pages by their place: a label, or a number among the results of a step."""
    rates: Rates
    """The rates that they were planned with."""
    hosted: frozenset[int] | None
    """Keys of the weights that the host updates as planned; ``None`` if no plan has said."""
    others_bytes: int
    """Bytes outside of pages before the first step."""
    budget_bytes: int
    """The budget."""


class StepCache:
    """The file with the kinds of step of one training: the same model, optimizer, machine and versions."""

    def __init__(self, identity: object):
        told = repr((identity, __version__, torch.__version__))
        self._name = f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.pt"

    def recall(self) -> Recalled | None:
        """Return what an earlier run has stored; ``None`` if there is nothing that can be used."""
        try:
            stored = torch.load(_folder() / self._name, weights_only=True)
            orders = tuple([_from_plain(order) for order in stored["orders"]])
            rates, hosted = Rates(**stored["rates"]), stored["hosted"]
            hosted = None if hosted is None else frozenset(hosted)
            are_whole = orders and all(map(_is_whole, orders))
            return Recalled(**stored | {"orders": orders, "rates": rates, "hosted": hosted}) if are_whole else None
        except Exception:  # there is none, or somebody has changed it: `torch.load` may raise anything
            return None

    def store(self, recalled: Recalled) -> None:
        """Store it for later runs, or do nothing where that is not possible."""
        orders, rates = [*map(_plain, recalled.orders)], asdict(recalled.rates)
        hosted = None if recalled.hosted is None else [*recalled.hosted]
        stored = {
            "orders": orders, "places": recalled.places, "rates": rates, "hosted": hosted,
            "others_bytes": recalled.others_bytes, "budget_bytes": recalled.budget_bytes,
        }  # fmt: skip
        with contextlib.suppress(OSError, RuntimeError):  # a full disk, no home
            folder = _folder()
            folder.mkdir(parents=True, exist_ok=True)
            draft = folder / f"{self._name}.{os.getpid()}"
            torch.save(stored, draft)
            draft.replace(folder / self._name)
            for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)[:-_MOST_FILES]:
                file.unlink(missing_ok=True)


def _folder() -> Path:
    return cache_folder() / "steps"


def _is_whole(order: StepOrder) -> bool:
    """Whether an order has an entry for each operator in all of its lists."""
    details = order.details
    assert details is not None
    lists = order.sizes, order.begun_bytes, order.others_bytes, details.writes, details.seconds
    keys = {key for places in order.needs for key in places}
    return bool(keys) and all(len(each) == len(order.needs) for each in lists)


def _plain(order: StepOrder) -> dict[str, Any]:  # any: lists, dicts and numbers
    """Return an order as values that `torch.load` accepts."""
    details = order.details
    assert details is not None
    own = {field.name: getattr(details, field.name) for field in fields(Details)}
    own["hollow"] = [*details.hollow]
    own["updates"] = [*map(asdict, details.updates)]
    own["updates_on_device"] = [*map(asdict, details.updates_on_device)]
    plain = {name: getattr(order, name) for name in ("needs", "sizes", "begun_bytes", "begun", "others_bytes")}
    return plain | {"details": own}


def _from_plain(plain: dict[str, Any]) -> StepOrder:  # any: see `_plain`
    """Return the order of which `_plain` has made these values."""
    own = dict(plain["details"])
    own["hollow"] = {*own["hollow"]}
    own["updates"] = [UpdateOnHost(**update) for update in own["updates"]]
    own["updates_on_device"] = [UpdateOnDevice(**update) for update in own["updates_on_device"]]
    return StepOrder(**plain | {"details": Details(**own)})
