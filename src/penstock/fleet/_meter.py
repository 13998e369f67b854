"""A meter of the bytes that each unit of a run takes in addition to its items, if the run is not cut into calls.

A recording lasts from the first unit to the last. Between units, and while one waits for bytes, the fleet itself
allocates and frees: that time is left out. A unit's peak starts from the bytes of all live results of operators that no
item on the device counts. Blocks that the fleet fetched do not belong to the unit, no matter what frees them.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from penstock.devices import PeakWatch, backend_of
from penstock.fleet._accesses import Made
from penstock.fleet._memory import DeviceMemory
from penstock.probe import MemoryRecording, can_record, record_memory

_alone = threading.Lock()


@contextmanager
def recorded(device: torch.device) -> Iterator[MemoryRecording]:
    """Record the memory of what this thread does on ``device``.

    Where PyTorch's profiler has to record, of which the process can have one, others wait.
    """
    with nullcontext() if can_record(device) else _alone, record_memory(device, this_thread_only=True) as recording:
        yield recording


class UnitMeter:
    """Peaks per unit: ``with meter.recording(): ... meter.go_on(index) ... meter.pause()``, then read ``peaks``."""

    def __init__(self, memory: DeviceMemory):
        self._memory = memory
        self._allocator = backend_of(memory.device).allocator
        self._watch: PeakWatch | None = None
        self.peaks: dict[int, int] = {}
        """Per index of a unit, its largest bytes. On a CPU they are known once the recording has ended."""
        self.totals: dict[int, int] = {}
        """The same, plus all items that were on the device at that time."""
        self._made = Made()
        self._others_bytes = 0
        """Bytes on the device that are not the fleet's."""
        self._spans: list[tuple[int, int, int, int, int]] = []
        """Per span: begin and end in unix nanoseconds, the unit, bytes alive at the begin, and bytes of items."""
        self._open: tuple[int, int, int, int] | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record inside this context, which encloses all units."""
        if self._allocator is not None:
            items_bytes = self._memory.held_bytes()  # first: it frees what has left
            self._others_bytes = self._allocator.allocated_bytes() - items_bytes
        watching = nullcontext() if self._allocator is None else self._allocator.watching()
        with recorded(self._memory.device) as recording, watching as self._watch:
            yield
        if self._allocator is None:
            self._read(recording.blocks)

    def note(self, result: Any) -> None:  # any: an operator's
        """Note that an operator has made ``result``.

        Results made between units belong to the fleet and are in items.
        """
        if self._open is not None:
            self._made.note(result)

    def go_on(self, index: int) -> None:
        """Start measuring: unit ``index`` computes from now on."""
        items_bytes = self._memory.held_bytes()  # first: it is better to count what leaves meanwhile twice than never
        if self._watch is None:
            alive_bytes = self._made.alive_bytes(self._memory.storages_here())
        else:
            alive_bytes = self._others_bytes
            self._watch.restart()
        self._open = (time.time_ns(), index, alive_bytes, items_bytes)

    def pause(self) -> None:
        """Stop measuring: the unit does not compute until `go_on`."""
        if self._open is None:
            return
        (start_ns, index, alive_bytes, items_bytes), self._open = self._open, None
        if self._watch is not None:
            peak_bytes = self._watch.peaks().allocated_bytes - items_bytes - alive_bytes
            self._note(index, peak_bytes, items_bytes)
        else:
            self._spans.append((start_ns, time.time_ns(), index, alive_bytes, items_bytes))

    def _note(self, index: int, peak_bytes: int, items_bytes: int) -> None:
        self.peaks[index] = max(self.peaks.get(index, 0), peak_bytes)
        self.totals[index] = max(self.totals.get(index, 0), peak_bytes + items_bytes)

    def _read(self, blocks: list[tuple[int, int, int]]) -> None:
        own: dict[int, int] = {}
        """Bytes of what units allocated, by address."""
        position = 0
        for start_ns, end_ns, index, alive_bytes, items_bytes in self._spans:
            while position < len(blocks) and blocks[position][0] < start_ns:
                own.pop(blocks[position][1], None)
                position += 1
            held = most = alive_bytes
            while position < len(blocks) and blocks[position][0] <= end_ns:
                _, address, change = blocks[position]
                position += 1
                if change > 0:
                    own[address] = change
                    held += change
                else:
                    held -= own.pop(address, 0)
                most = max(most, held)
            self._note(index, most, items_bytes)
