"""NUMA nodes, as Linux reports them: which host memory is near a device.

Pages lie on the node of the processor that touches them first. So memory for a device is mapped on a processor of the
device's node, and the threads that copy for the device stay there.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.arguments import checked

_PCI = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")


def node_of_pci(address: str) -> int | None:
    """Return the node of the device at a PCI address, ``"0000:3b:00.0"`` say; ``None`` if unknown."""
    try:
        node = int((_PCI / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def processors_of(node: int) -> set[int]:
    """Return the processors of a node that this thread may run on; empty if the system does not say."""
    try:
        text = (_NODES / f"node{node}" / "cpulist").read_text()
        processors: set[int] = set()
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            processors |= set(range(int(first), int(last or first) + 1))
        return processors & os.sched_getaffinity(0)
    except (OSError, ValueError, AttributeError):  # not Linux, or the list cannot be parsed
        return set()


@checked("penstock.devices.stay_on_node(0)")
def stay_on_node(node: int | None) -> None:
    """Restrict the calling thread to that node's processors, if it may use any of them."""
    processors = set() if node is None else processors_of(node)
    if processors:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, processors)


@contextlib.contextmanager
@checked("with penstock.devices.on_node(0)")
def on_node(node: int | None) -> Iterator[None]:
    """Run the calling thread on that node's processors inside the block, so that memory it touches first lies there."""
    if node is None or not processors_of(node):
        yield
        return
    before = os.sched_getaffinity(0)
    stay_on_node(node)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)
