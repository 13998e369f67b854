"""Places where bytes live and links between them, with the names that events, reports and errors use."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A place where bytes live: `DEVICE`, `HOST`, `DISK`, or one of your own."""

    name: str
    """Name in events and errors."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Link:
    """A link in one direction between two places."""

    source: Place
    """Place where bytes come from."""
    target: Place
    """Place where bytes go."""

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"

    @property
    def name(self) -> str:
        """The link's name in events, such as ``"device->disk"``."""
        return str(self)

    @staticmethod
    def named(name: str) -> "Link":
        """Return the link of that name. Raises ``ValueError`` if there is none."""
        source, arrow, target = name.partition("->")
        if not (source and arrow and target):
            raise ValueError(f"a link must be named after its two ends, such as 'device->disk', got {name!r}")
        return Link(Place(source), Place(target))


DEVICE = Place("device")
"""The memory that the computation uses: an accelerator's, or main memory."""
HOST = Place("host")
"""Main memory, if the device has memory of its own."""
DISK = Place("disk")
"""Files in directories, usually on an SSD."""
PEER = Place("peer")
"""Main memory and disks of other machines."""
