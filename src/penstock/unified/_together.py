"""A table that the ranks of a group hold together: one copy of its rows on each machine, filled by all of them."""

import dataclasses
import os
import zlib
from typing import Any

import torch

from penstock.ranks import RankGroup, check_same, machine_name
from penstock.tiers import Charges
from penstock.unified._fill import RowSource, copy_rows, held_on_device, shaped
from penstock.unified._memory import InPlace, Memory
from penstock.unified._plan import TierPlan, plan_tiers
from penstock.unified._problem import TierProblem
from penstock.unified._rows import RowType
from penstock.unified._share import ROW_NUMBER_BYTES, HostShare
from penstock.unified._shared_memory import SharedMemory
from penstock.unified._sharing import SharedReads, num_slots_in
from penstock.unified._store import HeldRows, RowStore

_PAGE_BYTES = 4096


class Together:
    """The ranks of a group, and among them those on this machine, which share memory."""

    def __init__(self, ranks: RankGroup):
        self.ranks = ranks
        places = ranks.exchange([machine_name(), os.getpid()])
        mine = places[ranks.rank][0]
        self.members = [rank for rank, (machine, _) in enumerate(places) if machine == mine]
        """The ranks on this machine, this one included."""
        self.number = self.members.index(ranks.rank)
        """Number of this rank among them."""
        self._processes = [process for _, process in places]
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
        row = [*table.shape, str(table.dtype), table.stride_bytes]
        self.ranks.agree("the table's shape and dtype", row)
        scale = None if kind.scale is None else _checksum(kind.scale)
        self.ranks.agree("`key`, `dtype` and `scale`", [table.first_byte, str(kind.dtype), scale], self.members)
        state = os.stat(table.path)
        self.ranks.agree("the file", [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns], self.members)
        for name, value in options.items():
            self.ranks.agree(f"`{name}`", value, self.members)
        sums = self.ranks.exchange(None if scores is None else _checksum(scores))
        giving = [rank for rank in self.members if sums[rank] is not None]
        self._planner = (giving or self.members)[0]
        check_same("`scores`", sums, giving)

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
            told = dataclasses.asdict(shared.shape) | {"descriptors": descriptors}
        told = self.ranks.exchange(told)[self._planner]
        assert told is not None
        descriptors = told.pop("descriptors")
        if shared is None:
            shape = _PlanShape(**told)
            self._charge(shape, share, account)
            shared = SharedPlan(
                shape,
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
        copy_rows(store.files, None, plan.host_rows[mine], host[mine], stored, self.ranks.beat)
        device = held_on_device(store, None, plan.device_rows, stored, account, self.ranks.beat)
        self.ranks.exchange("filled")
        store.held = HeldRows(
            host=InPlace(host, Memory.of(host)), device=device,
            places=places.view(torch.int32) if len(places) else None,
        )  # fmt: skip
        if num_slots_in(len(reads), store.kind.width * store.kind.dtype.itemsize):
            store.shared = SharedReads(reads, store.kind)

    def _charge(self, shape: "_PlanShape", share: HostShare, account: Charges) -> None:
        account.charge("host", share.own_bytes + sum(shape.size_bytes()) // self.num_here)

    def _led(self, plan: TierPlan, num_rows: int, share: HostShare, account: Charges) -> "SharedPlan":
        """Return a plan in shared memory, as the rank makes it that plans for this machine."""
        num_device, num_host = len(plan.device_rows), len(plan.host_rows)
        shape = _PlanShape(
            num_rows=num_rows, num_host=num_host, num_device=num_device, row_bytes=plan.row_bytes,
            number_bytes=plan.host_rows.itemsize, reads_bytes=share.reads_bytes, device_share=plan.device_share,
            host_share=plan.host_share,
        )  # fmt: skip
        self._charge(shape, share, account)
        shared = SharedPlan(
            shape,
            *(SharedMemory.create(size_bytes, self.num_here, self.ranks.beat) for size_bytes in shape.size_bytes()),
        )
        shared.plan.host_rows.copy_(plan.host_rows)
        shared.plan.device_rows.copy_(plan.device_rows)
        places = shared.row_parts()[1].view(torch.int32)
        if len(places):
            places.fill_(-1)
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
    device_share: float
    host_share: float

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

    def __init__(self, shape: _PlanShape, rows: SharedMemory, numbers: SharedMemory):
        self.shape, self.rows, self.numbers = shape, rows, numbers
        dtype = torch.int32 if shape.number_bytes == ROW_NUMBER_BYTES else torch.int64
        host_rows, device_rows = _parts(numbers, shape.number_ends())
        self.plan = TierPlan(
            device_rows=device_rows.view(dtype), host_rows=host_rows.view(dtype),
            num_disk_rows=shape.num_rows - shape.num_host - shape.num_device, device_share=shape.device_share,
            host_share=shape.host_share, row_bytes=shape.row_bytes,
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


def _checksum(scores: torch.Tensor) -> int:
    """Return a checksum of scores as numbers, which do not depend on their dtype."""
    result = len(scores)
    for part in scores.detach().reshape(-1).split(2**20):
        result = zlib.crc32(part.to("cpu", torch.float64).contiguous().numpy().tobytes(), result)
    return result
