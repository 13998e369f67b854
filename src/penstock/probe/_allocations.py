"""A record of what PyTorch's allocator for the CPU takes and gives back, without a profiler.

`native/memory.c` counts: any number of recordings may begin and end anywhere, in any order and in several threads, and
nothing of the user's program notices. On a machine without a C compiler, and with a wheel that has no library, the
profiler of PyTorch records instead. Of those only one can run, and it must not begin or end inside of what runs: a
region that began under one recording and ends under the next writes to memory of the first. So there only whole calls
are recorded (`peak_bytes` and blocks of the user's), while no other profiler runs, and `counts` is false.
"""

import ctypes
import functools
import itertools
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from penstock import native

Event = tuple[int, int, int]
"""Unix time in ns, address, and bytes; no more than 0 bytes say that the block was given back."""
_EVENT = struct.Struct("qQq")
_SILENT = "6"
"""A log level of Kineto that is above all of its messages."""
_ERRORS = 2
"""PyTorch's log level for errors."""


@functools.cache
def _counter() -> ctypes.CDLL | None:
    """Return the library that counts; ``None`` if it cannot be had or does not see PyTorch's allocator."""
    library = native.memory_library()
    return library if library is not None and _sees_blocks(library) else None


def _sees_blocks(library: ctypes.CDLL) -> bool:
    """Whether a tensor that comes and goes is seen, as it is not if a build of PyTorch allocates in another way.

    Meanwhile other threads may free what is theirs, and garbage may be collected.
    """
    with _counted(library) as events:
        tensor = torch.empty(4321, dtype=torch.uint8, device="cpu")
        address, size_bytes = tensor.data_ptr(), tensor.nbytes
        del tensor
    seen = [size for _, place, size in events if place == address]  # others may have the place before and afterwards
    return (size_bytes, -1) in itertools.pairwise(seen)


def counts() -> bool:
    """Return whether allocations are counted, so that recordings may begin and end anywhere."""
    return _counter() is not None


@contextmanager
def record() -> Iterator[list[Event]]:
    """Yield a list that holds, once the block has ended, what this thread took and what was given back, in order.

    Raises ``RuntimeError`` if the profiler has to record and is running already.
    """
    library = _counter()
    with _profiled() if library is None else _counted(library) as events:
        yield events


@contextmanager
def _counted(library: ctypes.CDLL) -> Iterator[list[Event]]:
    events: list[Event] = []
    recording, memory = library.penstock_memory_begin(), ctypes.c_void_p()
    if not recording:
        raise MemoryError("no memory is left to record what PyTorch's allocator does")
    try:
        yield events
    finally:
        num_events = library.penstock_memory_end(recording, ctypes.byref(memory))
        raw = ctypes.string_at(memory, num_events * _EVENT.size) if num_events > 0 and memory.value else b""
        library.penstock_memory_free(recording)
        events += _EVENT.iter_unpack(raw)
        if num_events < 0:
            raise MemoryError("no memory was left to record what PyTorch's allocator does")


_profiling = threading.Lock()


@contextmanager
def _profiled() -> Iterator[list[Event]]:
    """Record with PyTorch's profiler, which writes nothing to standard error meanwhile.

    Kineto writes lines with ``USDT``. It reads its log level from the environment when the first profiler of the
    process starts; a level that the user has set is kept. The allocator writes one line for every thousand freed blocks
    that were allocated before. It uses PyTorch's own log level.
    """
    # the process has one: that of another thread would be stopped too early, and then crash
    is_running = torch.autograd.profiler._is_profiler_enabled or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    if is_running or not _profiling.acquire(blocking=False):
        raise RuntimeError(
            "a PyTorch profiler is already running, and two of them break each other. Measure outside of it: "
            "penstock.probe.peak_bytes(step). With a C compiler (apt-get install gcc) memory is measured without one"
        )
    try:
        name, profiler = "KINETO_LOG_LEVEL", torch.autograd.profiler.profile(profile_memory=True)
        before, events = os.environ.setdefault(name, _SILENT), list[Event]()
        with _errors_only():
            try:
                profiler.__enter__()
            finally:
                if before is _SILENT:
                    del os.environ[name]
            try:
                yield events
            finally:
                profiler.__exit__(None, None, None)
                events += _blocks(profiler.kineto_results)
    finally:
        _profiling.release()


@contextmanager
def _errors_only() -> Iterator[None]:
    """Make PyTorch's C++ code log only errors inside the block, if its library lets us set that."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        yield
        return
    before, level.value = level.value, max(level.value, _ERRORS)
    try:
        yield
    finally:
        level.value = before


def _blocks(results: Any) -> list[Event]:  # any: a binding of kineto
    """Return the allocator's events in order, from the profiler's."""
    blocks, nodes = [], list(results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.tag == torch._C._profiler._EventType.Allocation:
            blocks.append((node.start_time_ns, node.typed[1].ptr, node.typed[1].alloc_size))
    return sorted(blocks, key=lambda block: block[0])
