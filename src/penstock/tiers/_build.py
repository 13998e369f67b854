"""Building waterfalls from a budget, for one device or for several that share their tiers."""

from collections.abc import Sequence

import torch

from penstock.arguments import checked
from penstock.devices import Streams, backend_of
from penstock.directio import refuse_memory
from penstock.probe import gpu_direct_storage, link_rate_bytes_per_s
from penstock.tiers._budget import Budget
from penstock.tiers._disk import DiskTier
from penstock.tiers._events import EventLog
from penstock.tiers._handles import Handles
from penstock.tiers._host import SLAB_BYTES, HostTier
from penstock.tiers._malloc import give_back_freed_memory
from penstock.tiers._memory_mover import MemoryMover
from penstock.tiers._mover import Mover
from penstock.tiers._stream_mover import StreamMover
from penstock.tiers._tier import Tier
from penstock.tiers._waterfall import Waterfall
from penstock.units import parse_bytes

MAX_IN_FLIGHT_BYTES = 128 * 2**20
"""Default bound on the bytes being copied out at once: enough to keep an SSD busy for 25 to 100 ms."""
IN_FLIGHT_S = 0.1
"""Seconds' worth of an accelerator's link that may be under way at once, if more than `MAX_IN_FLIGHT_BYTES`."""
_STAGING_SHARE = 1 / 8
"""Largest share for staging of the host memory that the budget allows, or of half of what is free."""


@checked("waterfall_for('cpu', Budget(disk='/nvme'))")
def waterfall_for(
    device: torch.device | str,
    budget: Budget,
    *,
    max_in_flight: int | str | None = None,
    verify: bool = False,
    events: EventLog | None = None,
    has_lane_memory: bool = False,
) -> Waterfall:
    """Build a waterfall below ``device``: host memory first, then the disks, then the budget's own tiers.

    Host memory is used on accelerators, if the budget names some. ``max_in_flight`` bounds the bytes that are being
    copied out and are still on the device; the default is 128 MiB, or on an accelerator what its link carries in a
    tenth of a second, if that is more. ``verify`` checks the CRC-32 of every request that is read back from disk. Where
    GPUDirect Storage works, a device and its disks exchange bytes without host memory between them. On a CPU, malloc is
    told to give large freed blocks back to the system (``_malloc.py``). ``has_lane_memory``: on an accelerator, whether
    copies in get memory of their own, which the caller gives back (`Waterfall.give_back`), and so wait for no other
    work.

    Raises ``ValueError`` for a device that this machine does not have, for a budget that names nothing below the
    device, and for directories in main memory if the device is the CPU, and what ``DiskTier`` raises for directories
    that cannot be used.
    """
    backend = backend_of(device)
    streams = backend.streams
    if not budget.leads_below(backend.device):
        raise ValueError(
            "no tier is given below the device: give host memory, Budget(host='8GiB'), or Budget(disk='/nvme')"
            if streams is not None
            else "on a CPU the device is main memory and the tier below it is a disk: give a directory on an SSD, as "
            "in Budget(disk='/nvme') or activations(model, disk='/nvme')"
        )
    if streams is None:
        give_back_freed_memory()
    (waterfall,) = build(
        [streams],
        budget,
        [EventLog() if events is None else events],
        has_host=streams is not None and budget.host_bytes is not None,
        max_in_flight_bytes=_in_flight_bytes([backend.device], budget, max_in_flight),
        verify=verify,
        nodes=[backend.numa_node],
        has_lane_memory=has_lane_memory,
    )
    return waterfall


@checked("waterfalls_for([torch.device('cpu')], Budget(disk='/nvme'))")
def waterfalls_for(
    devices: Sequence[torch.device],
    budget: Budget,
    *,
    max_in_flight: int | str | None = None,
    verify: bool = False,
    events: Sequence[EventLog] = (),
) -> list[Waterfall]:
    """Build one waterfall per device over shared tiers, so that each can ``borrow`` what another has parked.

    Like ``waterfall_for``, except that ``Budget(host=...)`` counts for CPU devices too: it is main memory in addition
    to what the devices take. Malloc keeps freed memory here, since such bytes are allocated and freed all the time.
    Drain all waterfalls before you close the first. Raises ``ValueError`` for devices of different types.
    """
    types = {device.type for device in devices}
    if len(types) != 1:
        raise ValueError(f"a fleet's devices must all be of one kind, got {sorted(types)}")
    has_host = budget.host_bytes is not None
    if not (has_host or budget.disk_bytes or budget.tiers):
        raise ValueError(
            "no tier is given below the devices: give host memory, Budget(host='8GiB'), or Budget(disk='/nvme')"
        )
    return build(
        [backend_of(device).streams for device in devices],
        budget,
        list(events) or [EventLog() for _ in devices],
        has_host=has_host,
        max_in_flight_bytes=_in_flight_bytes(devices, budget, max_in_flight),
        verify=verify,
        nodes=[backend_of(device).numa_node for device in devices],
    )


def build(
    streams: Sequence[Streams | None],
    budget: Budget,
    events: Sequence[EventLog],
    *,
    has_host: bool,
    max_in_flight_bytes: int,
    verify: bool,
    pinned: bool = True,
    nodes: Sequence[int | None] = (),
    has_lane_memory: bool = False,
) -> list[Waterfall]:
    """Build one waterfall for each of ``streams`` (``None`` for main memory) over the same tiers.

    Every device with streams has its own staging memory on the way to tiers it cannot reach, taken from the budget's
    host bytes. That memory and the copying threads are on the device's NUMA node, given in ``nodes``. Host memory that
    several devices share is on their common node if they have one, else on any.
    """
    nodes = list(nodes) or [None] * len(streams)
    has_streams = streams[0] is not None
    if not has_streams:
        refuse_memory(budget.disk_bytes)
    below: list[Tier] = _disks(budget, has_streams=has_streams) + list(budget.tiers)
    is_staged = has_streams and any(verify or not tier.talks_to_device for tier in below if not tier.is_memory)
    staging_bytes = 2 * max_in_flight_bytes if is_staged else 0
    host_bytes = (budget.host_bytes or 0) - staging_bytes * len(streams) if has_host else 0
    if host_bytes > 0:
        near = nodes[0] if len(set(nodes)) == 1 else None
        host = HostTier(host_bytes, pinned=pinned and has_streams, budget=budget, node=near)
        if has_streams:
            host.prepare(SLAB_BYTES)
        below.insert(0, host)
    waterfalls = []
    for device_streams, log, node in zip(streams, events, nodes, strict=True):
        handles = Handles()
        mover: Mover
        if device_streams is None:
            mover = MemoryMover(handles, log, max_in_flight_bytes=max_in_flight_bytes, verify=verify)
        else:
            staging = HostTier(staging_bytes, pinned=pinned, budget=budget, node=node)
            staging.prepare(min(staging_bytes, SLAB_BYTES))
            mover = StreamMover(
                device_streams,
                staging,
                handles,
                log,
                max_in_flight_bytes=max_in_flight_bytes,
                verify=verify,
                node=node,
                has_lane_memory=has_lane_memory,
            )
        waterfalls.append(Waterfall(below, mover, handles, log, not_ours=budget.tiers))
    return waterfalls


def _in_flight_bytes(devices: Sequence[torch.device], budget: Budget, asked: int | str | None) -> int:
    """Return the bound asked for, or enough to keep the slowest device's link busy, as far as staging memory allows."""
    if asked is not None:
        return parse_bytes(asked)
    rates = [rate for device in devices if (rate := link_rate_bytes_per_s(device)) is not None]
    most_bytes = int(IN_FLIGHT_S * min(rates, default=0.0))
    if budget.disk_bytes or budget.tiers:
        host_bytes = budget.host_bytes
        room_bytes = backend_of("cpu").memory_bytes()[0] // 2 if host_bytes is None else host_bytes
        most_bytes = min(most_bytes, int(_STAGING_SHARE * room_bytes) // (2 * len(devices)))
    return max(MAX_IN_FLIGHT_BYTES, most_bytes)


def _disks(budget: Budget, *, has_streams: bool) -> list[Tier]:
    """Return the budget's directories as one tier, opened to devices that can reach them by themselves."""
    if not budget.disk_bytes:
        return []
    disk = DiskTier(budget.disk_bytes, budget=budget)
    if has_streams and all(gpu_direct_storage(directory).is_supported for directory in budget.disk_bytes):
        disk.open_to_device()
    return [disk]
