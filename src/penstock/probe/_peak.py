"""Measurement of the true peak memory of a step in bytes, on an accelerator and on a CPU.

On an accelerator the allocator counts. On the CPU PyTorch's allocator has no counter; the peak is the bytes of tensors
alive at the start, plus the running sum of what the computing thread allocates and what is freed (`_allocations.py`),
plus the ledger of memory that no tensor of this thread holds (`_ledger.py`). The time stamps of both come from the same
clock, and their changes are merged in that order.

Known limits. Memory that a library takes without PyTorch's allocator (oneDNN scratch space, numpy) shows only in
``rss_bytes``, and what other threads allocate does not count. Blocks from before the start whose tensors Python cannot
reach count as held to the end; ``released_bytes`` says how many bytes of such tensors were released.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.arguments import checked
from penstock.devices import Allocator, Backend, backend_of, used_device
from penstock.living import living
from penstock.native import address_of
from penstock.probe._allocations import Event, counts, record
from penstock.probe._ledger import ledger
from penstock.storages import id_of, storage_of


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
    timeline: tuple[tuple[float, int], ...] = field(repr=False)  # often a hundred thousand changes
    """``(seconds of time.time(), bytes held)`` after each change. Empty on an accelerator."""
    result: Any = field(repr=False)  # any type the function returns
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
    CPU. Raises whatever the function raises.

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
    """Return whether recordings may begin and end anywhere on ``device``.

    On a CPU that takes the C library of this package. Without it PyTorch's profiler records, of which one can run at a
    time, and which must not begin or end inside of a step.
    """
    return torch.device(device).type != "cpu" or counts()


def live_storages(device_type: str = "cpu") -> dict[int, StorageWeakRef]:
    """Return weak references to the storages of all tensors that Python can reach, including gradients, by identity."""
    live: dict[int, StorageWeakRef] = {}
    for thing in living(torch.Tensor):
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
    live = {} if this_thread_only else live_storages()
    alive = {key: _weak_size_bytes(weak) for key, weak in live.items()}
    addresses = {_weak_address(weak): alive[key] for key, weak in live.items()}
    start = 0 if this_thread_only else sum(alive.values()) + ledger.held_bytes
    _reset_peak_rss()
    with ledger.record() as charges, record() as events:
        yield
    rss_bytes = _peak_rss_bytes()
    recording.blocks, freed_bytes = _changes(events, addresses)
    changes = [(time_ns, size_bytes) for time_ns, _, size_bytes in recording.blocks]
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


def _changes(events: list[Event], addresses: dict[int, int]) -> tuple[list[Event], int]:
    """Return the changes in bytes of the blocks that are known, and how many bytes of the start were given back.

    Known are blocks that were taken in this recording, and those at ``addresses``, with their bytes at its start.
    """
    blocks, freed_bytes, fresh = list[Event](), 0, dict[int, int]()
    for time_ns, address, size_bytes in events:
        if size_bytes > 0:
            fresh[address] = size_bytes
            blocks.append((time_ns, address, size_bytes))
        elif address in fresh:
            blocks.append((time_ns, address, -fresh.pop(address)))
        elif address in addresses:
            given_bytes = addresses.pop(address)
            freed_bytes += given_bytes
            blocks.append((time_ns, address, -given_bytes))
    return blocks, freed_bytes


def _weak_address(weak: StorageWeakRef) -> int:
    storage = storage_of(weak)
    return 0 if storage is None else address_of(storage)


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
        parts = (getattr(tensor, name) for name in names)  # a DTensor also names its mesh, which is no tensor
        return [storage for part in parts if isinstance(part, torch.Tensor) for storage in _storages(part)]
    if tensor.layout is not torch.strided or torch._is_functional_tensor(tensor):
        return []
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # raised for a tensor without bytes
        return []
    return [storage] if storage.nbytes() and not tensor._is_zerotensor() else []


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
