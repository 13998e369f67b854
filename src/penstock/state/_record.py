"""The record of one micro-batch: the operators of its forward and backward with their times, its storages and uses.

It is what a plan of a step is made from. It comes from a step that ran, or from a modelled machine (`modelled_record`).
Positions number the operators that are no views, in the order in which the device runs them.
"""

from dataclasses import dataclass

NOBODY = -1
"""The index of no storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStorage:
    """A storage with its uses."""

    name: str
    """Name of the parameter whose bytes these are; for others, the operator that made them."""
    size_bytes: int
    """All its bytes."""
    born: int
    """Position of the operator that made it; -1 if it was there before."""
    dies: int
    """Position of the last operator before it was given back; the number of operators if it outlives them."""
    uses: tuple[int, ...]
    """Positions of the operators that read or write it, ascending. The one that made it is the first."""
    writes: tuple[bool, ...]
    """For each use, whether it writes."""
    is_parameter: bool = False
    """Whether these are a parameter's bytes."""
    cast_of: int = NOBODY
    """Index of the parameter of which this is a copy in another dtype, as autocast makes it."""
    gradient_of: int = NOBODY
    """Index of the parameter of which this is the gradient."""
    source_bytes: int = 0
    """(Of a gradient) its bytes in the dtype that backward computed it in, before it was widened; 0 if it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A micro-batch's forward and backward."""

    names: tuple[str, ...]
    """Names of the operators."""
    seconds: tuple[float, ...]
    """Seconds that each takes on the device, when nothing else is copied."""
    storages: tuple[RecordedStorage, ...]
    """Storages in the order in which they were met."""
    backward: int
    """Position of the first operator of backward."""

    @property
    def parameters(self) -> tuple[int, ...]:
        """Indexes of the parameters among the storages."""
        return tuple([index for index, storage in enumerate(self.storages) if storage.is_parameter])

    def scaled(self, factor: float) -> "StepRecord":
        """Return the record with all times multiplied by ``factor``."""
        return StepRecord(
            names=self.names,
            seconds=tuple([seconds * factor for seconds in self.seconds]),
            storages=self.storages,
            backward=self.backward,
        )
