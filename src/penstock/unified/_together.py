"""A table that the ranks of a group hold together: one copy of its rows on each machine, or on all, filled by all."""

import dataclasses
import os
import zlib
from statistics import median
from typing import Any, Literal

import torch

from penstock.ranks import RankGroup, check_same, machine_name
from penstock.tiers import Charges
from penstock.unified._fill import RowSource, copy_rows, held_on_device, shaped
from penstock.unified._memory import InPlace, Memory
from penstock.unified._peer_link import link_bytes_for, partners
from penstock.unified._peer_rows import PeerRows
from penstock.unified._plan import TierPlan, plan_tiers
from penstock.unified._problem import Peers, TierProblem
from penstock.unified._rows import RowType
from penstock.unified._share import ROW_NUMBER_BYTES, HostShare
from penstock.unified._shared_memory import SharedMemory
from penstock.unified._sharing import SharedReads, num_slots_in
from penstock.unified._store import HeldRows, RowStore
from penstock.unified._table import Table

_PAGE_BYTES = 4096
ROUNDING_BYTES = 5 * _PAGE_BYTES
"""Bytes by which shared memory may exceed what is in it: its five parts are in whole pages."""
_PROBES = 64
"""Places of a file that are compared between machines, which have a copy each."""

_FIGURES = tuple(
    field.name for field in dataclasses.fields(TierPlan)
    if field.name not in ("device_rows", "host_rows", "row_bytes", "peers", "answering")
)  # fmt: skip
"""Fields of a plan that are numbers, but for the bytes of a row."""

Spread = Literal["copies", "parts"]
"""Machines whose files each have all rows, or each the next part of them."""


class Together:
    """The ranks of a group, and among them those on this machine, which share memory.

    ``peers``: whether machines also hold the table together, and what each one's file has of it; ``None`` if each has a
    copy of its own.
    """

    def __init__(self, ranks: RankGroup, peers: Spread | None = None):
        self.ranks = ranks
        places = ranks.exchange([machine_name(), os.getpid(), peers])
        check_same("`peers`", [place[2] for place in places], list(range(ranks.size)))
        names = [machine for machine, *_ in places]
        self.machines = [
            [rank for rank, name in enumerate(names) if name == machine] for machine in dict.fromkeys(names)
        ]
        """The ranks of each machine."""
        self.machine, *_ = partners(self.machines, ranks.rank)
        self.members = self.machines[self.machine]
        """The ranks on this machine, this one included."""
        self.spread = peers if len(self.machines) > 1 else None
        self.part_rows: tuple[int, ...] | None = None
        """Rows in the file of each machine; ``None`` if each has all rows."""
        self.number = self.members.index(ranks.rank)
        """Number of this rank among them."""
        self._processes = [process for _, process, _ in places]
        self._planner = self.members[0]
        """The rank that plans, and reserves memory, for this machine."""

    @property
    def num_here(self) -> int:
        """Number of ranks on this machine."""
        return len(self.members)

    def check(self, source: RowSource, kind: RowType, scores: torch.Tensor | None, **options: Any) -> None:
        """Raise `RankError` unless all ranks mean the same table, and those of this machine the same ``options``."""
        table = source.table
        if table is None:
            raise ValueError(
                "ranks share a file, since a tensor would be in memory once for each of them: on one rank "
                "unified.write_features(path, tensor), then on all TieredFeatures(path, host='8GiB', group=group)"
            )
        has_parts = self.spread == "parts"
        row = [*(table.shape[1:] if has_parts else table.shape), str(table.dtype), table.stride_bytes]
        self.ranks.agree("the shape and dtype of rows" if has_parts else "the table's shape and dtype", row)
        scale = None if kind.scale is None else _checksum(kind.scale)
        self.ranks.agree("`key`, `dtype` and `scale`", [table.first_byte, str(kind.dtype), scale], self.members)
        state = os.stat(table.path)
        self.ranks.agree("the file", [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns], self.members)
        for name, value in options.items():
            everywhere = self.spread is not None and name == "device_budget"
            self.ranks.agree(f"`{name}`", value, None if everywhere else self.members)
        sums = self.ranks.exchange(None if scores is None else _checksum(scores))
        givers = [[rank for rank in members if sums[rank] is not None] for members in self.machines]
        giving = givers[self.machine]
        self._planner = (giving or self.members)[0]
        check_same("`scores`", sums, giving)
        if self.spread is not None:
            self._check_machines(source, givers, sums)

    def _check_machines(self, source: RowSource, givers: list[list[int]], sums: list[int | None]) -> None:
        """Raise `RankError` unless machines that answer each other make the same plan, of the same rows."""
        leaders = [(giving or members)[0] for giving, members in zip(givers, self.machines, strict=True)]
        check_same("`scores`, which one rank of each machine gives", sums, leaders)
        assert source.table is not None
        if self.spread == "copies":
            self.ranks.agree("the file's content", _fingerprint(source.table))
        else:
            counts = self.ranks.exchange(source.table.shape[0])
            self.part_rows = tuple(counts[members[0]] for members in self.machines)

    def whole(self, source: RowSource) -> RowSource:
        """Return the source with the shape of the whole table, if this machine's file has a part of it."""
        if self.part_rows is None:
            return source
        return dataclasses.replace(source, shape=(sum(self.part_rows), *source.shape[1:]))

    def peer_bytes(self, row_bytes: int, num_rows: int, answer_bytes: int) -> int:
        """Return the bytes of buffers for rows from and for other machines, in each rank of this one.

        ``answer_bytes``: those for reading from the disk, which answers need besides.
        """
        if self.spread is None:
            return 0
        most_askers = max(len(partners(self.machines, rank)[1]) for rank in self.members)
        return link_bytes_for(row_bytes, len(self.machines), most_askers, num_rows) + answer_bytes

    def holds_all(self, share: HostShare) -> bool:
        """Return whether all machines that hold the table together have memory for all of it, as this one's share."""
        return self.spread is None or not any(self.ranks.exchange(share.needs_disk))

    def connect(self, store: RowStore, problem: TierProblem) -> TierProblem:
        """Connect this rank with other machines, if there are any to ask, and measure how fast these and disks are.

        The store's files must be open. Returns the problem with what is the same on all machines.
        """
        if self.spread is None:
            return problem
        assert store.files is not None
        store.peers = PeerRows(
            self.ranks, self.machines, store.files, store.kind, store.num_rows, self.part_rows, store.let_go
        )
        seconds = self.ranks.exchange(store.peers.row_seconds(self.ranks))
        spaces = [space for space in self.ranks.exchange(problem.host_bytes) if space is not None]
        peers = Peers(
            num_machines=len(self.machines), machine=self.machine, part_rows=self.part_rows,
            peer_row_s=median(peer_s for peer_s, _ in seconds), disk_row_s=median(disk_s for _, disk_s in seconds),
        )  # fmt: skip
        return dataclasses.replace(problem, host_bytes=min(spaces) if spaces else None, peers=peers)

    def plan(self, problem: TierProblem, share: HostShare, account: Charges) -> "SharedPlan":
        """Make the plan on one rank of each machine; the others map the memory in which it is.

        Before that, ``account`` is charged for what is this rank's own, and for an equal part of what is shared.
        """
        try:
            return self._planned(problem, share, account)
        except BaseException:
            account.give_back()
            raise

    def _planned(self, problem: TierProblem, share: HostShare, account: Charges) -> "SharedPlan":
        told: dict[str, Any] | None = None
        shared: SharedPlan | None = None
        if self.ranks.rank == self._planner:
            shared = self._led(plan_tiers(problem), problem.num_rows, share, account)
            descriptors = [shared.rows.descriptor, shared.numbers.descriptor]
            told = {"shape": dataclasses.asdict(shared.shape), "descriptors": descriptors}
        told = self.ranks.exchange(told)[self._planner]
        assert told is not None
        descriptors = told["descriptors"]
        if shared is None:
            shape = _PlanShape(**told["shape"])
            self._charge(shape, share, account)
            shared = SharedPlan(
                shape,
                problem.peers,
                *(
                    SharedMemory.open(self._processes[self._planner], descriptor, size_bytes, self.num_here)
                    for descriptor, size_bytes in zip(descriptors, shape.size_bytes(), strict=True)
                ),
            )
        self.ranks.exchange("mapped")
        shared.rows.close_descriptor()
        shared.numbers.close_descriptor()
        return shared

    def fill(self, store: RowStore, shared: "SharedPlan", account: Charges) -> None:
        """Fill the store's tiers above the disk from its file; each rank reads an equal part of what is shared.

        ``account`` is charged for the rows on the device.
        """
        shape, plan = shared.shape, shared.plan
        stored = RowType(store.kind.shape, store.kind.stored, store.kind.stored)
        raw, places, reads = shared.row_parts()
        host = shaped(raw, stored, shape.num_host)
        ends = [shape.num_host * number // self.num_here for number in range(self.num_here + 1)]
        mine = slice(ends[self.number], ends[self.number + 1])
        copy_rows(store.peers or store.files, None, plan.host_rows[mine], host[mine], stored, self.ranks.beat)
        device = held_on_device(store, None, plan.device_rows, stored, account, self.ranks.beat)
        self.ranks.exchange("filled")
        numbers = places.view(torch.int32) if len(places) else None
        if store.peers is not None:
            store.peers.hold(host, numbers, shape.num_device)
            self.ranks.exchange("holds")  # before anybody asks
            store.peers.ask_places()
        store.held = HeldRows(host=InPlace(host, Memory.of(host)), device=device, places=numbers)
        if num_slots_in(len(reads), store.kind.width * store.kind.dtype.itemsize):
            store.shared = SharedReads(reads, store.kind)

    def _charge(self, shape: "_PlanShape", share: HostShare, account: Charges) -> None:
        account.charge("host", share.own_bytes + sum(shape.size_bytes()) // self.num_here)

    def _led(self, plan: TierPlan, num_rows: int, share: HostShare, account: Charges) -> "SharedPlan":
        """Return a plan in shared memory, as the rank makes it that plans for this machine."""
        num_device, num_host = len(plan.device_rows), len(plan.host_rows)
        shape = _PlanShape(
            num_rows=num_rows, num_host=num_host, num_device=num_device, row_bytes=plan.row_bytes,
            number_bytes=plan.host_rows.itemsize, reads_bytes=share.reads_bytes,
            figures={name: getattr(plan, name) for name in _FIGURES},
        )  # fmt: skip
        self._charge(shape, share, account)
        shared = SharedPlan(
            shape,
            plan.peers,
            *(SharedMemory.create(size_bytes, self.num_here, self.ranks.beat) for size_bytes in shape.size_bytes()),
        )
        shared.plan.host_rows.copy_(plan.host_rows)
        shared.plan.device_rows.copy_(plan.device_rows)
        places = shared.row_parts()[1].view(torch.int32)
        if len(places):
            if plan.answering is None:
                places.fill_(-1)
            else:
                torch.sub(-2, plan.answering, out=places)
            places[plan.device_rows] = torch.arange(num_device, dtype=torch.int32, device="cpu")
            last = num_device + num_host
            places[plan.host_rows] = torch.arange(num_device, last, dtype=torch.int32, device="cpu")
        return shared


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PlanShape:
    """The numbers of a plan, from which follows where what is in the shared memory."""

    num_rows: int
    num_host: int
    num_device: int
    row_bytes: int
    number_bytes: int
    """Bytes of a row number."""
    reads_bytes: int
    """Bytes for rows that one rank has read from the disk."""
    figures: dict[str, Any]
    """All numbers of the plan."""

    def row_ends(self) -> list[int]:
        """Return where rows, places and rows read by others end; the latter two begin at whole pages."""
        places_bytes = ROW_NUMBER_BYTES * self.num_rows if self.num_host < self.num_rows else 0
        return _ends(self.num_host * self.row_bytes, places_bytes, self.reads_bytes)

    def number_ends(self) -> list[int]:
        """Return where the numbers of rows in host memory and on the device end."""
        return _ends(self.num_host * self.number_bytes, self.num_device * self.number_bytes)

    def size_bytes(self) -> tuple[int, int]:
        """Return the bytes of memory for rows, and of that for row numbers, each at least a page."""
        return max(_PAGE_BYTES, self.row_ends()[-1]), max(_PAGE_BYTES, self.number_ends()[-1])


class SharedPlan:
    """A plan in memory that the ranks of a machine share, and memory for the rows that it keeps.

    The numbers are apart from the rows, since a plan outlives its table.
    """

    def __init__(self, shape: _PlanShape, peers: Peers | None, rows: SharedMemory, numbers: SharedMemory):
        self.shape, self.rows, self.numbers = shape, rows, numbers
        dtype = torch.int32 if shape.number_bytes == ROW_NUMBER_BYTES else torch.int64
        host_rows, device_rows = _parts(numbers, shape.number_ends())
        self.plan = TierPlan(
            device_rows=device_rows.view(dtype), host_rows=host_rows.view(dtype),
            row_bytes=shape.row_bytes, peers=peers, **shape.figures,
        )  # fmt: skip
        """The plan."""

    def row_parts(self) -> list[torch.Tensor]:
        """Return memory for rows, for the place of each row, and for rows that others read, ``uint8``."""
        return _parts(self.rows, self.shape.row_ends())


def _ends(*sizes: int) -> list[int]:
    ends: list[int] = []
    for size_bytes in sizes:
        start = -(-ends[-1] // _PAGE_BYTES) * _PAGE_BYTES if ends else 0
        ends.append(start + size_bytes)
    return ends


def _parts(memory: SharedMemory, ends: list[int]) -> list[torch.Tensor]:
    starts = [0, *(-(-end // _PAGE_BYTES) * _PAGE_BYTES for end in ends[:-1])]
    return [memory.part(start, end - start) for start, end in zip(starts, ends, strict=True)]


def _fingerprint(table: Table) -> list[int]:
    """Return the size of a file, and a checksum of numbers all over it: files of the same rows have the same ones."""
    size_bytes, result = os.stat(table.path).st_size, 0
    with table.path.open("rb") as file:
        for number in range(_PROBES + 1):
            file.seek(max(0, size_bytes - _PAGE_BYTES) * number // _PROBES)
            result = zlib.crc32(file.read(_PAGE_BYTES), result)
    return [table.first_byte, size_bytes, result]


def _checksum(scores: torch.Tensor) -> int:
    """Return a checksum of scores as numbers, which do not depend on their dtype."""
    result = len(scores)
    for part in scores.detach().reshape(-1).split(2**20):
        result = zlib.crc32(part.to("cpu", torch.float64).contiguous().numpy().tobytes(), result)
    return result
