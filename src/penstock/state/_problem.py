"""The planner's input: the operators of one step with their times, the pages that they use, and what copies cost."""

from dataclasses import dataclass

from penstock.arguments import check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPage:
    """A storage that may leave the device between two uses."""

    name: str
    """Name for messages and pictures."""
    size_bytes: int
    """All its bytes."""
    uses: tuple[int, ...]
    """Positions of the operators that need it, ascending. Those of a page that is born in one step and dies in the next
    go on past the step's end: position ``num_operators`` is the next step's first.
    """
    writes: tuple[bool, ...]
    """For each use, whether it changes the page."""
    is_born: bool = False
    """Whether its first use makes it and it dies after its last, as activations and gradients do. Else it stands from
    step to step.
    """
    leaves: bool = False
    """Whether the host reads it after its last use: a copy out follows. Only what ``is_born`` does."""
    is_from_host: bool = False
    """Whether the host writes it between its last use in a step and its first in the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUpdate:
    """Work of the host's between two copies: the update of a parameter, or a sum of gradients."""

    reads: int
    """Index of the page that must have left."""
    writes: int
    """Index of the page that may come in afterwards; -1 if nothing waits for it."""
    size_bytes: int
    """Bytes of host memory that it reads and writes."""
    after: int = -1
    """Position of the last operator that must have ended, if it waits for more than its page; -1 if not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates that copies and the host reach, in bytes per second."""

    in_bytes_per_s: float
    """To the device, while nothing is copied from it."""
    out_bytes_per_s: float
    """From the device, while nothing is copied to it."""
    both_in_bytes_per_s: float
    """To the device, while both directions are busy."""
    both_out_bytes_per_s: float
    """From the device, while both directions are busy."""
    host_bytes_per_s: float = 0.0
    """The rate of host memory, which copies and updates on the host share; 0 if the host updates nothing."""
    copy_s: float = 8e-6
    """Seconds that each copy takes beside its bytes."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "Rates(in_bytes_per_s=54e9, out_bytes_per_s=54e9, both_in_bytes_per_s=48e9, both_out_bytes_per_s=44e9)",
            in_bytes_per_s=1, out_bytes_per_s=1, both_in_bytes_per_s=1, both_out_bytes_per_s=1, host_bytes_per_s=0,
            copy_s=0,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StateProblem:
    """One step, which the next repeats."""

    seconds: tuple[float, ...]
    """Seconds of each operator on the device."""
    pool_bytes: tuple[int, ...]
    """For each operator, the bytes on the device that are no pages, while it runs."""
    pages: tuple[StepPage, ...]
    """All pages."""
    updates: tuple[HostUpdate, ...] = ()
    """Updates on the host."""
    budget_bytes: int
    """Bytes of the device for pages and everything else."""
    rates: Rates
    """Rates of copies and of the host."""
    is_one_memory: bool = False
    """Whether copies in and operators take their memory from one place, as where main memory is the device. Then the
    computation itself waits for a copy out before its memory is given back. Else copies in have memory of their own.
    """

    @property
    def num_operators(self) -> int:
        """Number of operators of a step."""
        return len(self.seconds)

    @property
    def taken_bytes(self) -> tuple[int, ...]:
        """For each operator, the bytes of the budget that pages cannot have.

        With two memories, that is the most that the pool ever takes.
        """
        if self.is_one_memory:
            return self.pool_bytes
        return (max(self.pool_bytes, default=0),) * len(self.pool_bytes)
