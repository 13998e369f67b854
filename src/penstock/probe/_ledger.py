"""A ledger of main memory that PyTorch's allocator events on the computing thread do not show.

The profiler sees what the computing thread allocates and frees. It cannot see slabs of the host tier, edges of parked
storages and buffers of lane threads. The code that holds such bytes charges them here, and the peak meter adds the
ledger's running sum to its own. A charge costs a lock and an addition.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.arguments import checked


class Ledger:
    """A running sum of bytes, with its history while somebody records it. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may charge while this thread charges
        self._held_bytes = 0
        self._recordings: list[list[tuple[int, int]]] = []

    @property
    def held_bytes(self) -> int:
        """Bytes charged and not yet credited."""
        return self._held_bytes

    @checked("penstock.probe.ledger.charge(2**20)")
    def charge(self, size_bytes: int) -> None:
        """Add ``size_bytes``; a negative number gives bytes back."""
        with self._lock:
            self._held_bytes += size_bytes
            for recording in self._recordings:
                recording.append((time.time_ns(), size_bytes))

    @contextmanager
    def record(self) -> Iterator[list[tuple[int, int]]]:
        """Yield a list that collects ``(unix time in ns, change in bytes)`` until the block ends."""
        recording: list[tuple[int, int]] = []
        with self._lock:
            self._recordings.append(recording)
        try:
            yield recording
        finally:
            with self._lock:
                self._recordings = [other for other in self._recordings if other is not recording]


ledger = Ledger()
"""The ledger of this process."""
