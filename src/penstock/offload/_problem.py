"""The planner's input: which storages a cycle saved, when backward needed them, and how fast the lanes are."""

import math
from dataclasses import dataclass

from penstock.arguments import check_fields
from penstock.tiers import IN_FLIGHT_S, MAX_IN_FLIGHT_BYTES

TINY_BYTES = 64 * 1024
"""Size below which storages are not even counted, unless the user wants them parked."""
_STORAGES_IN_FLIGHT = 4
"""Number of the largest storages that may be on their way out at once."""


def in_flight_bytes(out_bandwidth_bytes_per_s: float, largest_bytes: int) -> int:
    """Return a bound on bytes in flight that suits the link and the storages, for copies that need staging memory."""
    return max(MAX_IN_FLIGHT_BYTES, int(IN_FLIGHT_S * out_bandwidth_bytes_per_s), _STORAGES_IN_FLIGHT * largest_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStorage:
    """One storage that forward saved for backward. Events are numbered in the order in which the hooks ran."""

    size_bytes: int
    """All bytes of the storage, however many views of it were saved."""
    label: str
    """The module that saved it first."""
    pack_event: int
    """The event at which it was saved."""
    need_event: int
    """The event at which backward first asked for it."""
    free_event: int
    """The first event at which nobody needs it any more. It comes after ``need_event`` and is at most the number of
    events.
    """
    must_keep: str = ""
    """The reason why it may not be parked; empty if it may."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "SavedStorage(size_bytes=2**20, label='a', pack_event=0, need_event=2, free_event=3)",
            size_bytes=0,
            pack_event=0,
            need_event=0,
            free_event=0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadProblem:
    """A recorded cycle, and the machine it ran on."""

    storages: tuple[SavedStorage, ...]
    """Storages in the order in which they were saved."""
    event_times_s: tuple[float, ...]
    """Seconds from the first event to each event, without waits for copies. Ascending."""
    step_s: float
    """Seconds of the cycle without waits; not less than the last event's time."""
    out_bandwidth_bytes_per_s: float
    """Bandwidth of the lane out of the device, measured while the step ran."""
    in_bandwidth_bytes_per_s: float
    """Bandwidth of the lane into the device."""
    overhead_s: float = 0.0
    """Measured seconds of packing and unpacking one parked storage, without its copies."""
    max_in_flight_bytes: int = 2**62
    """Bound on the bytes on their way out, above which the computation waits. With 0 it waits for each at the next
    event.
    """
    base_bytes: tuple[int, ...] = ()
    """Device bytes outside of saved storages, the most between each event and the next; empty if not measured."""
    spread_bytes: int = 0
    """Bytes by which ``base_bytes`` may differ in another cycle. The budget that an error names has room for them."""
    budget_bytes: int | None = None
    """Most device bytes in total; ``None`` for the lowest peak that causes no stalls."""
    max_stall_share: float = 0.10
    """Share of the step above which offloading is declined because it stalls; 1 never declines for time."""
    min_saving_share: float = 0.05
    """Share of the peak below which offloading is declined because it saves too little; 0 never declines for bytes."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "OffloadProblem(storages=(storage,), event_times_s=(0.0, 0.1), step_s=0.1, "
            "out_bandwidth_bytes_per_s=1e9, in_bandwidth_bytes_per_s=1e9)",
            step_s=0, out_bandwidth_bytes_per_s=0, in_bandwidth_bytes_per_s=0, overhead_s=0, max_in_flight_bytes=0,
            spread_bytes=0, budget_bytes=0, max_stall_share=0, min_saving_share=0,
        )  # fmt: skip
        for name in ("out_bandwidth_bytes_per_s", "in_bandwidth_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` must be above 0 and finite, got {getattr(self, name)}")
        for index, storage in enumerate(self.storages):
            pack, need, free = storage.pack_event, storage.need_event, storage.free_event
            if not pack < need < free <= self.num_events:
                raise ValueError(
                    f"`storages`[{index}] must have its events in order, within the {self.num_events} of "
                    f"`event_times_s`, got pack_event={pack}, need_event={need}, free_event={free}"
                )

    @property
    def num_events(self) -> int:
        """The number of hook events in the cycle."""
        return len(self.event_times_s)
