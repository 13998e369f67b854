"""The bandwidth of each link in each direction, measured by real transfers and cached per machine for a week."""

import contextlib
import functools
import itertools
import json
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from penstock.arguments import checked
from penstock.devices import accelerators, backend_of
from penstock.directio import DeviceFile, SpillFile
from penstock.files import cache_folder, read_json
from penstock.links import DEVICE, DISK, HOST, Link
from penstock.probe._gds import gpu_direct_storage

_EXPIRY_S = 7 * 86400
# As the tiers' lanes: one thread with requests of 1 MiB wrote 1.9 GB/s, four with 8 MiB 6.4 (docs/design/disk-io.md).
_REQUEST_BYTES = 8 * 2**20
_NUM_THREADS = 4
_SAMPLE_BYTES = 256 * 2**20
_LINK_SAMPLE_BYTES = 16 * 2**20
_ROUNDS = 3
_MOST = 1e15
"""A bound on times since 1970 in seconds and on bytes per second; larger cached values are damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneBandwidth:
    """The bandwidth of one link in one direction."""

    lane: str
    """Name of the link, such as ``"device->disk"``, as in events."""
    bandwidth_bytes_per_s: float
    """Bytes per second: the median over a few transfers of 256 MiB in requests of 8 MiB."""
    is_direct: bool
    """Whether the bytes move without a copy by the processor (``O_DIRECT``, pinned memory)."""
    measured_s: float
    """When it was measured, in seconds of ``time.time()``."""

    @property
    def link(self) -> Link:
        """The link, with its source and target."""
        return Link.named(self.lane)


@checked("penstock.probe.bandwidths('/nvme')")
def bandwidths(
    directory: str | os.PathLike[str], *, refresh: bool = False, progress: Callable[[int, int], None] | None = None
) -> tuple[LaneBandwidth, ...]:
    """Return the bandwidths between the device, host memory and a disk, in bytes per second.

    ``directory`` is where the disk tier would keep its files; 256 MiB of free space are needed there for a moment.
    Results are cached per machine, device and file system for a week; ``refresh`` ignores the cache and measures again.
    On a CPU-only machine the lanes are ``device->disk`` and ``disk->device``. With an accelerator they are
    ``host->disk``, ``disk->host``, ``device->host`` and ``host->device``, and the two between device and disk where
    GPUDirect Storage works. After each transfer, ``progress`` is called with the number of transfers done and their
    total.

    Raises what opening a file in ``directory`` raises.
    """
    key = _key(Path(directory))
    cache = _load_cache()
    known = cache.get(key)
    if (
        known
        and {Link.named(lane["lane"]) for lane in known} >= _links_of_disk()
        and not refresh
        and all(time.time() - lane["measured_s"] < _EXPIRY_S for lane in known)
    ):
        return tuple(LaneBandwidth(**lane) for lane in known)
    has_accelerator, has_direct = bool(accelerators()), gpu_direct_storage(directory).is_supported
    num_transfers, count = 2 * (1 + _ROUNDS) * (1 + has_accelerator + has_direct), itertools.count(1)

    def tick() -> None:
        if progress is not None:
            progress(next(count), num_transfers)

    lanes = _disk_lanes(directory, tick) + (_accelerator_lanes(tick) if has_accelerator else ())
    if has_direct:
        lanes += _direct_lanes(directory, tick)
    cache[key] = [asdict(lane) for lane in lanes]
    _store_cache(cache)
    return lanes


@functools.cache
@checked("penstock.probe.link_rate_bytes_per_s(torch.device('cuda', 0))")
def link_rate_bytes_per_s(device: torch.device) -> float | None:
    """Return the bandwidth of the link between an accelerator and pinned host memory, in its slower direction.

    Measured by the device's clock with 16 MiB, at the first call in this process. ``None`` for a CPU, and if there is
    no memory for it.
    """
    backend = backend_of(device)
    if backend.streams is None:
        return None
    try:
        near = torch.empty(_LINK_SAMPLE_BYTES, dtype=torch.uint8, device=backend.device)
        host = torch.empty(_LINK_SAMPLE_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return None
    ways = (lambda: host.copy_(near, non_blocking=True), lambda: near.copy_(host, non_blocking=True))
    seconds = [[backend.seconds(way) for _ in range(1 + _ROUNDS)][1:] for way in ways]
    return _LINK_SAMPLE_BYTES / max(1e-9, *map(median, seconds))


def _links_of_disk() -> set[Link]:
    near = HOST if accelerators() else DEVICE
    return {Link(near, DISK), Link(DISK, near)}


def _disk_lanes(directory: str | os.PathLike[str], tick: Callable[[], None]) -> tuple[LaneBandwidth, ...]:
    near = HOST if accelerators() else DEVICE
    spill = SpillFile(directory)
    try:
        spill.grow(_SAMPLE_BYTES)
        memory = mmap.mmap(-1, _SAMPLE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = memoryview(memory)
        view[:] = os.urandom(2**20) * (_SAMPLE_BYTES // 2**20)  # compression gains nothing on it
        write_s = _timed(lambda: _in_requests(spill.write, view), tick)
        read_s = _timed(lambda: _in_requests(spill.read, view), tick)
    finally:
        spill.close()
    return (
        _lane(Link(near, DISK), _SAMPLE_BYTES / write_s, spill.is_direct),
        _lane(Link(DISK, near), _SAMPLE_BYTES / read_s, spill.is_direct),
    )


def _accelerator_lanes(tick: Callable[[], None]) -> tuple[LaneBandwidth, ...]:
    backend = backend_of(accelerators()[0])
    device = torch.empty(_SAMPLE_BYTES, dtype=torch.uint8, device=backend.device)
    host = torch.empty(_SAMPLE_BYTES, dtype=torch.uint8, pin_memory=True)

    def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source, non_blocking=True)
        backend.finish()

    return (
        _lane(Link(DEVICE, HOST), _SAMPLE_BYTES / _timed(lambda: copy(host, device), tick), True),
        _lane(Link(HOST, DEVICE), _SAMPLE_BYTES / _timed(lambda: copy(device, host), tick), True),
    )


def _direct_lanes(directory: str | os.PathLike[str], tick: Callable[[], None]) -> tuple[LaneBandwidth, ...]:
    memory = torch.empty(_SAMPLE_BYTES, dtype=torch.uint8, device=accelerators()[0]).untyped_storage()
    with contextlib.ExitStack() as stack:
        spill = SpillFile(directory)
        stack.callback(spill.close)
        spill.grow(_SAMPLE_BYTES)
        file = DeviceFile(spill)
        stack.callback(file.close)
        write_s = _timed(lambda: _in_requests(file.write, memory), tick)
        read_s = _timed(lambda: _in_requests(file.read, memory), tick)
    return (
        _lane(Link(DEVICE, DISK), _SAMPLE_BYTES / write_s, True),
        _lane(Link(DISK, DEVICE), _SAMPLE_BYTES / read_s, True),
    )


def _in_requests(transfer: Callable[[Any, int], object], memory: memoryview | torch.UntypedStorage) -> None:
    """Call ``transfer`` with each slice of ``memory`` and its offset, from a few threads."""
    offsets = iter(range(0, len(memory), _REQUEST_BYTES))
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            try:
                transfer(memory[offset : offset + _REQUEST_BYTES], offset)
            except (OSError, RuntimeError) as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(_NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _timed(transfer: Callable[[], None], tick: Callable[[], None]) -> float:
    transfer()
    tick()
    durations_s = []
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        transfer()
        durations_s.append(time.perf_counter() - start_s)
        tick()
    return median(durations_s)


def _lane(link: Link, bandwidth_bytes_per_s: float, is_direct: bool) -> LaneBandwidth:
    return LaneBandwidth(
        lane=link.name, bandwidth_bytes_per_s=bandwidth_bytes_per_s, is_direct=is_direct, measured_s=time.time()
    )


def _key(directory: Path) -> str:
    device = backend_of(accelerators()[0]).name if accelerators() else "cpu"
    file_system = directory.stat().st_dev if directory.exists() else directory
    return f"{platform.node()}/{device}/{file_system}"


def _load_cache() -> dict[str, list[dict[str, Any]]]:  # any: JSON that somebody may have edited; LaneBandwidth checks
    try:
        cache = read_json(cache_folder() / "bandwidths.json")
        for lanes in cache.values():
            for lane in lanes:
                bandwidth = LaneBandwidth(**lane)
                if not all(
                    isinstance(number, float) and 0 < number < _MOST
                    for number in (bandwidth.measured_s, bandwidth.bandwidth_bytes_per_s)
                ):
                    return {}
                Link.named(bandwidth.lane)  # raises if there is no such link
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}
    return cache  # type: ignore[no-any-return]


def _store_cache(cache: dict[str, list[dict[str, Any]]]) -> None:
    file = cache_folder() / "bandwidths.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(cache))
        draft.replace(file)
    except OSError:
        pass  # without a cache, the next call measures again, which takes two seconds
