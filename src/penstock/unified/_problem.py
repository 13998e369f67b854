"""The input for assigning rows to tiers."""

from dataclasses import dataclass

import torch

from penstock.arguments import check_fields


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

    def __post_init__(self) -> None:
        check_fields(
            self,
            "TierProblem(num_rows=1000, row_bytes=512, device_bytes=0, host_bytes=2**20)",
            num_rows=0,
            row_bytes=0,
            device_bytes=0,
            host_bytes=0,
        )
