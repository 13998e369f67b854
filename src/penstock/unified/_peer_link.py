"""Questions to other machines for rows that they hold, and answers to theirs, in messages of ``torch.distributed``.

The ranks of a table have gloo connections of their own, so that these messages meet nobody else's. A rank asks one rank
of each other machine. A question is one message of row numbers, an answer one of rows. Whoever asks posts the receive
of the answer before it sends the question; so an answer never waits for anything but the network, and two machines that
answer each other cannot block one another. Each rank answers in a thread for each rank that asks it. Buffers for
answers bound what is under way.

A thread waits for questions until the asking rank says farewell or is gone. Gloo breaks all connections of a process
whose wait has timed out, so a wait has a timeout only where its end is the end of the table.
"""

import atexit
import datetime as dt
import os
import queue
import re
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch

from penstock.errors import RankError
from penstock.ranks import RankGroup
from penstock.units import format_duration

MOST_PART_BYTES, LEAST_PART_BYTES = 2**20, 256 * 1024
"""Bytes of rows in an answer, at most: of few machines, and of many."""
_WINDOW_BYTES = 8 * 2**20
"""Bytes of answers that a rank lets be under way, if the least parts of two for each machine do not need more."""
_ROWS, _TRIAL, _FAREWELL = range(3)
_HEAD = 3
"""Numbers before the row numbers of a question: its kind, its number, and how many rows it asks for."""
_TAIL_BYTES = 512
"""Bytes behind the rows of an answer: how many rows came from a disk, or -1 and the text of an error."""
_CUT_TAG, _QUESTION_TAG, _FIRST_ANSWER_TAG, _NUM_TAGS = 0, 1, 2, 2**20
_FOREVER = dt.timedelta(days=3650)
_GRACE_S = 2.0
"""How long a rank whose connection broke may take to say why, and a thread to end once its connection is cut."""
_EXIT_S = 30.0
"""How long a process that ends without closing its table waits for ranks that may still need its rows."""
_links: "weakref.WeakSet[PeerLink]" = weakref.WeakSet()

Answer = Callable[[torch.Tensor, torch.Tensor], int]
"""Puts rows (``int64 [n]``) into ``uint8 [n * row bytes]``; returns how many came from a disk."""
Take = Callable[[torch.Tensor, torch.Tensor], None]
"""Gets the row numbers of a question, ``int64 [n]``, and its answer, ``uint8 [n * row bytes]``, only to copy it."""


class PeerLink:
    """The connections of one rank to the other machines that hold a table with this one.

    All ranks make it at the same time. ``machines`` has the ranks of each machine. ``answer`` runs in threads.
    ``at_end`` is called once this rank has left, and all ranks that ask it have left too, or are gone.
    """

    def __init__(
        self,
        ranks: RankGroup,
        machines: list[list[int]],
        row_bytes: int,
        answer: Answer,
        at_end: Callable[[], None],
    ):
        self.machine, askers, self.asked = partners(machines, ranks.rank)
        """This rank's machine."""
        self.part_rows = part_rows_for(row_bytes, len(machines))
        """Rows in one answer, at most."""
        self._patience_s, self._process, self._rows = ranks.patience_s, os.getpid(), answer
        self._group = ranks.connect()
        self._asking = _Asking(ranks, self._group, row_bytes, self.part_rows, num_buffers_for(row_bytes, len(machines)))
        self._present = _Present(len(askers) + 1, at_end)
        self._threads = [
            threading.Thread(
                target=_Answering(self._group, rank, row_bytes, self.part_rows, self._answer).run,
                args=(self._present.one_left,), daemon=True, name=f"penstock answers rank {rank}",
            )
            for rank in askers
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()
        _links.add(self)

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process made the connections, and has not merely been forked from the one that did."""
        return os.getpid() == self._process

    def ask(self, questions: Iterable[tuple[int, torch.Tensor]], take: Take, beside: Callable[[], None]) -> int:
        """Ask machines for rows, ``(machine, int64 [n])``, with as many under way as buffers allow.

        ``take`` is called for each answer, in the order of the questions. ``beside`` is called once while answers are
        awaited. Returns how many rows came from disks. Raises `RankError`, which names the rank, if one has ended,
        gives no answer, or cannot read.
        """
        self._check_process()
        return self._asking.exchange(_ROWS, ((self.asked[machine], rows) for machine, rows in questions), take, beside)

    def trial(self, questions: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Ask for as many bytes as if rows were asked for, which nobody reads: to measure the network."""
        asked = ((self.asked[machine], rows) for machine, rows in questions)
        self._asking.exchange(_TRIAL, asked, lambda rows, raw: None, lambda: None)  # noqa: ARG005

    def leave(self, wait_s: float | None) -> None:
        """Say farewell: this rank asks nothing more. It still answers, until all who ask it have left too.

        Waits for that until ``wait_s`` seconds (``None``: as many as ranks may take to answer) have passed without a
        question. May be called again.
        """
        if not self.is_of_this_process:
            return
        if self._present.leaves_first():
            farewells = self._asking.farewells(list(self.asked.values()))
            self._threads.append(
                threading.Thread(target=_deliver, args=(farewells,), daemon=True, name="penstock farewells")
            )
            self._threads[-1].start()
            self._present.one_left()
        if threading.current_thread() not in self._threads and self._asking.failure is None:
            self._present.wait(self._patience_s if wait_s is None else wait_s)

    def cut(self) -> None:
        """Break the connections, so that no thread waits any more: a thread that did would end the process by a signal.

        Gloo breaks all of a process when one of its waits has taken too long.
        """
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        with suppress(RuntimeError):
            rank = next(iter(self.asked.values()))
            self._group.recv([nothing], rank, _CUT_TAG).wait(dt.timedelta(milliseconds=1))
        for thread in self._threads:
            thread.join(_GRACE_S)

    def _check_process(self) -> None:
        if not self.is_of_this_process:
            raise ValueError(
                "a forked process cannot ask other machines for rows: read them in the process that opened the table, "
                "such as with unified.Loader, or with num_workers=0"
            )

    def _answer(self, rows: torch.Tensor, out: torch.Tensor) -> int:
        self._present.heard()
        return self._rows(rows, out)


class _Present:
    """The ranks that need the rows of this one, itself included, until each has left. The last calls ``at_end``."""

    def __init__(self, count: int, at_end: Callable[[], None]):
        self._lock, self._count, self._at_end = threading.Lock(), count, at_end
        self._has_left, self._ended, self._heard_s = False, threading.Event(), time.monotonic()

    def heard(self) -> None:
        """Note that this rank was asked."""
        self._heard_s = time.monotonic()

    def leaves_first(self) -> bool:
        """Return whether this rank leaves for the first time."""
        with self._lock:
            is_first, self._has_left = not self._has_left, True
            return is_first

    def one_left(self) -> None:
        """Note that a rank has left. After the last, nobody needs the rows."""
        with self._lock:
            self._count -= 1
            is_last = not self._count
        if is_last:
            self._at_end()
            self._ended.set()

    def wait(self, seconds: float) -> None:
        """Wait until all have left, or this rank has not been asked for so long."""
        self.heard()
        while not self._ended.wait(max(0.0, self._heard_s + seconds - time.monotonic())):
            if time.monotonic() >= self._heard_s + seconds:
                break


class _Question:
    """A question that was sent, and where its answer arrives."""

    def __init__(self, rank: int, rows: torch.Tensor, buffer: torch.Tensor, size_bytes: int):
        self.rank, self.rows, self.buffer = rank, rows, buffer
        self.raw, self.into = buffer[:size_bytes], buffer[: size_bytes + _TAIL_BYTES]
        self.tail = self.into[size_bytes:]
        self.arrival: Any = None
        """The receive of the answer."""
        self.sent: Any = None
        """The message, which gloo would drop if nobody held it."""
        self.since_s = time.monotonic()


class _Asking:
    """The questions of one rank. Several threads may ask."""

    def __init__(self, ranks: RankGroup, group: Any, row_bytes: int, part_rows: int, num_buffers: int):
        self._ranks, self._group, self._row_bytes = ranks, group, row_bytes
        self._buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(num_buffers):
            self._buffers.put(torch.empty(part_rows * row_bytes + _TAIL_BYTES, dtype=torch.uint8, device="cpu"))
        self._lock = threading.Lock()
        self._number = 0
        self._kept: list[_Question] = []
        """Questions whose answers may still arrive, after a failure."""
        self.failure: tuple[str, tuple[int, ...]] | None = None
        """The failure that all later questions raise too, and the ranks to blame."""

    def exchange(
        self,
        kind: int,
        questions: Iterable[tuple[int, torch.Tensor]],
        take: Take,
        beside: Callable[[], None],
    ) -> int:
        """Ask ranks for rows, and take the answers; return how many rows came from disks."""
        if self.failure is not None:
            raise RankError(self.failure[0], ranks=self.failure[1])
        waiting: deque[_Question] = deque()
        num_on_disk, is_beside_done = 0, False
        try:
            for rank, rows in questions:
                while (buffer := self._free_buffer(waits=not waiting)) is None:
                    if not is_beside_done:
                        is_beside_done = True
                        beside()
                    num_on_disk += self._taken(waiting.popleft(), take)
                waiting.append(self._asked(kind, rank, rows, buffer))
            if not is_beside_done:
                beside()
            while waiting:
                num_on_disk += self._taken(waiting.popleft(), take)
        except BaseException:
            self._drop(waiting)
            raise
        return num_on_disk

    def farewells(self, ranks: list[int]) -> list[Any]:
        """Tell ranks that nothing more will be asked; return what must be kept until they have heard it."""
        farewells, nothing = [], torch.empty(0, dtype=torch.int64, device="cpu")
        for rank in ranks:
            with suppress(RuntimeError):
                farewells.append(self._sent(rank, _FAREWELL, 0, nothing))
        return farewells

    def _free_buffer(self, *, waits: bool) -> torch.Tensor | None:
        """Return a buffer; ``None`` if there is none now and this reader has answers to take first."""
        try:
            return self._buffers.get(block=waits)
        except queue.Empty:
            return None

    def _asked(self, kind: int, rank: int, rows: torch.Tensor, buffer: torch.Tensor) -> _Question:
        with self._lock:
            self._number = number = (self._number + 1) % _NUM_TAGS
        question = _Question(rank, rows, buffer, len(rows) * self._row_bytes)
        try:
            question.arrival = self._group.recv([question.into], rank, _FIRST_ANSWER_TAG + number)
            question.sent = self._sent(rank, kind, number, rows)
        except RuntimeError as error:
            raise self._failed(question, error) from error
        return question

    def _sent(self, rank: int, kind: int, number: int, rows: torch.Tensor) -> tuple[Any, torch.Tensor]:
        message = torch.empty(_HEAD + len(rows), dtype=torch.int64, device="cpu")
        message[0], message[1], message[2] = kind, number, len(rows)
        message[_HEAD:] = rows
        return self._group.send([message], rank, _QUESTION_TAG), message

    def _taken(self, question: _Question, take: Take) -> int:
        """Wait for an answer, and let it be taken; return how many of its rows came from a disk."""
        try:
            question.arrival.wait(dt.timedelta(seconds=self._ranks.patience_s))
        except RuntimeError as error:
            raise self._failed(question, error) from error
        try:
            num_on_disk, text = _told(question.tail)
            if num_on_disk < 0:
                rank = question.rank
                raise RankError(f"rank {rank} could not give rows to this rank: {text}", ranks=(rank,))
            take(question.rows, question.raw)
        finally:
            self._buffers.put(question.buffer)
        return num_on_disk

    def _failed(self, question: _Question, error: RuntimeError) -> RankError:
        """Return the error about a rank that did not answer. All later questions raise it too."""
        rank, patience_s = question.rank, self._ranks.patience_s
        if time.monotonic() - question.since_s >= patience_s:
            waited = format_duration(patience_s)
            told = None
            text = f"rank {rank} did not answer for {waited}: it hangs, or cannot be reached"
        else:
            told = self._ranks.failure_of(rank, _GRACE_S)
            text = f"rank {rank} has ended, while this rank needed rows that it holds: {_reason(error)}"
        with self._lock:
            self.failure = self.failure or told or (text, (rank,))
            self._kept.append(question)
        failure = RankError(self.failure[0], ranks=self.failure[1])
        self._ranks.tell_failure(failure)
        return failure

    def _drop(self, waiting: deque[_Question]) -> None:
        """Let answers that nobody will take arrive, so that their buffers can be used again."""
        while waiting:
            question = waiting.popleft()
            if self.failure is not None:
                with self._lock:
                    self._kept.append(question)
            else:
                with suppress(RankError):
                    self._taken(question, lambda rows, raw: None)  # noqa: ARG005


class _Answering:
    """The answers to one rank."""

    def __init__(self, group: Any, rank: int, row_bytes: int, part_rows: int, answer: Answer):
        self._group, self._rank, self._row_bytes, self._answer = group, rank, row_bytes, answer
        self._question = torch.empty(_HEAD + part_rows, dtype=torch.int64, device="cpu")
        self._out = torch.empty(part_rows * row_bytes + _TAIL_BYTES, dtype=torch.uint8, device="cpu")

    def run(self, at_end: Callable[[], None]) -> None:
        """Answer until the rank leaves or is gone; who misses it will say so."""
        with suppress(RuntimeError):
            while self._answers_one():
                pass
        at_end()

    def _answers_one(self) -> bool:
        self._group.recv([self._question], self._rank, _QUESTION_TAG).wait(_FOREVER)
        kind, number, count = self._question[:_HEAD].tolist()
        if kind == _FAREWELL:
            return False
        size_bytes = count * self._row_bytes
        out = self._out[: size_bytes + _TAIL_BYTES]
        text, num_on_disk = "", 0
        try:
            if kind == _ROWS:
                num_on_disk = self._answer(self._question[_HEAD : _HEAD + count], out[:size_bytes])
        except Exception as error:
            text, num_on_disk = f"{type(error).__name__}: {error}", -1
        _tell(out[size_bytes:], num_on_disk, text)
        self._group.send([out], self._rank, _FIRST_ANSWER_TAG + number).wait(_FOREVER)
        return True


def _reason(error: RuntimeError) -> str:
    """Return what gloo says, without the place in its source and its advice."""
    line = str(error).splitlines()[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", line).split(". ")[0]


def _tell(tail: torch.Tensor, num_on_disk: int, text: str) -> None:
    """Write the end of an answer: how many rows came from a disk, or -1 and the text of an error."""
    told = num_on_disk.to_bytes(8, "little", signed=True) + text.encode()[: _TAIL_BYTES - 8]
    tail.copy_(torch.frombuffer(bytearray(told.ljust(_TAIL_BYTES, b"\0")), dtype=torch.uint8))


def _told(tail: torch.Tensor) -> tuple[int, str]:
    """Read the end of an answer."""
    told = bytes(tail.tolist())
    return int.from_bytes(told[:8], "little", signed=True), told[8:].rstrip(b"\0").decode(errors="replace")


def _deliver(farewells: list[Any]) -> None:
    """Keep messages until they have arrived, or their ranks are gone."""
    for work, _ in farewells:
        with suppress(RuntimeError):
            work.wait(_FOREVER)


def partners(machines: list[list[int]], rank: int) -> tuple[int, list[int], dict[int, int]]:
    """Return a rank's machine, the ranks that ask it, and the rank that it asks on each other machine."""
    machine = next(number for number, members in enumerate(machines) if rank in members)
    place, num_here = machines[machine].index(rank), len(machines[machine])
    others = [(number, members) for number, members in enumerate(machines) if number != machine]
    askers = [other for _, members in others for turn, other in enumerate(members) if turn % num_here == place]
    return machine, askers, {number: members[place % len(members)] for number, members in others}


def part_rows_for(row_bytes: int, num_machines: int) -> int:
    """Return how many rows an answer has at most."""
    part_bytes = max(LEAST_PART_BYTES, min(MOST_PART_BYTES, _WINDOW_BYTES // (2 * max(1, num_machines - 1))))
    return max(1, part_bytes // max(1, row_bytes))


def num_buffers_for(row_bytes: int, num_machines: int) -> int:
    """Return for how many answers a rank has buffers."""
    part_bytes = part_rows_for(row_bytes, num_machines) * row_bytes
    return max(2, min(2 * (num_machines - 1), _WINDOW_BYTES // max(1, part_bytes)))


def link_bytes_for(row_bytes: int, num_machines: int, num_askers: int) -> int:
    """Return the bytes of the buffers for answers and questions of one rank."""
    part_rows = part_rows_for(row_bytes, num_machines)
    part_bytes = part_rows * row_bytes + _TAIL_BYTES
    question_bytes = 8 * (_HEAD + part_rows)
    num_buffers = num_buffers_for(row_bytes, num_machines)
    return (num_buffers + num_askers) * (part_bytes + question_bytes)


@atexit.register
def _leave_all() -> None:
    """Answer what others still ask, unless this process ends by an error, which they should hear of soon."""
    has_failed = getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None
    links = [link for link in _links if link.is_of_this_process]
    if not has_failed:
        for link in links:
            link.leave(_EXIT_S)
    for link in links:
        link.cut()
