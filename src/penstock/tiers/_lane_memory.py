"""The device memory of copies in, which belongs to their stream.

A caching allocator gives a freed block back to the stream that allocated it. If copies in took their memory from the
computing stream, each would have to wait for all work that the device had been given so far, since the block may have
been any operator's. In memory of their own they wait for what used it when it was given back, and for nothing else.
"""

import bisect
import weakref
from collections import deque
from functools import partial

import torch

from penstock.devices import Stream, StreamEvent, Streams
from penstock.tiers._host_work import StreamQueue


class LaneMemory:
    """The blocks that one lane's stream has allocated and that nobody has given back."""

    def __init__(self, streams: Streams, stream: Stream, queue: StreamQueue):
        self._streams, self._stream, self._queue = streams, stream, queue
        self._starts: list[int] = []
        """Addresses of the blocks, ascending."""
        self._ends: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """The storages by address. PyTorch keeps a storage's Python object as long as the storage, so that these tell
        when it is freed (`torch/csrc/StorageMethods.cpp`).
        """
        self._freed: deque[tuple[int, weakref.ref[torch.UntypedStorage]]] = deque()
        """Entries of ``_storages`` that were freed, in any thread, without having been given back."""

    def allocate(self, size_bytes: int, into: torch.UntypedStorage) -> None:
        """Give a storage of 0 bytes memory of the lane."""
        is_unsaid = False
        while self._freed:
            address, storage = self._freed.popleft()
            is_unsaid |= self._storages.get(address) is storage and self._forget(address)
        if is_unsaid:
            self._wait_for_all()
        self._streams.allocate(size_bytes, stream=self._stream, into=into)
        start, end = into.data_ptr(), into.data_ptr() + size_bytes
        is_unsaid = False
        for other in self._within(start, end):  # somebody has emptied these and did not say so
            is_unsaid |= self._forget(other)
        if is_unsaid:
            self._wait_for_all()
        bisect.insort(self._starts, start)
        self._ends[start] = end
        self._storages[start] = weakref.ref(into, partial(_note_freed, self._freed, start))

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is in the lane's memory."""
        return storage.data_ptr() in self._ends

    def give_back(self, address: int, after: StreamEvent = None) -> None:
        """Let the lane wait, before it uses a block again, for all work that the device was given, and for an event.

        Does nothing for memory that is not the lane's.
        """
        if not self._forget(address):
            return
        self._wait_for_all()  # it may have been read after its copy out had begun
        if after is not None:
            self._let_wait(after)

    def hand_over(self, storage: torch.UntypedStorage) -> None:
        """Let others have a storage's memory: whoever gets it next waits for what uses it on the current stream."""
        if self.has(storage):  # when it is freed, this lane waits for whichever stream is current then
            self._streams.share(storage, self._streams.current())

    def _wait_for_all(self) -> None:
        self._let_wait(self._streams.record(self._streams.current(), is_timed=False))

    def _let_wait(self, event: StreamEvent) -> None:
        self._queue.put(lambda: self._streams.wait(self._stream, event))

    def _within(self, start: int, end: int) -> list[int]:
        """Return the blocks that share an address with a range."""
        index = bisect.bisect_right(self._starts, start)
        first = index - (index > 0 and self._ends[self._starts[index - 1]] > start)
        return self._starts[first : bisect.bisect_left(self._starts, end, lo=index)]

    def _forget(self, address: int) -> bool:
        """Forget a block; return whether there was one."""
        if address not in self._ends:
            return False
        del self._ends[address], self._storages[address], self._starts[bisect.bisect_left(self._starts, address)]
        return True


def _note_freed(
    freed: deque[tuple[int, "weakref.ref[torch.UntypedStorage]"]],
    address: int,
    storage: "weakref.ref[torch.UntypedStorage]",
) -> None:
    freed.append((address, storage))
