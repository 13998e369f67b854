"""The rows of files that the page cache holds: they are copied from a map, and need no request to the disk."""

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from penstock.storages import address
from penstock.unified._library import threads_for
from penstock.unified._table import Table

_GROUP_PAGES = 32
"""Pages that the system is asked about at once, as in native/unified.c."""
_SAMPLED_PAGES = 64
_LONGEST_WAIT_S = 64.0
_FAULTY_SHARE = 1 / 64


class CPageCache(ctypes.Structure):
    """The ``Cache`` struct of native/unified.c."""

    _fields_ = (
        ("maps", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("page_bytes", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("groups", ctypes.c_void_p),
        ("num_absent", ctypes.c_void_p),
        ("num_threads", ctypes.c_int64),
    )


class PageCache:
    """Maps of a table's files, and which of their pages are known to be in the page cache.

    The system tells that (``mincore``) only to those who own a file or may write to it; to all others it says that
    every page is there. For such a file a few pages are sampled, and its map is used only while all of those are there.
    """

    def __init__(self, maps: Sequence[mmap.mmap], sampled: int | None):
        self._maps = [np.frombuffer(pages, dtype=np.uint8) for pages in maps]  # each keeps its map open
        self._addresses = torch.tensor([pages.ctypes.data for pages in self._maps], device="cpu")
        self._sizes = torch.tensor([len(pages) for pages in self._maps], device="cpu")
        self._num_groups = -(-max(len(pages) for pages in self._maps) // _group_bytes())
        self._groups = torch.zeros(len(maps), self._num_groups, dtype=torch.int64, device="cpu")
        self._num_absent = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._sampled = sampled
        self._closer = weakref.finalize(self, lambda: None if sampled is None else os.close(sampled))
        self._generator = torch.Generator(device="cpu")
        self._is_used, self._next_s, self._wait_s = sampled is None, 0.0, 1.0

    @staticmethod
    def of(tables: Sequence[Table], descriptors: Sequence[int]) -> "PageCache | None":
        """Map the tables' files; ``None`` if that is not possible."""
        try:
            maps = [
                mmap.mmap(descriptor, table.end_byte, mmap.MAP_SHARED, mmap.PROT_READ)
                for table, descriptor in zip(tables, descriptors, strict=True)
                if table.end_byte
            ]
            if not maps or len(maps) < len(tables):
                return None
            sampled = None
            if not all(map(is_told_of, descriptors)):
                if len(tables) > 1:
                    return None
                sampled = os.open(tables[0].path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError):  # such as a file system without maps, or a limit of the address space
            return None
        for pages in maps:
            pages.madvise(mmap.MADV_RANDOM)
        return PageCache(maps, sampled)

    def usable(self, row_bytes: int) -> CPageCache | None:
        """Return what the C library copies from for a batch of that size; ``None`` if too little is in the cache."""
        if self._sampled is not None and time.monotonic() >= self._next_s:
            self._sample(self._sampled)
        if not self._is_used:
            return None
        return CPageCache(
            maps=address(self._addresses), sizes=address(self._sizes), page_bytes=mmap.PAGESIZE,
            num_groups=self._num_groups, groups=address(self._groups), num_absent=address(self._num_absent),
            num_threads=threads_for(row_bytes),
        )  # fmt: skip

    def learn(self, num_rows: int, num_faults: int) -> None:
        """Note how many of the copied rows were not there after all."""
        if self._sampled is not None and num_faults > _FAULTY_SHARE * num_rows:
            self._is_used, self._next_s = False, time.monotonic() + self._wait_s

    def close(self) -> None:
        """Close the maps; nobody may be reading them."""
        self._maps, self._is_used, self._sampled = [], False, None
        self._closer()

    def _sample(self, descriptor: int) -> None:
        """Look for pages that are missing. Each that is found comes into the cache, so this is done ever less often."""
        places = torch.rand(_SAMPLED_PAGES, generator=self._generator, dtype=torch.float64, device="cpu")
        places = (places * len(self._maps[0])).long()
        self._is_used = all(_is_there(descriptor, byte) for byte in places.tolist())
        self._wait_s = 1.0 if self._is_used else min(_LONGEST_WAIT_S, 2 * self._wait_s)
        self._next_s = time.monotonic() + self._wait_s


def known_bytes_for(file_bytes: int) -> int:
    """Return the bytes of what is known of a file's pages."""
    return 8 * -(-file_bytes // _group_bytes())


def is_told_of(descriptor: int) -> bool:
    """Whether the system tells this process which pages of a file are in the page cache."""
    state = os.fstat(descriptor)
    return state.st_uid == os.geteuid() or os.access(f"/proc/self/fd/{descriptor}", os.W_OK, effective_ids=True)


def _is_there(descriptor: int, byte: int) -> bool:
    try:
        return bool(os.preadv(descriptor, [bytearray(1)], byte, os.RWF_NOWAIT))
    except OSError:  # not there, or a file system that cannot say
        return False


def _group_bytes() -> int:
    return _GROUP_PAGES * mmap.PAGESIZE
