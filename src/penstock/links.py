"""Places where bytes live, and the links between them, by one name each in events, reports and errors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where bytes live: `DEVICE`, `HOST`, `DISK`, or one of your own."""

    name: str
    """As events and errors call it."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two places."""

    source: Place
    """Where bytes come from."""
    target: Place
    """Where they go."""

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"

    @property
    def name(self) -> str:
        """As events call it: ``"device->disk"``."""
        return str(self)

    @staticmethod
    def named(name: str) -> "Link":
        """The link of that name. Raises ``ValueError`` where it is none."""
        source, arrow, target = name.partition("->")
        if not (source and arrow and target):
            raise ValueError(f"a link is called after its two ends, such as 'device->disk', not {name!r}")
        return Link(Place(source), Place(target))


DEVICE = Place("device")
"""The memory that the computation uses: an accelerator's, or main memory."""
HOST = Place("host")
"""Main memory, where the device has its own."""
DISK = Place("disk")
"""Files in directories, usually on an SSD."""
