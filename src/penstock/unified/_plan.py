"""The plan of which rows lie where: the most wanted on the device, the next in host memory, the rest on disk.

The problem: every access to a row costs as much as its tier. All rows have the same size, so taking them by descending
score is optimal for the given scores. Source: Min et al., "Graph Neural Network Training with Data Tiering" (arXiv
2111.05894). Cost: one sort. For equal scores the lower row number comes first, so that plans are repeatable.

With peers, the memory of all machines is divided between rows that each machine holds and rows that one of them holds.
A row in each memory saves messages, one in a single memory saves space for others that would be on a disk. Peers and
the disk answer at the same time, so a mini-batch takes as long as the slower of the two. With more rows in each memory
the peers have less to do and the disks more, so the best division is where both take as long, found by bisection. But
for rounding to whole rows it is optimal: whatever the two times weigh, a row costs its machine memory in proportion to
the copies, and messages or reads in proportion to its score, so that rows of a higher score get the more copies.
"""

from dataclasses import dataclass

import torch

from penstock.arguments import checked
from penstock.links import DISK, HOST, PEER, Link
from penstock.unified._problem import Peers, TierProblem
from penstock.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TierPlan:
    """The tier of every row, and the share of the accesses that each tier is expected to serve.

    It is wide because there are five tiers.
    """

    device_rows: torch.Tensor
    """Rows on the device, ascending; ``int32`` if row numbers fit, else ``int64``."""
    host_rows: torch.Tensor
    """Rows in host memory, in the same format as ``device_rows``."""
    num_disk_rows: int
    """Number of rows that are on this machine's disk and in no memory that it reads."""
    device_share: float
    """Expected share of accesses to the device, 0 to 1."""
    host_share: float
    """Expected share of accesses to host memory, 0 to 1."""
    row_bytes: int
    """Bytes of a row in memory."""
    num_peer_rows: int = 0
    """Number of rows in the memory of other machines, and not in this one's."""
    num_peer_disk_rows: int = 0
    """Number of rows on the disks of other machines only."""
    num_replicated_rows: int = 0
    """Number of those in ``host_rows`` that every machine holds; 0 without peers."""
    peer_share: float = 0.0
    """Expected share of accesses to the memory of other machines, 0 to 1."""
    peer_disk_share: float = 0.0
    """Expected share of accesses to the disks of other machines, 0 to 1."""
    peers: Peers | None = None
    """The machines that hold the table together; ``None`` if each holds its own."""
    answering: torch.Tensor | None = None
    """The machine that answers for each row, ``int16 [rows]``; -1 where this one needs no other.

    ``None`` without peers, and in the plan of a `TieredFeatures`, which keeps the place of each row.
    """

    @property
    def disk_share(self) -> float:
        """Expected share of accesses to this machine's disk, 0 to 1."""
        rest = 1.0 - self.device_share - self.host_share - self.peer_share - self.peer_disk_share
        return max(0.0, rest) if self.num_disk_rows else 0.0

    @property
    def hit_rate(self) -> float:
        """Expected share of accesses that need no disk."""
        return 1.0 - self.disk_share - self.peer_disk_share

    @property
    def cold_row_s(self) -> float:
        """Predicted seconds for each row of a mini-batch, where peers and disks set the pace; 0 without peers."""
        if self.peers is None:
            return 0.0
        peer_s = self.peers.peer_row_s * (self.peer_share + self.peer_disk_share)
        return max(peer_s, self.peers.disk_row_s * (self.disk_share + self.peer_disk_share))

    def explain(self) -> str:
        """Return a table of the rows, bytes and expected accesses of every tier."""
        tiers = [
            ("device", len(self.device_rows), self.device_share), ("host", len(self.host_rows), self.host_share),
        ]  # fmt: skip
        if self.peers is not None:
            tiers.append(("peers", self.num_peer_rows, self.peer_share))
        tiers.append(("disk", self.num_disk_rows, self.disk_share))
        if self.peers is not None:
            tiers.append(("peers' disks", self.num_peer_disk_rows, self.peer_disk_share))
        width = max(len(name) for name, _, _ in tiers) + 2
        lines = [f"{'tier':<{width}}{'rows':>14}{'bytes':>12}{'accesses':>10}"]
        for name, count, share in tiers:
            lines.append(f"{name:<{width}}{count:>14,}{format_bytes(count * self.row_bytes):>12}{share:>10.1%}")
        return "\n".join([*lines, *self._rates()])

    def _rates(self) -> list[str]:
        if self.peers is None:
            return []
        rates = [
            f"{1 / seconds:,.0f} rows/s" if seconds else "any rate"
            for seconds in (self.peers.peer_row_s, self.peers.disk_row_s)
        ]
        return [
            f"{self.peers.num_machines} machines: each holds the same {self.num_replicated_rows:,} rows, and "
            f"{len(self.host_rows) - self.num_replicated_rows:,} of its own",
            f"{Link(PEER, HOST)} {rates[0]}, {Link(DISK, HOST)} {rates[1]}",
        ]


@checked("penstock.unified.plan_tiers(problem)")
def plan_tiers(problem: TierProblem) -> TierPlan:
    """Assign rows to tiers by descending score. Raises ``ValueError`` unless there is one finite score for each row."""
    num_device = min(problem.num_rows, problem.device_bytes // max(1, problem.row_bytes))
    num_left = problem.num_rows - num_device
    num_host = num_left
    if problem.host_bytes is not None:
        num_host = min(num_left, problem.host_bytes // max(1, problem.row_bytes))
    scores = _checked(problem)
    if problem.scores is None or num_device + num_host == 0 or problem.num_rows == num_host:
        order = torch.arange(problem.num_rows, device="cpu")
    else:
        order = scores.argsort(descending=True, stable=True)
    if problem.peers is not None and problem.peers.num_machines > 1:
        return _planned_with_peers(problem, problem.peers, scores, order, num_device, num_host)
    order = order[: num_device + num_host]
    device, host = (_numbers(rows, problem) for rows in order.tensor_split([num_device]))
    total = float(scores.sum()) or 1.0
    return TierPlan(
        device_rows=device, host_rows=host, num_disk_rows=num_left - num_host,
        device_share=float(scores[device].sum()) / total, host_share=float(scores[host].sum()) / total,
        row_bytes=problem.row_bytes,
    )  # fmt: skip


def _planned_with_peers(
    problem: TierProblem, peers: Peers, scores: torch.Tensor, order: torch.Tensor, num_device: int, num_host: int
) -> TierPlan:
    num_replicated, num_once = _division(_shares(scores[order[num_device:]]), num_host, peers)
    device, replicated, once, rest = order.tensor_split(
        [num_device, num_device + num_replicated, num_device + num_replicated + num_once]
    )
    # taking turns by descending score gives all machines as much to answer
    owners = torch.arange(num_once, device="cpu") % peers.num_machines
    is_own = owners == peers.machine
    answering = torch.full((problem.num_rows,), -1, dtype=torch.int16, device="cpu")
    answering[once] = torch.where(is_own, -1, owners).short()
    is_elsewhere = torch.zeros(len(rest), dtype=torch.bool, device="cpu")
    if peers.part_rows is not None:
        parts = machines_of(rest, peers.part_rows)
        is_elsewhere = parts != peers.machine
        answering[rest] = torch.where(is_elsewhere, parts, -1).short()
    total = float(scores.sum()) or 1.0
    held = torch.cat([replicated, once[is_own]])

    def share(rows: torch.Tensor) -> float:
        return float(scores[rows].sum()) / total

    return TierPlan(
        device_rows=_numbers(device, problem), host_rows=_numbers(held, problem),
        num_disk_rows=int((~is_elsewhere).sum()), device_share=share(device), host_share=share(held),
        row_bytes=problem.row_bytes, num_peer_rows=int((~is_own).sum()), num_peer_disk_rows=int(is_elsewhere.sum()),
        num_replicated_rows=num_replicated, peer_share=share(once[~is_own]), peer_disk_share=share(rest[is_elsewhere]),
        peers=peers, answering=answering,
    )  # fmt: skip


def _division(shares: torch.Tensor, room: int, peers: Peers) -> tuple[int, int]:
    """Return how many rows every machine holds, and how many more one of them holds.

    ``shares[n]``: share of accesses to the first ``n`` rows, ``float64 [rows + 1]``; ``room``: rows that a machine has
    memory for.
    """
    num_rows, num_others = len(shares) - 1, peers.num_machines - 1
    least = max(0, -(-(peers.num_machines * room - num_rows) // num_others))  # less would leave memory unused

    def held(replicated: int) -> int:
        return min(num_rows, replicated + peers.num_machines * (room - replicated))

    def seconds(replicated: int) -> tuple[float, float]:
        on_disk = float(shares[-1] - shares[held(replicated)])
        elsewhere = float(shares[held(replicated)] - shares[replicated])
        asked = elsewhere + (on_disk if peers.part_rows is not None else 0.0)
        return peers.peer_row_s * asked * num_others / peers.num_machines, peers.disk_row_s * on_disk

    low, high = least, room
    while low < high:  # the first at which the disk takes as long as the peers
        middle = (low + high) // 2
        peer_s, disk_s = seconds(middle)
        low, high = (low, middle) if disk_s >= peer_s else (middle + 1, high)
    best = min((low, max(least, low - 1)), key=lambda replicated: max(seconds(replicated)))
    return best, held(best) - best


def machines_of(rows: torch.Tensor, part_rows: tuple[int, ...]) -> torch.Tensor:
    """Return the machine in whose file each row is, ``int64``, if the files' parts follow each other."""
    ends = torch.tensor(part_rows, dtype=torch.int64, device="cpu").cumsum(0)
    return torch.bucketize(rows.long(), ends, right=True)


def _shares(scores: torch.Tensor) -> torch.Tensor:
    """Return the share of accesses to the first rows, for every number of them."""
    sums = torch.zeros(len(scores) + 1, dtype=torch.float64, device="cpu")
    torch.cumsum(scores, 0, out=sums[1:])
    return sums / (float(sums[-1]) or 1.0)


def _numbers(rows: torch.Tensor, problem: TierProblem) -> torch.Tensor:
    return rows.to(torch.int32 if problem.num_rows < 2**31 else torch.int64).sort().values


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
