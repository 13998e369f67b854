"""A waterfall for a device, or for several, from a budget."""

from collections.abc import Sequence

import torch

from penstock.arguments import checked
from penstock.devices import Streams, backend_of
from penstock.directio import refuse_memory
from penstock.probe import gpu_direct_storage
from penstock.tiers._budget import Budget
from penstock.tiers._disk import DiskTier
from penstock.tiers._events import EventLog
from penstock.tiers._host import HostTier
from penstock.tiers._malloc import give_back_freed_memory
from penstock.tiers._memory_mover import MemoryMover
from penstock.tiers._stream_mover import StreamMover
from penstock.tiers._tier import Tier
from penstock.tiers._waterfall import Waterfall
from penstock.units import parse_bytes

MAX_IN_FLIGHT_BYTES = 128 * 2**20
"""Bytes that may be on their way out at once, unless told otherwise: enough to keep an SSD busy for 25 to 100 ms."""


@checked("waterfall_for('cpu', Budget(disk='/nvme'))")
def waterfall_for(
    device: torch.device | str,
    budget: Budget,
    *,
    max_in_flight: int | str = MAX_IN_FLIGHT_BYTES,
    verify: bool = False,
    events: EventLog | None = None,
) -> Waterfall:
    """A waterfall below ``device``: host memory first (on accelerators, where the budget names some), then the disks.

    ``max_in_flight`` bounds the bytes on their way out, which are still on the device. ``verify`` compares a CRC-32 of
    every request on its way back from disk. Where GPUDirect Storage works, a device and its disks exchange bytes
    without host memory between them. On a CPU, malloc is told to give large freed blocks back to the system
    (``_malloc.py``). Raises ``ValueError`` for a device that is not here, for a budget with nothing below it or with
    main memory, and what ``DiskTier`` raises for directories that cannot be used.
    """
    streams = backend_of(device).streams
    if streams is None:
        refuse_memory(budget.disk_bytes)
    events = EventLog() if events is None else events
    max_in_flight_bytes = parse_bytes(max_in_flight)
    disk = [DiskTier(budget.disk_bytes, budget=budget)] if budget.disk_bytes else []
    if streams is not None:
        if all(gpu_direct_storage(directory).is_supported for directory in budget.disk_bytes):
            for one in disk:
                one.open_to_device()
        return stream_waterfall(
            streams,
            disk,
            budget,
            events,
            max_in_flight_bytes=max_in_flight_bytes,
            verify=verify,
            pinned=True,
        )
    if not disk:
        raise ValueError(
            "on a CPU the device is main memory and the tier below it is a disk: give a directory on an SSD, as in "
            "Budget(disk='/nvme') or activations(model, disk='/nvme')"
        )
    give_back_freed_memory()
    mover = MemoryMover(events, max_in_flight_bytes=max_in_flight_bytes, verify=verify)
    return _joined(disk, mover, events)


@checked("waterfalls_for([torch.device('cpu')], Budget(disk='/nvme'))")
def waterfalls_for(
    devices: Sequence[torch.device],
    budget: Budget,
    *,
    max_in_flight: int | str = MAX_IN_FLIGHT_BYTES,
    verify: bool = False,
    events: Sequence[EventLog] = (),
) -> list[Waterfall]:
    """One waterfall per device over tiers that all share, so that each may ``borrow`` what another has parked.

    As ``waterfall_for``, and ``Budget(host=...)`` counts for CPU devices too: main memory beside what the devices take.
    Drain all of them before the first is closed. Raises ``ValueError`` for devices of different types.
    """
    types = {device.type for device in devices}
    if len(types) != 1:
        raise ValueError(f"a fleet's devices are all of one kind, not {sorted(types)}")
    backends, logs = [backend_of(device) for device in devices], list(events) or [EventLog() for _ in devices]
    have_streams = backends[0].streams is not None
    if not have_streams:
        refuse_memory(budget.disk_bytes)
    max_in_flight_bytes = parse_bytes(max_in_flight)
    tiers: list[Tier] = []
    if budget.host_bytes is not None:
        staging_bytes = 2 * max_in_flight_bytes * len(devices) if have_streams and budget.disk_bytes else 0
        if budget.host_bytes > staging_bytes:
            tiers.append(HostTier(budget.host_bytes - staging_bytes, pinned=have_streams, budget=budget))
    if budget.disk_bytes:
        tiers.append(DiskTier(budget.disk_bytes, budget=budget))
    if not tiers:
        raise ValueError("nothing below the devices: give host memory, Budget(host='8GiB'), or Budget(disk='/nvme')")
    movers: list[MemoryMover | StreamMover] = []
    for backend, log in zip(backends, logs, strict=True):
        if backend.streams is not None:
            staging = HostTier(2 * max_in_flight_bytes if budget.disk_bytes else 0, pinned=True, budget=budget)
            movers.append(
                StreamMover(backend.streams, staging, log, max_in_flight_bytes=max_in_flight_bytes, verify=verify)
            )
        else:  # malloc keeps what is freed: shards come and go all the time, and mapping them anew costs page faults
            movers.append(MemoryMover(log, max_in_flight_bytes=max_in_flight_bytes, verify=verify))
    return [_joined(tiers, mover, log) for mover, log in zip(movers, logs, strict=True)]


def stream_waterfall(
    streams: Streams,
    disk: list[DiskTier],
    budget: Budget,
    events: EventLog,
    *,
    max_in_flight_bytes: int,
    verify: bool,
    pinned: bool,
) -> Waterfall:
    """A waterfall below a device with streams. The staging memory of the disk comes out of the budget's host bytes."""
    if budget.host_bytes is None and not disk:
        raise ValueError("nothing below the device: give host memory, Budget(host='8GiB'), or Budget(disk='/nvme')")
    is_staged = any(verify or not one.talks_to_device for one in disk)
    staging_bytes = 2 * max_in_flight_bytes if is_staged else 0
    tiers: list[Tier] = []
    if budget.host_bytes is not None and budget.host_bytes > staging_bytes:
        tiers.append(HostTier(budget.host_bytes - staging_bytes, pinned=pinned, budget=budget))
    staging = HostTier(staging_bytes, pinned=pinned, budget=budget)
    mover = StreamMover(streams, staging, events, max_in_flight_bytes=max_in_flight_bytes, verify=verify)
    return _joined([*tiers, *disk], mover, events)


def _joined(tiers: Sequence[Tier], mover: MemoryMover | StreamMover, events: EventLog) -> Waterfall:
    waterfall = Waterfall(tiers, mover, events)
    mover.waterfall = waterfall
    return waterfall
