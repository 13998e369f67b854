"""The plan of which rows lie where: the most wanted on the device, the next in host memory, the rest on disk.

The problem: every access to a row costs as much as its tier. All rows have the same size, so taking them by descending
score is optimal for the given scores. Source: Min et al., "Graph Neural Network Training with Data Tiering" (arXiv
2111.05894). Cost: one partial sort. For equal scores the lower row number comes first, so that plans are repeatable.
"""

from dataclasses import dataclass

import torch

from penstock.arguments import checked
from penstock.unified._problem import TierProblem
from penstock.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TierPlan:
    """The tier of every row, and the share of the accesses that each tier is expected to serve."""

    device_rows: torch.Tensor
    """Rows on the device, ascending; ``int32`` if row numbers fit, else ``int64``."""
    host_rows: torch.Tensor
    """Rows in host memory, in the same format as ``device_rows``."""
    num_disk_rows: int
    """Number of all other rows."""
    device_share: float
    """Expected share of accesses to the device, 0 to 1."""
    host_share: float
    """Expected share of accesses to host memory, 0 to 1."""
    row_bytes: int
    """Bytes of a row in memory."""

    @property
    def disk_share(self) -> float:
        """Expected share of accesses to the disk, 0 to 1."""
        return max(0.0, 1.0 - self.device_share - self.host_share) if self.num_disk_rows else 0.0

    @property
    def hit_rate(self) -> float:
        """Expected share of accesses that need no disk."""
        return 1.0 - self.disk_share

    def explain(self) -> str:
        """Return a table of the rows, bytes and expected accesses of every tier."""
        lines = [f"{'tier':<8}{'rows':>14}{'bytes':>12}{'accesses':>10}"]
        for name, count, share in (
            ("device", len(self.device_rows), self.device_share),
            ("host", len(self.host_rows), self.host_share),
            ("disk", self.num_disk_rows, self.disk_share),
        ):
            lines.append(f"{name:<8}{count:>14,}{format_bytes(count * self.row_bytes):>12}{share:>10.1%}")
        return "\n".join(lines)


@checked("penstock.unified.plan_tiers(problem)")
def plan_tiers(problem: TierProblem) -> TierPlan:
    """Assign rows to tiers by descending score. Raises ``ValueError`` unless there is one finite score for each row."""
    num_device = min(problem.num_rows, problem.device_bytes // max(1, problem.row_bytes))
    num_left = problem.num_rows - num_device
    num_host = num_left
    if problem.host_bytes is not None:
        num_host = min(num_left, problem.host_bytes // max(1, problem.row_bytes))
    scores = _checked(problem)
    if num_device + num_host == 0 or problem.num_rows == num_host:
        order = torch.arange(problem.num_rows, device="cpu")
    else:
        order = scores.argsort(descending=True, stable=True)
    order = order[: num_device + num_host].to(torch.int32 if problem.num_rows < 2**31 else torch.int64)
    device, host = order[:num_device].sort().values, order[num_device:].sort().values
    total = float(scores.sum()) or 1.0
    return TierPlan(
        device_rows=device, host_rows=host, num_disk_rows=num_left - num_host,
        device_share=float(scores[device].sum()) / total, host_share=float(scores[host].sum()) / total,
        row_bytes=problem.row_bytes,
    )  # fmt: skip


def _checked(problem: TierProblem) -> torch.Tensor:
    if problem.scores is None:
        return torch.ones(problem.num_rows, dtype=torch.float64, device="cpu")
    scores = problem.scores.detach().to("cpu", torch.float64).reshape(-1)
    if len(scores) != problem.num_rows:
        raise ValueError(
            f"`scores` must have one number for each of the table's {problem.num_rows} rows, got {len(scores)}"
        )
    if not bool(torch.isfinite(scores).all()) or bool((scores < 0).any()):
        raise ValueError(
            "`scores` must be expected accesses, finite and not negative, as unified.expected_accesses returns them"
        )
    return scores
