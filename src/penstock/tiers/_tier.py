"""Tiers: places where bytes live. A tier hands out extents and moves bytes in and out of them."""

import abc
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypedDict, final

import torch

from penstock.arguments import checked
from penstock.errors import TierReadError, TierWriteError
from penstock.links import Place

_SAMPLE_BYTES = 32 * 2**20
_MAX_IDLE = 3
"""Number of calls in a row that may move less than a block before a transfer counts as failed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous part of an extent: one request's worth of one file or slab."""

    file: int
    """Index of the tier's file or slab."""
    offset: int
    """Bytes before the piece in that file or slab."""
    size_bytes: int
    """Its length, which may be less than the range reserved for it."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Space for ``size_bytes`` in a tier."""

    size_bytes: int
    """The bytes that were asked for."""
    pieces: tuple[Piece, ...]
    """The pieces, in order of the bytes that they hold."""


class _Where(TypedDict):
    tier: str
    file: str
    offset: int
    size_bytes: int


class Tier(abc.ABC):
    """A place where bytes live. Safe to use from any thread.

    ``reserve`` an extent, ``write`` and ``read`` its pieces, ``release`` it. A subclass implements the abstract
    methods; ``_write_some`` and ``_read_some`` may move fewer bytes than asked, as system calls do.
    """

    _rates: tuple[float, float] | None = None
    place: Place
    """The place that errors, events and reports name: `DISK`, `HOST`, or one of your own."""
    alignment_bytes: int
    """Alignment in bytes that direct transfers require of address, offset and length; 1 if they require none."""
    is_disk: bool = False
    """Whether its bytes are written to a disk, and wear it out."""
    is_memory: bool = False
    """Whether its bytes are in host memory, so that a device copies to and from ``tensor(extent)``."""

    @property
    def name(self) -> str:
        """Name of its place."""
        return self.place.name

    @property
    def talks_to_device(self) -> bool:
        """Whether a device can reach it directly, by ``write_storage`` and ``read_storage``."""
        return False

    @property
    @abc.abstractmethod
    def capacity_bytes(self) -> int:
        """The most bytes that it can hold."""

    @property
    @abc.abstractmethod
    def used_bytes(self) -> int:
        """Bytes in live extents, rounded as they are reserved."""

    @property
    @abc.abstractmethod
    def reserved_bytes(self) -> int:
        """Bytes taken from the system (``du`` does not show unnamed files)."""

    @abc.abstractmethod
    def reserve(self, size_bytes: int) -> Extent:
        """Reserve ``size_bytes`` (more than 0). Raises ``TierFullError`` if there is no space."""

    @abc.abstractmethod
    def release(self, extent: Extent) -> None:
        """Give the space of ``extent`` back. Nobody may read or write it after that."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back to the system. May be called again."""

    @abc.abstractmethod
    def file_name(self, piece: Piece) -> str:
        """Return the name of a piece's file or slab, for messages."""

    @final
    def rates_bytes_per_s(self) -> tuple[float, float]:
        """Return the write and read rates in bytes per second, for plans.

        The first call measures them with at most 32 MiB. Raises ``TierFullError`` if there is no space for that,
        ``TierWriteError`` and ``TierReadError``.
        """
        if self._rates is None:
            self._rates = _measured(self)
        return self._rates

    @checked("tier.tensor(extent)")
    def tensor(self, extent: Extent) -> torch.Tensor:
        """Return the extent's memory as ``uint8``, valid until the extent is released.

        Raises ``ValueError`` unless ``is_memory``.
        """
        raise ValueError(
            f"the {extent.size_bytes} bytes of this extent are in this {self.name} tier, not in memory; read one "
            "piece: tier.read(piece, memoryview(buffer))"
        )

    @checked("tier.write_storage(piece, storage)")
    def write_storage(self, piece: Piece, storage: torch.UntypedStorage) -> None:
        """Write device memory into ``piece``, by a blocking call. Raises ``ValueError`` unless ``talks_to_device``."""
        raise ValueError(_not_talking(self, piece, storage, "tier.write(piece, memoryview(buffer))"))

    @checked("tier.read_storage(piece, storage)")
    def read_storage(self, piece: Piece, storage: torch.UntypedStorage) -> None:
        """Fill device memory from ``piece``, by a blocking call. Raises ``ValueError`` unless ``talks_to_device``."""
        raise ValueError(_not_talking(self, piece, storage, "tier.read(piece, memoryview(buffer))"))

    @abc.abstractmethod
    def _write_some(self, piece: Piece, start: int, view: memoryview) -> int: ...

    @abc.abstractmethod
    def _read_some(self, piece: Piece, start: int, view: memoryview) -> int: ...

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {self.name} tier cannot be copied or pickled, since it owns memory or files; make another one"
        )

    @final
    @checked("tier.write(piece, memoryview(buffer))")
    def write(self, piece: Piece, view: memoryview) -> None:
        """Write ``view`` (``piece.size_bytes`` long) into ``piece``. Raises ``TierWriteError``."""
        self._transfer(self._write_some, piece, view, TierWriteError)

    @final
    @checked("tier.read(piece, memoryview(buffer))")
    def read(self, piece: Piece, view: memoryview) -> None:
        """Fill ``view`` (``piece.size_bytes`` long) from ``piece``. Raises ``TierReadError``."""
        self._transfer(self._read_some, piece, view, TierReadError)

    def _transfer(
        self,
        some: Callable[[Piece, int, memoryview], int],
        piece: Piece,
        view: memoryview,
        failure: type[TierReadError] | type[TierWriteError],
    ) -> None:
        """Move a whole piece by calls that may move less. A direct transfer continues at the block it stopped in."""
        if view.nbytes < piece.size_bytes:
            raise ValueError(f"`view` must have the {piece.size_bytes} bytes of the piece, got {view.nbytes}")
        done = num_idle = 0
        while done < piece.size_bytes:
            try:
                count = some(piece, done, view[done:])
            except OSError as error:
                reason = error.strerror or str(error)
                raise failure(**self._where(piece, done), reason=reason, errno=error.errno) from error
            reached = done + count
            if reached < piece.size_bytes:
                reached = reached // self.alignment_bytes * self.alignment_bytes
            num_idle = 0 if reached > done else num_idle + 1
            if count <= 0 or num_idle >= _MAX_IDLE:
                raise failure(**self._where(piece, done), reason=f"only {count} of the bytes were transferred")
            done = reached

    def _where(self, piece: Piece, done: int) -> _Where:
        return {
            "tier": self.name,
            "file": self.file_name(piece),
            "offset": piece.offset + done,
            "size_bytes": piece.size_bytes - done,
        }


def _measured(tier: Tier) -> tuple[float, float]:
    """Return the rates of one write and one read of a sample."""
    size_bytes = min(_SAMPLE_BYTES, tier.capacity_bytes) // tier.alignment_bytes * tier.alignment_bytes
    extent = tier.reserve(max(size_bytes, tier.alignment_bytes))
    memory = memoryview(mmap.mmap(-1, sum(piece.size_bytes for piece in extent.pieces)))
    memory[:] = os.urandom(len(memory))  # compression gains nothing on random bytes
    rates = []
    try:
        for transfer in (tier.write, tier.read):
            start_s, moved_bytes = time.perf_counter(), 0
            for piece in extent.pieces:
                transfer(piece, memory[moved_bytes : moved_bytes + piece.size_bytes])
                moved_bytes += piece.size_bytes
            rates.append(moved_bytes / (time.perf_counter() - start_s))
    finally:
        tier.release(extent)
    return rates[0], rates[1]


def _not_talking(tier: Tier, piece: Piece, storage: torch.UntypedStorage, instead: str) -> str:
    return (
        f"this {tier.name} tier cannot copy the {piece.size_bytes} bytes of a piece directly to or from "
        f"{storage.device}; {instead} goes through host memory"
    )
