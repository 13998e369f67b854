"""What a mover with streams knows of one handle on its way."""

import threading
from dataclasses import dataclass, field

from penstock.devices import Stream, StreamEvent
from penstock.tiers._lane import LaneJob


@dataclass(slots=True, eq=False)
class Transit:
    """The marks that copies of one handle wait for."""

    home: Stream = None
    """The stream that owns the memory of the copy under way."""
    produced: StreamEvent = None
    """Passed when the bytes are there to be copied out."""
    left: StreamEvent = None
    """Passed when the bytes are in host memory."""
    ready: StreamEvent = None
    """Passed when the memory of the copy in may be written."""
    arrived: StreamEvent = None
    """Passed when the bytes are back on the device; set when that copy is queued."""
    is_queued: threading.Event = field(default_factory=threading.Event)
    """Set when ``arrived`` is, or when there will be no such copy: it went another way, or failed."""
    direct: LaneJob | None = None
    """The copy straight out of the device, begun or done."""

    def begin_in(self, home: Stream, ready: StreamEvent) -> None:
        """Another copy in, into memory of the stream ``home``."""
        self.home, self.ready, self.arrived = home, ready, None
        self.is_queued = threading.Event()
