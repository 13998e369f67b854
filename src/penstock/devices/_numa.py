"""Which memory of a machine with several nodes is near to a device, as Linux says it.

Pages lie on the node of the processor that touches them first. So whoever maps memory for a device does it on a
processor of the device's node, and the threads that copy for it stay there.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.arguments import checked

_PCI = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")


def node_of_pci(address: str) -> int | None:
    """The node that a device at a PCI address such as ``"0000:3b:00.0"`` is on; ``None`` where nobody says so."""
    try:
        node = int((_PCI / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def processors_of(node: int) -> set[int]:
    """The processors of a node that this thread may run on; empty where nobody says so."""
    try:
        text = (_NODES / f"node{node}" / "cpulist").read_text()
        found: set[int] = set()
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
        return found & os.sched_getaffinity(0)
    except (OSError, ValueError, AttributeError):  # no Linux, or a list that is none
        return set()


@checked("penstock.devices.stay_on_node(0)")
def stay_on_node(node: int | None) -> None:
    """Lets the calling thread run on that node's processors alone, if there are some."""
    processors = set() if node is None else processors_of(node)
    if processors:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, processors)


@contextlib.contextmanager
@checked("with penstock.devices.on_node(0)")
def on_node(node: int | None) -> Iterator[None]:
    """Inside, the calling thread runs on that node's processors, so that memory it touches first lies there."""
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
