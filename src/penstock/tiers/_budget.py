"""The one account of bytes: how many a process may hold on the device, in host memory and on each disk."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import BudgetError, InternalError
from penstock.units import format_bytes, parse_bytes

Size = int | str
"""Bytes as an ``int``, or text such as ``"6GiB"``."""

Directory = str | os.PathLike[str]
DiskSpec = (
    Directory | list[Directory] | tuple[Directory, ...] | Mapping[str, Size | None] | Mapping[Path, int | None] | None
)
"""A directory, several of them, or directories with the bytes that each may take (``None``: what is free)."""


class Budget:
    """Limits in bytes for the device, host memory and directories on disks, and the account of what is held.

    ``Budget(device="40GiB", host="200GiB", disk={"/nvme0": "1TiB"})``: every argument may be left out, which sets no
    limit of our own (``disk`` left out means that no disk is used). Give the same object to several rooms and their
    sum stays below it. Methods are safe to use from any thread.

    Raises ``ValueError`` or ``TypeError`` for sizes that cannot be read.
    """

    def __init__(self, device: Size | None = None, host: Size | None = None, disk: DiskSpec = None):
        self.device_bytes = None if device is None else parse_bytes(device)
        """Limit on the device; ``None`` sets none."""
        self.host_bytes = None if host is None else parse_bytes(host)
        """Limit on host memory that Penstock takes; ``None`` sets none."""
        self.disk_bytes = _directories(disk)
        """Limit per directory; ``None`` stands for what the file system has free."""
        self._lock = threading.RLock()
        self._held: dict[str, int] = {}
        self._peak: dict[str, int] = {}

    def __repr__(self) -> str:
        def shown(limit: int | None) -> str:
            return "None" if limit is None else repr(format_bytes(limit))

        disk = ", ".join(f"{str(path)!r}: {shown(limit)}" for path, limit in self.disk_bytes.items())
        return f"Budget(device={shown(self.device_bytes)}, host={shown(self.host_bytes)}, disk={{{disk}}})"

    def charge(self, place: str, size_bytes: int, *, force: bool = False) -> None:
        """Takes ``size_bytes`` of ``"device"``, ``"host"`` or a directory given as text.

        Raises ``BudgetError`` where that would exceed the limit, unless ``force`` (bytes that exist already).
        """
        limit = self._limit(place)
        with self._lock:
            held = self._held.get(place, 0) + size_bytes
            if limit is not None and held > limit and not force:
                raise BudgetError(
                    f"{format_bytes(size_bytes)} more on {place} would make {format_bytes(held)}, above the budget of "
                    f"{format_bytes(limit)}; a budget of at least {format_bytes(held)} has room for them"
                )
            self._held[place] = held
            self._peak[place] = max(held, self._peak.get(place, 0))

    def credit(self, place: str, size_bytes: int) -> None:
        """Gives back ``size_bytes`` that were charged to ``place``."""
        with self._lock:
            held = self._held.get(place, 0) - size_bytes
            if held < 0:
                raise InternalError(f"{size_bytes} bytes given back to {place}, of which fewer were taken")
            self._held[place] = held

    def held_bytes(self, place: str) -> int:
        """Bytes of ``place`` that are taken now."""
        return self._held.get(place, 0)

    def peak_bytes(self, place: str) -> int:
        """The most bytes of ``place`` that were ever taken at once."""
        return self._peak.get(place, 0)

    def _limit(self, place: str) -> int | None:
        if place == "device":
            return self.device_bytes
        if place == "host":
            return self.host_bytes
        return self.disk_bytes.get(Path(place))


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
        f"disk is a directory ('/nvme'), a list of them, or a dict of sizes ({{'/nvme': '1TiB'}}), not {disk!r}"
    )
