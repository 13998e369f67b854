"""The rows of a table on the device, in host memory and on the disk, and how a mini-batch of them is read."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.storages import address, as_plain
from penstock.unified._counts import Counts
from penstock.unified._disk import RowFiles
from penstock.unified._gather import gather_rows, has_triton, in_order, start_gather
from penstock.unified._library import library
from penstock.unified._memory import InPlace, Memory
from penstock.unified._peer_rows import PeerRows
from penstock.unified._readers import Readers
from penstock.unified._rows import RowType, as_index, check_range, gather, out_of_range, read_rows
from penstock.unified._sharing import SharedReads
from penstock.units import format_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureStatistics:
    """The cost of reading rows so far."""

    device_rows: int = 0
    """Rows that came from the device."""
    host_rows: int = 0
    """Rows that came from host memory."""
    cached_rows: int = 0
    """Rows that lay on the disk, but that the system still had in its page cache."""
    shared_rows: int = 0
    """Rows that lay elsewhere, but that a rank of this machine had read not long before."""
    peer_rows: int = 0
    """Rows that came from the memory of another machine."""
    peer_disk_rows: int = 0
    """Rows that another machine read from its disk."""
    peer_s: float = 0.0
    """Seconds in which rows from other machines were awaited, in all threads."""
    disk_rows: int = 0
    """Rows that came from the disk."""
    disk_requests: int = 0
    """Requests to the disk; adjacent rows share one."""
    disk_read_bytes: int = 0
    """Bytes that these requests read, in whole sectors."""
    disk_row_bytes: int = 0
    """Bytes of the rows that came from the disk."""
    disk_s: float = 0.0
    """Seconds spent reading from the disk, in all threads."""

    @property
    def hit_rate(self) -> float:
        """Share of rows that were held on a device or in host memory, as planned; 1 if none were read.

        Memory of other machines counts.
        """
        held = self.device_rows + self.host_rows + self.peer_rows
        total = held + self.cached_rows + self.shared_rows + self.disk_rows + self.peer_disk_rows
        return held / total if total else 1.0

    @property
    def read_amplification(self) -> float:
        """Bytes read from the disk for each byte of a row; 1 if none were read."""
        return self.disk_read_bytes / self.disk_row_bytes if self.disk_row_bytes else 1.0

    def __str__(self) -> str:
        return format_fields(self, "hit_rate", "read_amplification")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldRows:
    """The rows that are held in memory, and the place of every row."""

    host: InPlace
    """Rows in host memory."""
    device: torch.Tensor | None = None
    """Rows on the device; ``None`` for none."""
    places: torch.Tensor | None = None
    """Place of each row, ``int32 [rows]``: first those on the device, then those in host memory; -1 on the disk.

    ``None`` if all are in host memory, in order.
    """

    @staticmethod
    def none() -> "HeldRows":
        """Return no rows."""
        host = torch.empty(0, device="cpu")
        return HeldRows(host=InPlace(host, Memory.of(host)))


class RowStore:
    """A table's rows, wherever they are. They are read from many threads, until the store is closed."""

    def __init__(self, num_rows: int, kind: RowType, device: torch.device, closed: str):
        self.num_rows, self.kind, self.device = num_rows, kind, device
        self.held = HeldRows.none()
        """The rows in memory."""
        self.files: RowFiles | None = None
        """The files with all rows; ``None`` if memory holds them all."""
        self.peers: PeerRows | None = None
        """Rows that other machines hold; ``None`` if this one needs no other."""
        self.shared: SharedReads | None = None
        """Rows that ranks of this machine have read lately; ``None`` if no ranks share the table."""
        self.give_back: Callable[[], object] = lambda: None
        """Gives back what was charged for what is held here."""
        self.counts = Counts(FeatureStatistics())
        """The cost of reading rows so far."""
        self._readers = Readers(closed)

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """Return rows ``[*index.shape, *row]`` on the device.

        Raises ``IndexError`` for rows that do not exist, ``TierReadError`` if the disk fails, ``ValueError`` with the
        message ``closed`` after `close`.
        """
        if type(index) is not torch.Tensor:
            index = as_plain("index", index)
        with self._readers:
            if self.device.type == "cpu":
                return self._read_by_cpu(index)
            with torch.cuda.device(self.device):
                return self._read_for_device(index)

    def close(self, wait_s: float | None = 0.0) -> None:
        """Close files and free memory once nobody reads. Idempotent.

        Other machines read until they close the table too: waits for that until they have read nothing for ``wait_s``
        seconds (``None``: a few), and else leaves it to the thread of the last.
        """
        self._readers.close()
        if self.peers is None:
            self.let_go()
        else:
            self.peers.link.leave(wait_s)

    def let_go(self) -> None:
        """Close files and free memory, now."""
        if self.files is not None:
            self.files.close()
        if self.peers is not None:
            self.peers.let_go()
        self.held, self.shared = HeldRows.none(), None
        self.give_back()

    def abandon(self) -> None:
        """Give back what was charged, or do so once no other machine needs the rows: the table is gone."""
        if self.peers is None:
            self.give_back()
        else:
            self.peers.link.leave(0.0)

    def _read_by_cpu(self, index: torch.Tensor) -> torch.Tensor:
        held = self.held
        held.host.before(None, writes=False)
        if held.places is None:
            rows = read_rows(held.host.plain, index, self.kind)
            self.counts.add(host_rows=index.numel())
            return rows
        flat = as_index(index)
        out = self.kind.empty(*index.shape)
        (slots, positions), counts = split(held.places, 0, flat)
        num_host = counts[1]
        self._read_cold(slots[num_host:], out, positions[num_host:])
        gather(held.host.plain, slots[:num_host], self.kind, out, positions[:num_host])
        self.counts.add(host_rows=num_host)
        return out

    def _read_for_device(self, index: torch.Tensor) -> torch.Tensor:
        """Read cold rows into pinned memory first; the device reads the others by itself."""
        held, host = self.held, self.held.host
        if held.places is None:
            self.counts.add(host_rows=index.numel())
            return gather_rows(host.plain, index, self.device, host.memory, self.kind)
        flat = as_index(index)
        num_device = 0 if held.device is None else len(held.device)
        places, counts = split(held.places, num_device, flat, is_pinned=True)
        ends = counts[0], counts[0] + counts[1]
        cold = self.kind.empty(counts[2], is_pinned=True)
        self._read_cold(places[0, ends[1] :], cold, None)
        out = self.kind.empty(*index.shape, device=self.device)
        slots, positions = places.to(self.device, non_blocking=True)
        rows = out.view(-1, *self.kind.shape)
        self._read_by_device(held.device, slots[: ends[0]], positions[: ends[0]], rows)
        host.before(self.device, writes=False)
        self._read_by_device(host.plain, slots[ends[0] : ends[1]], positions[ends[0] : ends[1]], rows)
        host.after(self.device, writes=False)
        if counts[2]:
            rows[positions[ends[1] :]] = cold.to(self.device, non_blocking=True)
        self.counts.add(device_rows=counts[0], host_rows=counts[1])
        return out

    def _read_by_device(
        self, table: torch.Tensor | None, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor
    ) -> None:
        if table is None or not len(slots):
            return
        if has_triton() and (table.device.type == "cuda" or self.held.host.memory.is_registered):
            bad = torch.empty(1, dtype=torch.int64, device=self.device)  # never read: `split` has checked the rows
            rows, places = in_order(table, slots, positions, self.kind)
            start_gather(table, rows, places, out, bad, self.kind, wraps=False)
        elif table.device.type == "cuda":
            out[positions] = self.kind.convert(table[slots])
        else:
            out[positions] = gather_rows(table, slots.cpu(), self.device, None, self.kind)

    def _read_cold(self, rows: torch.Tensor, out: torch.Tensor, positions: torch.Tensor | None) -> None:
        if not len(rows):
            return
        reader = self.peers or self.files
        assert reader is not None
        num_shared, reports = 0, []
        if self.shared is None:
            reports.append(reader.read(rows, self.kind, out, positions))
        else:
            num_shared, reports = self.shared.read(reader, rows, self.kind, out, positions)
        num_cached = sum(report.num_cached for report in reports)
        num_peer, num_peer_disk = (
            sum(report.num_peer for report in reports), sum(report.num_peer_disk for report in reports),
        )  # fmt: skip
        num_rows = len(rows) - num_shared - num_cached - num_peer - num_peer_disk
        self.counts.add(
            shared_rows=num_shared, cached_rows=num_cached, disk_rows=num_rows, peer_rows=num_peer,
            peer_disk_rows=num_peer_disk, peer_s=sum(report.peer_s for report in reports),
            disk_requests=sum(report.num_requests for report in reports),
            disk_read_bytes=sum(report.read_bytes for report in reports),
            disk_row_bytes=num_rows * self.kind.row_bytes, disk_s=sum(report.disk_s for report in reports),
        )  # fmt: skip


def split(
    places: torch.Tensor, num_device: int, index: torch.Tensor, *, is_pinned: bool = False
) -> tuple[torch.Tensor, list[int]]:
    """Split rows by tier: device, host, disk. Return slots and positions in the index, and the counts.

    The former are ``int64 [2, rows]``, in memory that a device copies from by itself if ``is_pinned``. Raises
    ``IndexError`` for rows that do not exist.
    """
    both = torch.empty(2, len(index), dtype=torch.int64, device="cpu", pin_memory=is_pinned)
    compiled = library()
    if compiled is None:
        rows = check_range(index, len(places))
        place = places[rows]
        tier = torch.where(place < 0, 2, (place >= num_device).long())
        order = tier.argsort(stable=True)
        both[0] = torch.where(place < 0, rows, place - torch.where(tier == 1, num_device, 0))[order]
        both[1] = order
        return both, torch.bincount(tier, minlength=3).tolist()
    scratch, counts = (
        torch.empty(len(index), dtype=torch.int32, device="cpu"),
        torch.empty(3, dtype=torch.int64, device="cpu"),
    )
    bad = compiled.penstock_split(
        address(places), len(places), num_device, address(index), len(index), address(both[0]), address(both[1]),
        address(counts), address(scratch),
    )  # fmt: skip
    if bad >= 0:
        raise out_of_range(int(index[bad]), bad, len(places))
    return both, counts.tolist()
