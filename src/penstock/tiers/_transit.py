"""A stream mover's record of one handle's copies."""

import threading
from dataclasses import dataclass, field

from penstock.devices import Stream, StreamEvent
from penstock.tiers._lane import LaneJob


@dataclass(slots=True, eq=False)
class Transit:
    """The stream events that copies of one handle wait for."""

    home: Stream = None
    """The stream that owns the memory of the current copy."""
    produced: StreamEvent = None
    """Done when the bytes are ready to be copied out."""
    left: StreamEvent = None
    """Done when the bytes are in host memory."""
    ready: StreamEvent = None
    """Done when the memory of the copy in may be written."""
    arrived: StreamEvent = None
    """Done when the bytes are back on the device; set when that copy is queued."""
    is_queued: threading.Event = field(default_factory=threading.Event)
    """Set when ``arrived`` is set, or when there will be no such copy because it took another route or failed."""
    direct: LaneJob | None = None
    """The copy directly from device to disk, begun or finished."""

    def begin_in(self, home: Stream, ready: StreamEvent) -> None:
        """Start another copy in, into memory of the stream ``home``."""
        self.home, self.ready, self.arrived = home, ready, None
        self.is_queued = threading.Event()
