"""A tier that fails on demand."""

import errno
import random
import threading
from collections import Counter
from collections.abc import Callable

from penstock.arguments import checked
from penstock.errors import TierFullError
from penstock.tiers import Extent, Piece, Tier


class FaultyTier(Tier):
    """A tier that passes every call on to ``inner``, and sometimes fails.

    Each fault's argument is the probability, from 0 to 1, that a call has that fault. ``seed`` and the order of calls
    determine which calls fail. ``injected`` counts the faults.

    Args:
        inner: the tier that really holds the bytes.
        seed: seed of the random choices.
        full: ``reserve`` finds no space.
        write_error: a write fails with ``EIO``.
        read_error: a read fails with ``EIO``.
        short_write: a write moves only part of its bytes.
        short_read: a read returns only part of the requested bytes.
        corrupt: a read returns one changed byte.
        wait: called before each transfer, to slow it down or to hold it back.
    """

    @checked(
        "FaultyTier(DiskTier('/nvme'), write_error=0.1)",
        full=0,
        write_error=0,
        read_error=0,
        short_write=0,
        short_read=0,
        corrupt=0,
    )
    def __init__(
        self,
        inner: Tier,
        *,
        seed: float = 0,
        full: float = 0.0,
        write_error: float = 0.0,
        read_error: float = 0.0,
        short_write: float = 0.0,
        short_read: float = 0.0,
        corrupt: float = 0.0,
        wait: Callable[[], None] | None = None,
    ):
        probabilities = {
            "full": full,
            "write_error": write_error,
            "read_error": read_error,
            "short_write": short_write,
            "short_read": short_read,
            "corrupt": corrupt,
        }
        for name, probability in probabilities.items():
            if probability > 1:
                raise ValueError(f"`{name}` must be a probability from 0 to 1, got {probability}")
        self.place = inner.place
        self.alignment_bytes = inner.alignment_bytes
        self.is_disk = inner.is_disk
        self.injected: Counter[str] = Counter()
        """Number of times that each fault was injected."""
        self._inner = inner
        self._random = random.Random(seed)  # noqa: S311  # faults, not secrets
        self._lock = threading.Lock()
        self._wait = wait
        self._probability = probabilities

    @property
    def capacity_bytes(self) -> int:
        """Capacity of the inner tier."""
        return self._inner.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes used in the inner tier."""
        return self._inner.used_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved in the inner tier."""
        return self._inner.reserved_bytes

    @checked("tier.reserve(4096)", size_bytes=1)
    def reserve(self, size_bytes: int) -> Extent:
        """Reserve space in the inner tier. Raises ``TierFullError`` where that fault is injected."""
        if self._strikes("full"):
            raise TierFullError(f"no room for {size_bytes} bytes (injected)")
        return self._inner.reserve(size_bytes)

    @checked("tier.release(extent)")
    def release(self, extent: Extent) -> None:
        """Give the space back to the inner tier."""
        self._inner.release(extent)

    def close(self) -> None:
        """Close the inner tier."""
        self._inner.close()

    @checked("tier.file_name(extent.pieces[0])")
    def file_name(self, piece: Piece) -> str:
        """Return the file name of a piece in the inner tier."""
        return self._inner.file_name(piece)

    def _write_some(self, piece: Piece, offset: int, view: memoryview) -> int:
        if self._wait is not None:
            self._wait()
        if self._strikes("write_error"):
            raise OSError(errno.EIO, "Input/output error (injected)")
        if self._strikes("short_write"):
            view = view[: self._part(len(view))]
        return self._inner._write_some(piece, offset, view)

    def _read_some(self, piece: Piece, offset: int, view: memoryview) -> int:
        if self._wait is not None:
            self._wait()
        if self._strikes("read_error"):
            raise OSError(errno.EIO, "Input/output error (injected)")
        if self._strikes("short_read"):
            view = view[: self._part(len(view))]
        count = self._inner._read_some(piece, offset, view)
        if count and self._strikes("corrupt"):
            with self._lock:
                victim = self._random.randrange(count)
            view[victim] ^= 0xFF
        return count

    def _strikes(self, fault: str) -> bool:
        with self._lock:
            strikes = self._random.random() < self._probability[fault]
            self.injected[fault] += strikes
        return strikes

    def _part(self, size_bytes: int) -> int:
        """Return the size of a random part of a request, in whole blocks of the tier's alignment."""
        blocks = max(1, size_bytes // self.alignment_bytes)
        with self._lock:
            return min(size_bytes, self._random.randint(1, blocks) * self.alignment_bytes)
