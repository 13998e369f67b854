"""A tier of one's own, as a user would write it: objects of a store, each put and fetched whole."""

import threading

from penstock.errors import TierFullError
from penstock.links import Place
from penstock.tiers import Extent, Piece, Tier

BLOCK_BYTES = 4096


class ObjectStore(Tier):
    """Keeps each extent as one object of a dictionary, which stands for a store in a network."""

    place = Place("store")
    alignment_bytes = 1

    def __init__(self, capacity_bytes):
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._objects = {}
        self._count = 0

    @property
    def capacity_bytes(self):
        return self._capacity_bytes

    @property
    def used_bytes(self):
        with self._lock:
            return sum(map(len, self._objects.values()))

    reserved_bytes = used_bytes

    def reserve(self, size_bytes):
        room_bytes = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        if self.used_bytes + room_bytes > self._capacity_bytes:
            raise TierFullError(f"no room for {size_bytes} B in the store")
        with self._lock:
            self._count += 1
            self._objects[self._count] = bytearray(room_bytes)
            return Extent(size_bytes, (Piece(self._count, 0, size_bytes),))

    def release(self, extent):
        with self._lock:
            self._objects.pop(extent.pieces[0].file, None)

    def close(self):
        with self._lock:
            self._objects.clear()

    def file_name(self, piece):
        return f"object {piece.file}"

    def _write_some(self, piece, start, view):
        self._objects[piece.file][start : start + len(view)] = view
        return len(view)

    def _read_some(self, piece, start, view):
        view[:] = self._objects[piece.file][start : start + len(view)]
        return len(view)
