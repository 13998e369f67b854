"""Measurement of the true peak memory of a step in bytes, on an accelerator and on a CPU.

On an accelerator the allocator counts. On the CPU PyTorch has no counter; the peak is the bytes of tensors alive at the
start, plus the running sum of what the computing thread allocates and frees as the profiler reports it, plus the ledger
of memory that the profiler cannot see (`_ledger.py`). The time stamps of both come from the same clock, and their
changes are merged in that order.

Known limits. The profiler does not report the freeing of memory that was allocated before it started. Such bytes count
as held to the end, and ``released_bytes`` says how many they are (inside the measured code, zero gradients in place
instead of dropping them). Memory that a library takes without PyTorch's allocator (oneDNN scratch space, numpy) shows
only in ``rss_bytes``. Two profilers break each other, so measuring inside a profiled region raises an error.
"""

import ctypes
import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.arguments import checked
from penstock.devices import Allocator, Backend, backend_of, used_device
from penstock.probe._ledger import ledger
from penstock.storages import id_of, storage_of

_SILENT = "6"
"""A log level of Kineto that is above all of its messages."""
_ERRORS = 2
"""PyTorch's log level for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakReport:
    """The memory that a call took. All sizes are bytes on the measured device."""

    peak_bytes: int
    """The most that was held at once: parameters, gradients, optimizer state, activations, workspaces."""
    start_bytes: int
    """Bytes held before the call."""
    activation_bytes: int
    """``peak_bytes - start_bytes``: the activation peak, if gradients were already allocated at the start."""
    released_bytes: int
    """Part of ``start_bytes`` that the call released; on CPU the peak still counts it as held. 0 on an accelerator."""
    rss_bytes: int
    """The most main memory that the process had resident during the call, including libraries and the interpreter."""
    requested_bytes: int
    """Accelerator: the most that was requested, which ``peak_bytes`` rounds up. CPU: equal to ``peak_bytes``."""
    reserved_bytes: int
    """Accelerator: the most that the caching allocator had taken from the device. CPU: equal to ``peak_bytes``."""
    timeline: tuple[tuple[float, int], ...]
    """``(seconds of time.time(), bytes held)`` after each change. Empty on an accelerator."""
    result: Any  # any type the function returns
    """The value that the call returned."""


class MemoryRecording:
    """The result of ``record_memory``, filled when its block ends."""

    report: PeakReport
    blocks: list[tuple[int, int, int]]
    """CPU: ``(unix time in ns, address, bytes)`` of every allocation, and of every free with negative bytes."""


@checked("penstock.probe.peak_bytes(lambda: step(batch))")
def peak_bytes(function: Callable[[], Any], *, device: torch.device | str | None = None) -> PeakReport:
    """Call ``function()`` once and report the peak of memory on ``device``.

    ``device`` is ``"cpu"`` or an accelerator; by default the current accelerator if this process has used one, else the
    CPU. Raises ``RuntimeError`` on CPU while a profiler is running, and whatever the function raises.

    >>> import torch
    >>> from penstock import probe
    >>> probe.peak_bytes(lambda: torch.zeros(2**18).add(1).sum(), device="cpu").activation_bytes // 2**20
    2
    """
    with record_memory(device) as recording:
        result = function()
    report = recording.report
    return PeakReport(
        **{name: getattr(report, name) for name in PeakReport.__slots__ if name != "result"}, result=result
    )


@contextmanager
@checked("with penstock.probe.record_memory('cpu') as recording")
def record_memory(
    device: torch.device | str | None = None, *, this_thread_only: bool = False
) -> Iterator[MemoryRecording]:
    """Measure the memory of a block; ``recording.report`` exists once the block has ended. See ``peak_bytes``.

    ``this_thread_only`` is for a CPU on which other Python threads run. Then neither the tensors alive at the start
    count (other threads must not run while all objects are searched) nor the ledger, and what the block frees of those
    tensors counts as held.
    """
    if device is None:
        device = used_device()
    backend, recording = backend_of(device), MemoryRecording()
    if backend.allocator is None:
        measured = _record_cpu(recording, this_thread_only)
    else:
        measured = _record_counted(backend, backend.allocator, recording)
    with measured:
        yield recording


@checked("penstock.probe.can_record('cpu')")
def can_record(device: torch.device | str) -> bool:
    """Return whether ``record_memory`` works on ``device`` now: on the CPU not while a PyTorch profiler runs."""
    if torch.device(device).type != "cpu":
        return True
    if any(thread != threading.get_ident() for thread, _ in _passive):
        return False  # profilers of several threads break each other, and only the thread that began one can end it
    return bool(_passive) or not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def live_storages(device_type: str = "cpu") -> dict[int, StorageWeakRef]:
    """Return weak references to the storages of all tensors that Python can reach, including gradients, by identity."""
    live: dict[int, StorageWeakRef] = {}
    kinds = _tensor_types()  # a process has half a million objects, and a set lookup costs a tenth of issubclass
    # Not while other threads run: the list would refer to tuples that they are still building, and Python then cannot
    # resize them (SystemError: bad argument to internal function).
    for thing in [thing for thing in gc.get_objects() if type(thing) in kinds]:
        tensors = [thing]
        if thing.is_leaf and thing.grad is not None:
            tensors.append(thing.grad)
        for tensor in tensors:
            for storage in _storages(tensor):
                if storage.device.type == device_type:
                    live[id_of(storage)] = StorageWeakRef(storage)
    return live


@checked("penstock.probe.held_bytes('cuda:0')")
def held_bytes(device: str | torch.device = "cpu") -> int:
    """Return the bytes that tensors have on ``device`` now.

    On an accelerator the allocator counts them. On the CPU they are the bytes of all tensors that Python can reach,
    plus the ledger's. Raises what `torch.device` raises for a device that does not exist.
    """
    allocator = backend_of(torch.device(device)).allocator
    if allocator is not None:
        return allocator.allocated_bytes()
    return sum(_weak_size_bytes(weak) for weak in live_storages().values()) + ledger.held_bytes


def _tensor_types() -> set[type[torch.Tensor]]:
    """Return all classes of tensors that exist now."""
    kinds: set[type[torch.Tensor]] = set()
    waiting: list[type[torch.Tensor]] = [torch.Tensor]
    while waiting:
        kind = waiting.pop()
        if kind not in kinds:
            kinds.add(kind)
            waiting += type.__subclasses__(kind)
    return kinds


_passive: list[tuple[int, Callable[[], None]]] = []
"""Our own recordings that give way to others: the thread of each, and the function that ends it."""


@contextmanager
@checked("with penstock.probe.giving_way(stop)")
def giving_way(stop: Callable[[], None]) -> Iterator[None]:
    """Let recordings that this thread starts inside the block call ``stop`` first, which must end the current one."""
    entry = (threading.get_ident(), stop)
    _passive.append(entry)
    try:
        yield
    finally:
        _passive[:] = [other for other in _passive if other is not entry]


@contextmanager
def _record_counted(backend: Backend, allocator: Allocator, recording: MemoryRecording) -> Iterator[None]:
    backend.finish()
    with allocator.watching() as watch:
        start = allocator.allocated_bytes()
        _reset_peak_rss()
        yield
        backend.finish()
        peaks = watch.peaks()
    recording.report = PeakReport(
        peak_bytes=peaks.allocated_bytes,
        start_bytes=start,
        activation_bytes=peaks.allocated_bytes - start,
        released_bytes=0,
        rss_bytes=_peak_rss_bytes(),
        requested_bytes=peaks.requested_bytes,
        reserved_bytes=peaks.reserved_bytes,
        timeline=(),
        result=None,
    )


@contextmanager
def _record_cpu(recording: MemoryRecording, this_thread_only: bool) -> Iterator[None]:
    for thread, stop in tuple(_passive):
        if thread == threading.get_ident():
            stop()
    if not can_record("cpu"):
        raise RuntimeError(
            "a PyTorch profiler is already running, and two of them break each other. Measure outside of it: "
            "penstock.probe.peak_bytes(step)"
        )
    live = {} if this_thread_only else live_storages()
    alive = {key: _weak_size_bytes(weak) for key, weak in live.items()}
    addresses = {_weak_address(weak): alive[key] for key, weak in live.items()}
    start = 0 if this_thread_only else sum(alive.values()) + ledger.held_bytes
    _reset_peak_rss()
    with ledger.record() as charges, _quiet_profiler() as profiler:
        yield
    rss_bytes = _peak_rss_bytes()
    results = profiler.kineto_results
    assert results is not None
    recording.blocks = _blocks(results)
    changes, freed_bytes = _changes(recording.blocks, addresses)
    # the sort is stable, so changes of one source at the same nanosecond keep their order
    merged = sorted(changes if this_thread_only else changes + charges, key=lambda change: change[0])
    held = itertools.accumulate((size for _, size in merged), initial=start)
    times = [time_ns / 1e9 for time_ns, _ in merged]
    timeline = tuple(zip(times[:1] + times, held, strict=True)) if merged else ()
    peak = max((size for _, size in timeline), default=start)
    recording.report = PeakReport(
        peak_bytes=peak,
        start_bytes=start,
        activation_bytes=peak - start,
        released_bytes=sum((alive[key] for key, weak in live.items() if weak.expired()), 0) - freed_bytes,
        rss_bytes=rss_bytes,
        requested_bytes=peak,
        reserved_bytes=peak,
        timeline=timeline,
        result=None,
    )


@contextmanager
def _quiet_profiler() -> Iterator[torch.autograd.profiler.profile]:
    """Run a memory profiler that writes nothing to standard error.

    Kineto writes lines with ``USDT``. It reads its log level from the environment when the first profiler of the
    process starts; a level that the user has set is kept. The allocator writes one line for every thousand freed blocks
    that were allocated before. It uses PyTorch's own log level.
    """
    name, profiler = "KINETO_LOG_LEVEL", torch.autograd.profiler.profile(profile_memory=True)
    before = os.environ.setdefault(name, _SILENT)
    with _errors_only():
        try:
            profiler.__enter__()
        finally:
            if before is _SILENT:
                del os.environ[name]
        try:
            yield profiler
        except BaseException as error:
            profiler.__exit__(type(error), error, error.__traceback__)
            raise
        else:
            profiler.__exit__(None, None, None)


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


def _blocks(results: Any) -> list[tuple[int, int, int]]:  # any: a binding of kineto
    """Return ``(unix time in ns, address, bytes)`` of the allocator's events, in order."""
    blocks, nodes = [], list(results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.tag == torch._C._profiler._EventType.Allocation:
            blocks.append((node.start_time_ns, node.typed[1].ptr, node.typed[1].alloc_size))
    return sorted(blocks, key=lambda block: block[0])


def _changes(blocks: list[tuple[int, int, int]], addresses: dict[int, int]) -> tuple[list[tuple[int, int]], int]:
    """Return ``(unix time in ns, change in bytes)`` of the allocator, and the bytes of the start reported as freed.

    The allocator's table of sizes by address outlives a profiler's session and is not updated between sessions. So a
    free of a block that was not allocated in this session may carry the size of an earlier block; the size known at the
    start is used instead.
    """
    changes, freed_bytes = [], 0
    fresh: dict[int, int] = {}
    for time_ns, address, size_bytes in blocks:
        if size_bytes > 0:
            fresh[address] = change = size_bytes
        elif address in fresh:
            change = -fresh.pop(address)
        else:
            change = -addresses.pop(address, 0)
            freed_bytes -= change
        changes.append((time_ns, change))
    return changes, freed_bytes


def _weak_address(weak: StorageWeakRef) -> int:
    storage = storage_of(weak)
    try:
        return 0 if storage is None else int(storage.data_ptr())
    except RuntimeError:  # a functional tensor's storage has no memory
        return 0


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages with memory of their own under ``tensor``, whatever wraps them.

    Fake and functional tensors, which tracing may leave alive, have none. A batched tensor is unwrapped.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return _storages(torch._C._functorch.get_unwrapped(tensor))
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        if not hasattr(tensor, "__tensor_flatten__"):
            return []
        names, _ = tensor.__tensor_flatten__()
        return [storage for name in names for storage in _storages(getattr(tensor, name))]
    if tensor.layout is not torch.strided or torch._is_functional_tensor(tensor):
        return []
    try:
        storage = tensor.untyped_storage()
        return [storage] if storage.data_ptr() else []
    except (NotImplementedError, RuntimeError):  # raised for a tensor without bytes
        return []


def _weak_size_bytes(weak: StorageWeakRef) -> int:
    storage = storage_of(weak)
    return 0 if storage is None else int(storage.nbytes())


def _reset_peak_rss() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # then the peak is that of the whole life of the process


def _peak_rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
