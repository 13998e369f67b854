"""A device whose streams run in any order that the events allow, to catch copies that race."""

import ctypes
import random
import threading
import weakref

import torch

from penstock.tiers import EventLog, HostTier, Waterfall
from penstock.tiers._handles import Handles
from penstock.tiers._stream_mover import StreamMover


class FakeEvent:
    def __init__(self):
        self.is_passed = False


class FakeStream:
    def __init__(self):
        self.queue = []  # callables, FakeEvents to pass, and ("wait", event)


class FakeStreams:
    """Work is queued; the device does it bit by bit, picking streams at random, whenever the host looks.

    Device memory is a pool of blocks that is handed out again, last freed first, the moment the host drops a storage,
    as a caching allocator does. `obeys=False` ignores waits: a device on which every missing wait shows.
    """

    def __init__(self, seed, *, obeys=True):
        self.random = random.Random(seed)
        self.obeys = obeys
        self.compute = FakeStream()
        self.streams = [self.compute]
        self.lock = threading.RLock()
        self.free_blocks = {}

    def current(self):
        return self.compute

    def create(self):
        self.streams.append(FakeStream())
        return self.streams[-1]

    def record(self, stream, *, is_timed=True):
        event = FakeEvent()
        with self.lock:
            stream.queue.append(event)
        return event

    def wait(self, stream, event):
        with self.lock:
            stream.queue.append(("wait", event))

    def is_done(self, event):
        with self.lock:
            for _ in range(self.random.randrange(4)):
                self.step()
            return event.is_passed

    def synchronize(self, event):
        while True:
            with self.lock:
                if event.is_passed:
                    return
                assert self.step(), "the streams wait for each other"

    def elapsed_s(self, start, end):
        assert start.is_passed and end.is_passed
        return 1e-3

    def copy(self, stream, destination, source):
        target, origin, size = destination.data_ptr(), source.data_ptr(), source.nbytes
        assert destination.nbytes == size
        # Half now, half later: a copy takes time, and others run meanwhile.
        with self.lock:
            stream.queue.append(lambda: ctypes.memmove(target, origin, size // 2))
            stream.queue.append(lambda: ctypes.memmove(target + size // 2, origin + size // 2, size - size // 2))

    def allocate(self, size_bytes, *, stream=None, into=None):
        assert stream is None
        if into is not None:
            into.resize_(size_bytes)
            return into
        blocks = self.free_blocks.setdefault(size_bytes, [])
        block = blocks.pop() if blocks else torch.zeros(size_bytes, dtype=torch.uint8)
        memory = (ctypes.c_char * size_bytes).from_address(block.data_ptr())
        weakref.finalize(memory, blocks.append, block)
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def share(self, storage, stream):
        raise AssertionError("one compute stream only")

    def launch(self, work):
        """Queues a kernel of the computation."""
        with self.lock:
            self.compute.queue.append(work)

    def finish(self):
        with self.lock:
            while self.step():
                pass
            assert not any(stream.queue for stream in self.streams)

    def step(self):
        """Does one thing on one stream; False when there is nothing left that may run."""
        ready = [stream for stream in self.streams if stream.queue and self.may_run(stream.queue[0])]
        if not ready:
            return False
        work = self.random.choice(ready).queue.pop(0)
        if isinstance(work, FakeEvent):
            work.is_passed = True
        elif not isinstance(work, tuple):
            work()
        return True

    def may_run(self, work):
        return not self.obeys or not isinstance(work, tuple) or work[1].is_passed


def waterfall_on(streams, tiers, *, max_in_flight, verify, staging=None):
    """A waterfall below a fake device, with pageable staging memory, by default of twice ``max_in_flight``."""
    handles, events = Handles(), EventLog()
    memory = HostTier(2 * max_in_flight if staging is None else staging, pinned=False)
    mover = StreamMover(streams, memory, handles, events, max_in_flight_bytes=max_in_flight, verify=verify)
    return Waterfall(tiers, mover, handles, events)
