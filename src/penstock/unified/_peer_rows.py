"""The rows of a table that this machine does not hold in memory: on its disk, and in memory and on disks of others."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import zip_longest

import torch

from penstock.ranks import RankGroup
from penstock.unified._disk import ReadReport, RowFiles
from penstock.unified._peer_link import PeerLink
from penstock.unified._plan import machines_of
from penstock.unified._readers import Readers
from penstock.unified._rows import RowType, check_range, gather

_TRIAL_S = 0.05
"""Seconds that measuring a rate takes, if its first rows do not take longer."""
_FIRST_TRIAL, _LAST_TRIAL = 64, 65_536
"""Rows that the first measurement of a rate reads, and the last one at most."""
_DISK_TRIAL, _APART = 4096, 16
"""Rows that are read at once to measure the disk, at most, and one of how many, so that few share a request."""


class PeerRows:
    """Reads rows from this machine's file and from other machines, and gives rows to them.

    ``part_rows``: rows in the file of each machine, whose parts follow each other; ``None`` if each file has all rows.
    ``at_end`` is called when nobody needs this rank's rows any more.
    """

    def __init__(
        self,
        ranks: RankGroup,
        machines: list[list[int]],
        files: RowFiles,
        kind: RowType,
        num_rows: int,
        part_rows: tuple[int, ...] | None,
        at_end: Callable[[], None],
    ):
        self.part_rows = part_rows
        self._readers, self._disk = Readers("the table was closed"), threading.Lock()
        self._files, self._stored = files, RowType(kind.shape, kind.stored, kind.stored)
        self._held: tuple[torch.Tensor, torch.Tensor | None, int] | None = None
        self.link = PeerLink(ranks, machines, kind.row_bytes, num_rows, self._answer, at_end)
        self._first_row = sum(part_rows[: self.link.machine]) if part_rows is not None else 0
        self._asks_places = False
        self._numbers = torch.arange(self.link.part_rows, device="cpu")

    def hold(self, host: torch.Tensor, places: torch.Tensor | None, num_device: int) -> None:
        """Give others rows from memory from now on: ``host``, by the ``places`` of the table."""
        self._held = host, places, num_device

    def let_go(self) -> None:
        """Forget the rows in memory, once nobody is given any."""
        self._readers.close()
        self._held, self._asks_places = None, False

    def ask_places(self) -> None:
        """Ask machines that hold rows in memory from now on. Until then, rows come from files only."""
        self._asks_places = True

    def read(self, rows: torch.Tensor, kind: RowType, out: torch.Tensor, positions: torch.Tensor | None) -> ReadReport:
        """Read rows like ``RowFiles.read``: from other machines, and meanwhile from this one's file.

        Raises `RankError`, which names the rank, if another machine does not give its rows, and ``TierReadError``.
        """
        machines = self._machines_of(rows)
        order = machines.argsort(stable=True)
        counts = torch.bincount(machines + 1, minlength=len(self.link.asked) + 2).tolist()
        here, *others = order.split(counts)
        reports, parts, start_s = [], deque[torch.Tensor](), time.perf_counter()

        def questions() -> Iterator[tuple[int, torch.Tensor]]:
            for machine, chosen in _taking_turns(others, self.link.part_rows):
                parts.append(chosen if positions is None else positions[chosen])
                yield machine, rows[chosen]

        def take(asked: torch.Tensor, raw: torch.Tensor) -> None:
            received = raw.view(kind.stored).view(len(asked), *kind.shape) if len(raw) else kind.empty(len(asked))
            gather(received, self._numbers[: len(asked)], kind, out, parts.popleft())

        def beside() -> None:
            if len(here):
                places = here if positions is None else positions[here]
                reports.append(self._files.read(rows[here] - self._first_row, kind, out, places))

        num_on_disk = self.link.ask(questions(), take, beside)
        num_peer = len(rows) - len(here)
        report = reports[0] if reports else ReadReport(num_requests=0, read_bytes=0)
        return ReadReport(
            num_cached=report.num_cached, num_requests=report.num_requests, read_bytes=report.read_bytes,
            disk_s=report.disk_s, num_peer=num_peer - num_on_disk, num_peer_disk=num_on_disk,
            peer_s=time.perf_counter() - start_s if num_peer else 0.0,
        )  # fmt: skip

    def row_seconds(self, ranks: RankGroup) -> tuple[float, float]:
        """Measure the seconds that a row takes from other machines, and from this machine's disk past the page cache.

        All ranks do so at the same time, as they will read.
        """
        ranks.exchange("to be asked")
        peer_s = _measured(self._try_peers)
        ranks.exchange("asked")
        return peer_s, _measured(self._try_disk)

    def _try_peers(self, num_rows: int) -> int:
        """Let about so many rows come from other machines; return how many came."""
        part_rows = self.link.part_rows
        num_parts = max(1, num_rows // (part_rows * len(self.link.asked)))
        size = min(part_rows, num_rows)
        part = self._numbers[:size]
        self.link.trial((machine, part) for _ in range(num_parts) for machine in self.link.asked)
        return size * num_parts * len(self.link.asked)

    def _try_disk(self, num_rows: int) -> int:
        num_rows = min(num_rows, _DISK_TRIAL, -(-self._files.num_rows // _APART))
        if num_rows:
            rows = torch.randint(self._files.num_rows, (num_rows,), generator=torch.Generator(), device="cpu")
            self._files.read(rows, self._stored, self._stored.empty(num_rows), None, from_cache=False)
        return num_rows

    def _machines_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the machine to ask for each row, -1 for this one's file, ``int64``."""
        if self._asks_places and self._held is not None and self._held[1] is not None:
            return -2 - self._held[1][rows].long()
        if self.part_rows is None:
            return torch.full((len(rows),), -1, dtype=torch.int64, device="cpu")
        parts = machines_of(rows, self.part_rows)
        return torch.where(parts == self.link.machine, -1, parts)

    def _answer(self, rows: torch.Tensor, out: torch.Tensor) -> int:
        """Put rows that another machine needs into ``out``; return how many of them this one had to read."""
        into = out.view(self._stored.stored).view(len(rows), *self._stored.shape) if len(out) else out
        with self._readers:
            if self._held is None:
                return self._answer_from_disk(rows, into, None)
            host, places, num_device = self._held
            if places is None:
                gather(host, rows, self._stored, into, wraps=False)
                return 0
            slots = places[rows].long() - num_device
            is_held = slots >= 0
            held, cold = is_held.nonzero().view(-1), (~is_held).nonzero().view(-1)
            gather(host, slots[held], self._stored, into, held, wraps=False)
            return self._answer_from_disk(rows[cold], into, cold) if len(cold) else 0

    def _answer_from_disk(self, rows: torch.Tensor, into: torch.Tensor, positions: torch.Tensor | None) -> int:
        places = check_range(rows - self._first_row, self._files.num_rows, wraps=False)
        with self._disk:  # answers take turns, so that they need one set of buffers
            self._files.read(places, self._stored, into, positions)
        return len(rows)


def _taking_turns(chosen: list[torch.Tensor], part_rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield parts of what is asked of each machine, a part of every machine before the next of any."""
    for turn in zip_longest(*(rows.split(part_rows) for rows in chosen)):
        yield from ((machine, part) for machine, part in enumerate(turn) if part is not None and len(part))


def _measured(read: Callable[[int], int]) -> float:
    """Return the seconds that ``read(about so many rows)`` takes for each of the rows that it returns."""
    read(1)  # connections, libraries
    num_rows = _FIRST_TRIAL
    while True:
        start_s = time.perf_counter()
        num_read = read(num_rows)
        took_s = time.perf_counter() - start_s
        if not num_read or took_s >= _TRIAL_S or num_read < num_rows or num_rows >= _LAST_TRIAL:
            return took_s / num_read if num_read else 0.0
        num_rows *= 4
