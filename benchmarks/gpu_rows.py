"""Items of `benchmarks.gpu`, and the rows that they yield."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from penstock import probe

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The device, the folder and the options with which items run."""

    device: str
    quick: bool
    data: Path | None
    out: Path

    @property
    def rounds(self) -> int:
        """Number of timed rounds."""
        return 1 if self.quick else 7

    def timed(self, ways: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median seconds of each, after one run to warm up."""
        for way in ways.values():
            way()
        return {
            name: median(each) for name, each in probe.in_rounds(ways, rounds=self.rounds, device=self.device).items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A measured value and its peer's, as one row of the table."""

    name: str
    ours: float
    unit: str
    peer: str = ""
    peer_value: float | None = None
    note: str = ""

    def row(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A measurement that `benchmarks.gpu` runs in a process of its own."""

    name: str
    phase: int
    headline: str
    paper: str
    run: Callable[[Context], Iterator[Found]]
    is_quick: bool = True
    """Whether ``--quick`` runs it too: one item of a kind is enough to show that it runs."""
