"""What a tier is: a place where bytes live, which hands out extents and moves bytes in and out of them."""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypedDict, final

from penstock.arguments import checked
from penstock.errors import TierReadError, TierWriteError

_MAX_IDLE = 3
"""Calls in a row that may move less than a block before a transfer counts as failed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous part of an extent: one request's worth of one file or slab."""

    file: int
    """Which of the tier's files or slabs."""
    offset: int
    """Bytes before it there."""
    size_bytes: int
    """Its length, which may be less than the range reserved for it."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Room for ``size_bytes`` in a tier, in order of the bytes it holds."""

    size_bytes: int
    """What was asked for."""
    pieces: tuple[Piece, ...]
    """Where, in order of the bytes."""


class _Where(TypedDict):
    tier: str
    file: str
    offset: int
    size_bytes: int


class Tier(abc.ABC):
    """A place where bytes live. Safe to use from any thread.

    ``reserve`` room, ``write`` and ``read`` its pieces, ``release`` it. A subclass implements the abstract methods;
    ``_write_some`` and ``_read_some`` may move fewer bytes than asked, as the system calls do.
    """

    name: str
    """What errors and events call it: ``"disk"`` or ``"host"``."""
    alignment_bytes: int
    """What direct transfers want of address, offset and length; 1 where any will do."""
    is_disk: bool = False
    """Whether what it holds left main memory."""

    @property
    @abc.abstractmethod
    def capacity_bytes(self) -> int:
        """Bytes that it can hold at most."""

    @property
    @abc.abstractmethod
    def used_bytes(self) -> int:
        """Bytes in live extents, rounded as they are reserved."""

    @property
    @abc.abstractmethod
    def reserved_bytes(self) -> int:
        """Bytes taken from the system, which ``du`` does not show for nameless files."""

    @abc.abstractmethod
    def reserve(self, size_bytes: int) -> Extent:
        """Room for ``size_bytes`` (more than 0). Raises ``TierFullError`` where there is none."""

    @abc.abstractmethod
    def release(self, extent: Extent) -> None:
        """Gives the room of ``extent`` back. Nobody may read or write it any more."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives everything back to the system. May be called again."""

    @abc.abstractmethod
    def file_name(self, piece: Piece) -> str:
        """The file or slab of a piece, for messages."""

    @abc.abstractmethod
    def _write_some(self, piece: Piece, at: int, view: memoryview) -> int: ...

    @abc.abstractmethod
    def _read_some(self, piece: Piece, at: int, view: memoryview) -> int: ...

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {self.name} tier has memory or files of its own, which cannot be copied or pickled; make another one"
        )

    @final
    @checked("tier.write(piece, memoryview(buffer))")
    def write(self, piece: Piece, view: memoryview) -> None:
        """Writes ``view`` (``piece.size_bytes`` long) into ``piece``. Raises ``TierWriteError``."""
        self._transfer(self._write_some, piece, view, TierWriteError)

    @final
    @checked("tier.read(piece, memoryview(buffer))")
    def read(self, piece: Piece, view: memoryview) -> None:
        """Fills ``view`` (``piece.size_bytes`` long) from ``piece``. Raises ``TierReadError``."""
        self._transfer(self._read_some, piece, view, TierReadError)

    def _transfer(
        self,
        some: Callable[[Piece, int, memoryview], int],
        piece: Piece,
        view: memoryview,
        failure: type[TierReadError] | type[TierWriteError],
    ) -> None:
        """Moves a whole piece by calls that may move less. A direct one goes on at the block it stopped in."""
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
                raise failure(**self._where(piece, done), reason=f"only {count} of the bytes came through")
            done = reached

    def _where(self, piece: Piece, done: int) -> _Where:
        return {
            "tier": self.name,
            "file": self.file_name(piece),
            "offset": piece.offset + done,
            "size_bytes": piece.size_bytes - done,
        }
