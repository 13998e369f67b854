"""The division of a host budget between rows that stay and other memory that must be held."""

import math
from dataclasses import dataclass

from penstock.errors import BudgetError
from penstock.units import format_bytes

ROW_NUMBER_BYTES = 4
"""Bytes of a row number in the plan, and of a row's place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """A divided host budget, in bytes."""

    rows_bytes: int | None
    """Bytes for rows that stay; ``None`` for all of them."""
    places_bytes: int
    """Bytes of the table that says where each row is; 0 if all are in host memory."""
    buffer_bytes: int
    """Bytes of buffers for reading from the disk; 0 if no rows are there."""
    in_flight_bytes: int | None
    """Bytes for rows that a loader has read in advance, in each rank; ``None`` for no limit."""
    needs_disk: bool
    """Whether some rows are neither on the device nor in host memory."""

    num_ranks: int = 1
    """Number of ranks that share the budget."""
    peer_bytes: int = 0
    """Bytes of buffers for rows from other machines and for them, in each rank; 0 if no machine asks another."""
    reads_bytes: int = 0
    """Bytes for rows that one of several ranks has read from the disk, so that the others need not."""

    @property
    def own_bytes(self) -> int:
        """Bytes that each rank needs for itself."""
        return self.buffer_bytes + self.peer_bytes + (self.in_flight_bytes or 0)

    @property
    def beside_bytes(self) -> int:
        """Bytes of everything except the rows that stay, in all ranks."""
        return self.places_bytes + self.num_ranks * self.own_bytes + self.reads_bytes


def share_host(
    host_bytes: int | None,
    *,
    num_rows: int,
    row_bytes: int,
    device_bytes: int,
    in_flight: int | None,
    buffer_bytes: int,
    num_ranks: int = 1,
    peer_bytes: int = 0,
    page_bytes: int = 0,
    may_hold_all: bool = True,
) -> HostShare:
    """Divide ``host_bytes`` (``None``: no bound) of a machine between rows and the rest.

    ``in_flight`` is as asked, for all ranks; ``buffer_bytes``, of each rank, counts only if a disk is needed, and
    ``peer_bytes``, of each rank, in any case, as do ``page_bytes`` for shared memory in whole pages. Raises
    ``BudgetError``, which names the smallest budget that works, if it is less than what must be held. Without
    ``may_hold_all`` rows are elsewhere even if there is memory for all, as where a smaller machine has none.
    """
    total, places = num_rows * row_bytes, ROW_NUMBER_BYTES * num_rows + page_bytes
    whole = total + num_ranks * peer_bytes + page_bytes
    if host_bytes is None or (whole <= host_bytes and may_hold_all):
        left = in_flight if in_flight is not None or host_bytes is None else host_bytes - whole
        is_split = host_bytes is None and device_bytes > 0
        return HostShare(
            rows_bytes=host_bytes, places_bytes=places if is_split else 0, buffer_bytes=0,
            in_flight_bytes=None if left is None else left // num_ranks, needs_disk=False, num_ranks=num_ranks,
            peer_bytes=peer_bytes,
        )  # fmt: skip
    fixed = places + num_ranks * peer_bytes + (in_flight or 0)
    without_disk = _rows_beside(fixed, host_bytes, row_bytes)
    if without_disk + device_bytes >= total and fixed <= host_bytes and may_hold_all:
        return HostShare(
            rows_bytes=without_disk, places_bytes=places, buffer_bytes=0,
            in_flight_bytes=None if in_flight is None else in_flight // num_ranks, needs_disk=False,
            num_ranks=num_ranks, peer_bytes=peer_bytes,
        )  # fmt: skip
    # an eighth for rows that are on their way, half of which is kept a while for who needs them next
    keeps = num_ranks > 1 or peer_bytes > 0
    reads, buffers = host_bytes // 16 if keeps else 0, num_ranks * (buffer_bytes + peer_bytes)
    ahead = host_bytes // 8 - reads if in_flight is None else in_flight
    fixed = places + buffers + ahead + reads
    if fixed > host_bytes:
        # shares grow with a larger budget
        grown = 1 / 8 if in_flight is None else 1 / 16 if keeps else 0
        constant = places + buffers + (0 if in_flight is None else in_flight)
        least = constant + math.ceil(constant * grown / (1 - grown))
        least = min(whole, least) if may_hold_all else least
        raise BudgetError(
            f"`host` must be at least {least}, got {format_bytes(host_bytes)}: {format_bytes(places)} are "
            f"needed to know where each row is, {format_bytes(buffers)} to read from the disk"
            f"{' and from other machines' if peer_bytes else ''}, and "
            f"{format_bytes(ahead + reads)} for rows read in advance"
        )
    return HostShare(
        rows_bytes=_rows_beside(fixed, host_bytes, row_bytes), places_bytes=places, buffer_bytes=buffer_bytes,
        in_flight_bytes=ahead // num_ranks, needs_disk=True, num_ranks=num_ranks, reads_bytes=reads,
        peer_bytes=peer_bytes,
    )  # fmt: skip


def _rows_beside(fixed: int, host_bytes: int, row_bytes: int) -> int:
    """Return the bytes left for rows, each with its number."""
    return max(0, host_bytes - fixed) // (row_bytes + ROW_NUMBER_BYTES) * row_bytes
