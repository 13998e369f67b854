"""Memory that several processes map: without a name, so that it is gone when the last of them ends, however it ends."""

import mmap
import os
import weakref
from collections.abc import Callable

import torch

from penstock.probe import ledger
from penstock.units import format_bytes

_NAME = "penstock-rows"
"""Name in ``/proc``, for people who look there."""
_STEP_BYTES = 256 * 2**20
"""Bytes that are reserved at once; between two steps the process shows that it is alive."""


class SharedMemory:
    """A file in memory (``memfd``), mapped. A limit on ``/dev/shm``, as containers have, does not count for it."""

    def __init__(self, descriptor: int, size_bytes: int, num_processes: int):
        self.descriptor = descriptor
        """The open file; another process opens it through ``/proc``."""
        self._closer = weakref.finalize(self, os.close, descriptor)
        self._map = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        part_bytes = size_bytes // num_processes
        ledger.charge(part_bytes)
        weakref.finalize(self._map, ledger.charge, -part_bytes)

    @staticmethod
    def create(size_bytes: int, num_processes: int, alive: Callable[[], None]) -> "SharedMemory":
        """Reserve zeros for ``num_processes``, calling ``alive`` now and then.

        Raises ``MemoryError`` if the system has none left. Reserved here, memory cannot be missing later, when the
        process that writes it would be killed.
        """
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size_bytes)
            for start in range(0, size_bytes, _STEP_BYTES):
                os.posix_fallocate(descriptor, start, min(_STEP_BYTES, size_bytes - start))
                alive()
        except OSError as error:
            os.close(descriptor)
            raise MemoryError(f"cannot reserve {format_bytes(size_bytes)} of shared memory: {error}") from error
        return SharedMemory(descriptor, size_bytes, num_processes)

    @staticmethod
    def open(process: int, descriptor: int, size_bytes: int, num_processes: int) -> "SharedMemory":
        """Map the memory that another process has open. Raises ``OSError`` if the system forbids that."""
        path = f"/proc/{process}/fd/{descriptor}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # such as a number told by an earlier process
            raise OSError(f"{path} is not memory that ranks share")
        return SharedMemory(os.open(path, os.O_RDWR | os.O_CLOEXEC), size_bytes, num_processes)

    def part(self, start: int, size_bytes: int) -> torch.Tensor:
        """Return a part of it, ``uint8``; the tensor keeps the memory mapped."""
        return self._bytes[start : start + size_bytes]

    def close_descriptor(self) -> None:
        """Close the file, once everybody has mapped it; the map stays."""
        self._closer()
