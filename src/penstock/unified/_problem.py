"""What is known before rows are dealt out to tiers."""

from dataclasses import dataclass

import torch

from penstock.arguments import check_fields


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TierProblem:
    """Rows, and the room there is for them."""

    num_rows: int
    """Of the table."""
    row_bytes: int
    """Of a row in memory."""
    device_bytes: int
    """Room on the device; 0: none."""
    host_bytes: int | None
    """Room in host memory; ``None``: enough for all."""
    scores: torch.Tensor | None = None
    """Expected accesses of every row in a mini-batch, or anything proportional to them, ``float [num_rows]``; ``None``:
    all alike."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "TierProblem(num_rows=1000, row_bytes=512, device_bytes=0, host_bytes=2**20)",
            num_rows=0,
            row_bytes=0,
            device_bytes=0,
            host_bytes=0,
        )
