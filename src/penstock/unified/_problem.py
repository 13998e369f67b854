"""The input for assigning rows to tiers."""

from dataclasses import dataclass

import torch

from penstock.arguments import check_fields

_MOST_MACHINES = 2**15 - 2
"""Machines that ``int16`` can name, with two numbers for other places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The machines that hold a table together, as one of them sees the others."""

    num_machines: int
    """Number of machines, this one included."""
    machine: int
    """Number of this machine among them."""
    peer_row_s: float
    """Seconds that a row from another machine takes, with many under way; measured by `TieredFeatures`."""
    disk_row_s: float
    """Seconds that a row from a disk takes, with many under way; measured by `TieredFeatures`."""
    part_rows: tuple[int, ...] | None = None
    """Rows in the file of each machine, whose parts follow each other; ``None`` if each file has all rows."""

    def __post_init__(self) -> None:
        check_fields(
            self, "Peers(num_machines=4, machine=0, peer_row_s=2e-6, disk_row_s=8e-6)", num_machines=1, machine=0,
            peer_row_s=0, disk_row_s=0,
        )  # fmt: skip
        parts = self.part_rows
        is_one = self.machine < self.num_machines <= _MOST_MACHINES
        if not is_one or (parts is not None and (len(parts) != self.num_machines or min(parts) < 0)):
            raise ValueError(
                f"`machine` must be one of at most {_MOST_MACHINES} machines, from 0, and `part_rows` a number of rows "
                f"for each, got {self.machine} of `num_machines` {self.num_machines}, and {self.part_rows}: "
                "Peers(num_machines=2, machine=1, peer_row_s=2e-6, disk_row_s=8e-6, part_rows=(500, 500))"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TierProblem:
    """The rows, and the space that each tier has for them."""

    num_rows: int
    """Number of rows of the table."""
    row_bytes: int
    """Bytes of a row in memory."""
    device_bytes: int
    """Space on the device; 0 for none."""
    host_bytes: int | None
    """Space in host memory; ``None`` if all rows fit."""
    scores: torch.Tensor | None = None
    """Expected accesses to every row in a mini-batch, or anything proportional, ``float [num_rows]``.

    ``None`` if all rows are alike.
    """
    peers: Peers | None = None
    """Machines that hold the table together, each with these bytes; ``None`` for one machine."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "TierProblem(num_rows=1000, row_bytes=512, device_bytes=0, host_bytes=2**20)",
            num_rows=0,
            row_bytes=0,
            device_bytes=0,
            host_bytes=0,
        )
        part_rows = None if self.peers is None else self.peers.part_rows
        if part_rows is not None and sum(part_rows) != self.num_rows:
            raise ValueError(f"`part_rows` must add up to the table's {self.num_rows} rows, got {part_rows}")
