"""The account of a budget: what its holders have charged, and the footprints of their steps."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from penstock.arguments import check_fields
from penstock.errors import InternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One holder's use of a place."""

    name: str
    """Name of the room, such as ``"offload"``; ``"others"`` if none was given."""
    held_bytes: int
    """Bytes held now, including what its steps take while they run."""
    peak_bytes: int
    """The most bytes held at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceUse:
    """The bytes held in one place, and by whom."""

    place: str
    """``"device"``, ``"host"`` or a directory."""
    limit_bytes: int | None
    """The limit that the budget sets; ``None`` if it sets none."""
    held_bytes: int
    """Bytes held now. Shared tensors count once; of steps that take turns, only the largest counts."""
    peak_bytes: int
    """The most bytes held at once."""
    holders: tuple[Holder, ...]
    """The holders, largest first. Their bytes may add up to more than ``held_bytes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The device memory that training a step takes."""

    tensors: Mapping[int, int] = field(default_factory=dict)
    """Bytes of each parameter and its gradient, by the parameter's ``id``. Other footprints may hold the same ones."""
    held_bytes: int = 0
    """Further bytes that are held between steps."""
    step_bytes: int = 0
    """Bytes that a step takes in addition while it runs."""
    runs_beside: bool = False
    """Whether its steps may run at any time, instead of taking turns with other steps."""

    def __post_init__(self) -> None:
        check_fields(self, "Footprint(held_bytes=2**20, step_bytes=2**20)", held_bytes=0, step_bytes=0)

    @property
    def standing_bytes(self) -> int:
        """Bytes held between steps."""
        return sum(self.tensors.values()) + self.held_bytes


class Account:
    """The content of a budget: who holds how many bytes of which place. All views of a budget share it.

    It is a context that holds its lock; only ``later`` is called outside of it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._late: deque[Callable[[], None]] = deque()
        """Changes made by finalizers, which may run while their thread is in the middle of another change."""
        self.charged: dict[tuple[str, str], int] = {}
        """Bytes by place and holder."""
        self.footprints: list[tuple[Footprint, str]] = []
        self.peaks: dict[tuple[str, str | None], int] = {}
        """Highest bytes by place and holder; the holder ``None`` stands for the whole place."""

    def __enter__(self) -> Self:
        self._lock.acquire()
        self._depth += 1
        self._settle()
        return self

    def __exit__(self, *_: object) -> None:
        self._settle()
        self._depth -= 1
        self._lock.release()

    def _settle(self) -> None:
        while self._depth == 1 and self._late:
            self._late.popleft()()

    def later(self, change: Callable[[], None]) -> None:
        """Make a change: at once, or, if this thread is in the middle of another change, after that."""
        self._late.append(change)
        with self:
            pass

    def drop(self, footprint: Footprint) -> None:
        """Remove a footprint, if it is there."""
        self.footprints = [entry for entry in self.footprints if entry[0] is not footprint]

    def add(self, place: str, holder: str, size_bytes: int) -> None:
        """Charge bytes, or credit them if ``size_bytes`` is negative."""
        held = self.charged.get((place, holder), 0) + size_bytes
        if held < 0:
            raise InternalError(f"{-size_bytes} bytes were given back to {place}, more than were taken")
        self.charged[place, holder] = held
        self.note(place, holder)

    def note(self, place: str, holder: str) -> None:
        """Update the peaks of the place and the holder."""
        for name, held in ((holder, self.held_by(place, holder)), (None, self.held_bytes(place))):
            self.peaks[place, name] = max(held, self.peaks.get((place, name), 0))

    def held_bytes(self, place: str) -> int:
        """Return the bytes of the place that all holders have."""
        if place != "device":
            return sum(size for (where, _), size in self.charged.items() if where == place)
        return self.standing_bytes() + _step_bytes(footprint for footprint, _ in self.footprints)

    def held_by(self, place: str, holder: str) -> int:
        """Return the bytes of the place that one holder has."""
        charged = self.charged.get((place, holder), 0)
        if place != "device":
            return charged
        own = [footprint for footprint, name in self.footprints if name == holder]
        return charged + sum(footprint.standing_bytes for footprint in own) + _step_bytes(own)

    def beside_bytes(self) -> int:
        """Return the bytes of steps that may run at any time."""
        return sum(footprint.step_bytes for footprint, _ in self.footprints if footprint.runs_beside)

    def standing_bytes(self, without: Footprint | None = None) -> int:
        """Return the bytes of the device held between steps, except by ``without``. Tensors count once."""
        # `remat` may plan a part of a model that an offloader surrounds; both name that part's parameters.
        held, tensors = 0, dict[int, int]()
        for footprint, _ in self.footprints:
            held += footprint.held_bytes if footprint is not without else 0
            for key, size in footprint.tensors.items():
                if without is None or key not in without.tensors:
                    tensors[key] = max(size, tensors.get(key, 0))
        charged = sum(size for (where, _), size in self.charged.items() if where == "device")
        return charged + held + sum(tensors.values())


def _step_bytes(footprints: Iterable[Footprint]) -> int:
    """Return the largest step of those that take turns, plus all steps that may run at any time."""
    # The sum of all peaks would refuse two models that run in turn; the sum of what stays would let a step overflow.
    in_turn, beside = 0, 0
    for footprint in footprints:
        if footprint.runs_beside:
            beside += footprint.step_bytes
        else:
            in_turn = max(in_turn, footprint.step_bytes)
    return in_turn + beside
