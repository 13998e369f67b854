"""A budget of bytes: how many a process may hold on the device, in host memory and on each disk.

Rooms that run together are given the same `Budget`. Each charges what it takes under its own name, and plans with what
the others leave. On the device there are three kinds of bytes:

- bytes that are held until they are credited, like those of host memory and disks: ``charge`` and ``credit``;
- tensors that several holders may share, above all a model's parameters, which count once: a `Footprint`'s tensors;
- bytes that a step takes only while it runs: a `Footprint`'s step. Steps take turns, so only the largest counts. Steps
  that may run at any time, as a fleet's do, are added to it.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from penstock.arguments import checked
from penstock.errors import BudgetError
from penstock.tiers._account import Account, Footprint, Holder, PlaceUse
from penstock.tiers._tier import Tier
from penstock.units import format_bytes, parse_bytes

Size = int | str
"""Bytes as an ``int``, or text such as ``"6GiB"``."""

Directory = str | os.PathLike[str]
DiskSpec = (
    Directory | list[Directory] | tuple[Directory, ...] | Mapping[str, Size | None] | Mapping[Path, int | None] | None
)
"""One directory, several, or a dict of the bytes that each may take (``None``: all that is free)."""


class Budget:
    """Limits in bytes for the device, host memory and directories on disks, and the account of what is held.

    ``Budget(device="40GiB", host="200GiB", disk={"/nvme0": "1TiB"})``: you may leave out any argument, and then
    Penstock sets no limit there (without ``disk``, no disk is used). Give the same object to several rooms to keep
    their sum below it; ``uses()`` says who holds what. Methods are safe to call from any thread.

    ``tiers`` are tiers of your own, used after the disk: subclasses of `Tier` that keep bytes somewhere else, for
    example in an object store. Rooms use them and never close them.

    Raises ``ValueError`` or ``TypeError`` for sizes that cannot be parsed.
    """

    @checked("Budget(device='40GiB', host='200GiB', disk='/nvme')")
    def __init__(
        self,
        device: Size | None = None,
        host: Size | None = None,
        disk: DiskSpec = None,
        tiers: Sequence[Tier] = (),
    ):
        self.device_bytes = None if device is None else parse_bytes(device)
        """Limit on device memory in bytes; ``None`` for no limit."""
        self.host_bytes = None if host is None else parse_bytes(host)
        """Limit on the host memory that Penstock takes, in bytes; ``None`` for no limit."""
        self.disk_bytes = _directories(disk)
        """Limit per directory in bytes; ``None`` allows all that the file system has free."""
        self.tiers = tuple(tiers)
        """Your own tiers, used after the disk."""
        self.account = Account()
        """The account of what is held, shared by all views of this budget (``named``)."""
        self._holder = "others"

    def __repr__(self) -> str:
        def shown(limit: int | None) -> str:
            return "None" if limit is None else repr(format_bytes(limit))

        disk = ", ".join(f"{str(path)!r}: {shown(limit)}" for path, limit in self.disk_bytes.items())
        return f"Budget(device={shown(self.device_bytes)}, host={shown(self.host_bytes)}, disk={{{disk}}})"

    @checked("budget.leads_below(torch.device('cpu'))")
    def leads_below(self, device: torch.device) -> bool:
        """Return whether the budget names a tier below ``device``.

        For a CPU, host memory is the device and does not count.
        """
        has_host = self.host_bytes is not None and device.type != "cpu"
        return has_host or bool(self.disk_bytes) or bool(self.tiers)

    @checked("budget.alone(device=2**30)")
    def alone(self, *, device: int | None, host: int | None = None) -> "Budget":
        """Return a budget with the given limits over the same disks and tiers, and with an empty account."""
        return Budget(device=device, host=host, disk=self.disk_bytes, tiers=self.tiers)

    @checked("budget.named('offload')")
    def named(self, holder: str) -> "Budget":
        """Return a view of this account whose charges are recorded under the name ``holder``."""
        view = Budget.__new__(Budget)
        view.__dict__.update(self.__dict__, _holder=holder)
        return view

    @checked("budget.charge('device', 2**20)", size_bytes=0)
    def charge(self, place: str, size_bytes: int, *, force: bool = False) -> None:
        """Take ``size_bytes`` of ``"device"``, ``"host"`` or a directory given as text.

        Raises ``BudgetError`` if that would exceed the limit, unless ``force`` is set (for bytes that exist already).
        """
        with self.account:
            self._check(place, self.account.held_bytes(place) + size_bytes, size_bytes, force)
            self.account.add(place, self._holder, size_bytes)

    @checked("budget.credit('device', 2**20)", size_bytes=0)
    def credit(self, place: str, size_bytes: int) -> None:
        """Give back ``size_bytes`` that were charged to ``place``. Safe to call from finalizers."""
        self.account.later(functools.partial(self.account.add, place, self._holder, -size_bytes))

    @checked("budget.enter(Footprint(step_bytes=2**20))")
    def enter(self, footprint: Footprint, *, instead_of: Footprint | None = None, force: bool = False) -> None:
        """Take the device memory that a step needs, until ``leave``, and give back what ``instead_of`` took.

        Raises ``BudgetError`` if it does not fit next to the other holders, unless ``force`` is set. Then nothing
        changes.
        """
        with self.account as account:
            before = account.footprints
            account.footprints = [*(entry for entry in before if entry[0] is not instead_of), (footprint, self._holder)]
            try:
                size_bytes = footprint.standing_bytes + footprint.step_bytes
                self._check("device", account.held_bytes("device"), size_bytes, force)
            except BudgetError:
                account.footprints = before
                raise
            account.note("device", self._holder)

    @checked("budget.leave(footprint)")
    def leave(self, footprint: Footprint) -> None:
        """Give back what ``enter`` took. Idempotent; ignores footprints that were never entered."""
        self.account.later(functools.partial(self.account.drop, footprint))

    @checked("budget.step_room_bytes(Footprint())")
    def step_room_bytes(self, own: Footprint) -> int | None:
        """Return the highest peak in bytes that a step with this footprint may have next to what others hold.

        ``None`` if there is no limit.
        """
        if self.device_bytes is None:
            return None
        with self.account:
            return self.device_bytes - self.account.standing_bytes(without=own) - self.account.beside_bytes()

    def beside_bytes(self) -> int:
        """Return the bytes of the device taken by steps that may run at any time."""
        with self.account:
            return self.account.beside_bytes()

    @checked("budget.room_bytes('device')")
    def room_bytes(self, place: str) -> int | None:
        """Return the bytes of ``place`` that are left; ``None`` if it has no limit."""
        limit = self._limit(place)
        return None if limit is None else max(0, limit - self.held_bytes(place))

    @checked("budget.held_bytes('device')")
    def held_bytes(self, place: str) -> int:
        """Return the bytes of ``place`` that are taken now."""
        with self.account:
            return self.account.held_bytes(place)

    @checked("budget.peak_bytes('device')")
    def peak_bytes(self, place: str) -> int:
        """Return the most bytes of ``place`` that were ever taken at once."""
        return self.account.peaks.get((place, None), 0)

    def uses(self) -> tuple[PlaceUse, ...]:
        """Return the use of every place that has a limit or a holder."""
        with self.account:
            limited = [place for place in ("device", "host") if self._limit(place) is not None]
            places = dict.fromkeys([*limited, *map(str, self.disk_bytes), *(place for place, _ in self.account.peaks)])
            return tuple(self._use(place) for place in places)

    def _use(self, place: str) -> PlaceUse:
        holders = [
            Holder(name=name, held_bytes=self.account.held_by(place, name), peak_bytes=peak)
            for (where, name), peak in self.account.peaks.items()
            if where == place and name is not None
        ]
        return PlaceUse(
            place=place,
            limit_bytes=self._limit(place),
            held_bytes=self.account.held_bytes(place),
            peak_bytes=self.peak_bytes(place),
            holders=tuple(sorted(holders, key=lambda holder: -holder.peak_bytes)),
        )

    def _check(self, place: str, needed: int, size_bytes: int, force: bool) -> None:
        limit = self._limit(place)
        if limit is not None and needed > limit and not force:
            names = [name for where, name in self.account.peaks if where == place and name not in (None, "others")]
            held = {name: self.account.held_by(place, name) for name in names if name is not None}
            beside = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items() if size)
            raise BudgetError(
                f"{format_bytes(size_bytes)} more on {place} would make {format_bytes(needed)}, above the budget of "
                f"{format_bytes(limit)}{f' (held: {beside})' if beside else ''}; a budget of at least "
                f"{needed} bytes has room for them"
            )

    def _limit(self, place: str) -> int | None:
        if place == "device":
            return self.device_bytes
        if place == "host":
            return self.host_bytes
        return self.disk_bytes.get(Path(place))


class Charges:
    """All charges of one holder to an account, which are given back together.

    Without an account, charging does nothing.
    """

    @checked("Charges(budget, 'offload')")
    def __init__(self, budget: Budget | None, holder: str):
        self.budget = None if budget is None else budget.named(holder)
        """The account, under the holder's name."""
        self._charged: list[tuple[str, int]] = []
        self._footprint: Footprint | None = None

    @checked("charges.are_of(budget)")
    def are_of(self, budget: Budget) -> bool:
        """Return whether these charges are recorded in the account of ``budget``."""
        return self.budget is not None and self.budget.account is budget.account

    @checked("charges.charge('device', 2**20)", size_bytes=0)
    def charge(self, place: str, size_bytes: int) -> None:
        """Take ``size_bytes`` of ``place``. Raises ``BudgetError`` if that would exceed the limit."""
        if self.budget is not None:
            self.budget.charge(place, size_bytes)
            self._charged.append((place, size_bytes))

    @checked("charges.enter(Footprint(step_bytes=2**20))")
    def enter(self, footprint: Footprint, *, force: bool = False) -> None:
        """Take the device memory that this holder's step needs, and give back what it took before.

        Raises ``BudgetError`` if it does not fit; then the earlier footprint stays.
        """
        if self.budget is None:
            return
        self.budget.enter(footprint, instead_of=self._footprint, force=force)
        self._footprint = footprint

    def give_back(self) -> None:
        """Give back everything that was charged or entered."""
        while self._charged and self.budget is not None:
            self.budget.credit(*self._charged.pop())
        if self._footprint is not None and self.budget is not None:
            self.budget.leave(self._footprint)
            self._footprint = None


def _directories(disk: DiskSpec) -> dict[Path, int | None]:
    if disk is None:
        return {}
    if isinstance(disk, str | os.PathLike):
        return {Path(disk): None}
    if isinstance(disk, Mapping):
        return {Path(path): None if size is None else parse_bytes(size) for path, size in disk.items()}
    if isinstance(disk, list | tuple) and all(isinstance(path, str | os.PathLike) for path in disk):
        return {Path(path): None for path in disk}
    raise TypeError(
        f"`disk` must be a directory ('/nvme'), a list of them, or a dict of sizes ({{'/nvme': '1TiB'}}), got {disk!r}"
    )
