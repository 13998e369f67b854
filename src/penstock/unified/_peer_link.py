"""Questions to other machines for rows that they hold, and answers to theirs, in messages of ``torch.distributed``.

The ranks of a table have gloo connections of their own, so that these messages meet nobody else's. A rank asks one rank
of each other machine. A question is one message of row numbers, an answer one of rows. Whoever asks posts the receive
of the answer before it sends the question; so an answer never waits for anything but the network, and two machines that
answer each other cannot block one another. Each rank answers in a thread for each rank that asks it. Buffers for
answers bound what is under way.

Gloo breaks all connections of a process when one of its waits times out, and cannot be interrupted while it waits. So
threads wait for gloo, without a limit, and readers wait for those threads: for questions in one thread for each rank
that asks, for answers in one for each rank that is asked.
"""

import atexit
import datetime as dt
import functools
import math
import multiprocessing.util
import os
import queue
import re
import sys
import threading
import time
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
_ROW_NUMBER_BYTES = 8
_TAIL_BYTES = 512
"""Bytes behind the rows of an answer: how many rows came from a disk, or -1 and the text of an error."""
_CUT_TAG, _QUESTION_TAG, _FIRST_ANSWER_TAG, _NUM_TAGS = 0, 1, 2, 2**20
_FOREVER = dt.timedelta(days=3650)
_GRACE_S, _JOIN_S = 2.0, 10.0
"""How long a rank whose connection broke may take to say why, and a thread to end once its connection is cut."""
_CLOSE_S, _EXIT_S = 5.0, 30.0
"""How long closing a table, and the end of a process, wait for ranks that may still need its rows."""
_POLL_S, _BEAT_S = 0.1, 1.0
_links: "list[PeerLink]" = []
"""Links whose rows somebody may need, in the order in which they were made.

They are held here, since a forked child that collected one would wait for threads that it does not have.
"""

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
        num_rows: int,
        answer: Answer,
        at_end: Callable[[], None],
    ):
        self.machine, askers, self.asked = partners(machines, ranks.rank)
        """This rank's machine."""
        self.part_rows = part_rows_for(row_bytes, len(machines), num_rows)
        """Rows in one answer, at most."""
        self._process, self._rows, self._error_before = os.getpid(), answer, _last_error()
        self._group: Any = ranks.connect()
        self._asking = _Asking(
            ranks, self._group, row_bytes, self.part_rows, num_buffers_for(row_bytes, len(machines), num_rows),
            list(self.asked.values()),
        )  # fmt: skip
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
        _links.append(self)
        _at_exit(os.getpid())

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

    @property
    def has_failed(self) -> bool:
        """Whether this process ends by an error that came after the link."""
        return _last_error() is not self._error_before

    def leave(self, wait_s: float | None) -> None:
        """Say farewell: this rank asks nothing more. It still answers, until all who ask it have left too.

        Waits for that until ``wait_s`` seconds (``None``: a few) have passed without a question. May be called again.
        """
        if not self.is_of_this_process:
            return
        if self._present.leaves_first():
            farewells = self._asking.farewells(list(self.asked.values()))
            end = threading.Thread(target=self._end, args=(farewells,), daemon=True, name="penstock farewells")
            self._threads.append(end)
            end.start()
            self._present.one_left()
        if threading.current_thread() not in self._threads and self._asking.failure is None:
            self._present.wait(_CLOSE_S if wait_s is None else wait_s)

    def cut(self) -> None:
        """Break the connections, so that no thread waits any more: a thread that did would end the process by a signal.

        Gloo breaks all of a process when one of its waits has taken too long.
        """
        nothing, group = torch.empty(1, dtype=torch.uint8, device="cpu"), self._group
        with suppress(RuntimeError):
            if group is not None:
                rank = next(iter(self.asked.values()))
                group.recv([nothing], rank, _CUT_TAG).wait(dt.timedelta(milliseconds=1))
        for thread in (*self._threads, *self._asking.threads):
            thread.join(_JOIN_S)

    def _end(self, farewells: list[Any]) -> None:
        """Close the connections once all who are asked here have heard the farewell, and all who ask have left."""
        while farewells:
            with suppress(RuntimeError):
                farewells[-1][0].wait(_FOREVER)
            farewells.pop()
        self._present.wait(math.inf)
        for thread in (*self._threads[:-1], *self._asking.threads):
            thread.join()
        self._asking.end()
        self._group, self._rows = None, _nothing
        # last, since a process waits for the threads of these links only: gloo's objects must not go after Python has
        with suppress(ValueError):
            _links.remove(self)

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
    """The ranks that need the rows of this one, itself included, until each has left. Then the rows are let go."""

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
            at_end, self._at_end = self._at_end, lambda: None  # what it holds must not wait for a collection
            at_end()
            self._ended.set()

    def wait(self, seconds: float) -> None:
        """Wait until all have left, or this rank has not been asked for so long."""
        self.heard()
        while (left_s := self._heard_s + seconds - time.monotonic()) > 0:
            if self._ended.wait(None if left_s == math.inf else left_s):
                break


class _Question:
    """A question that was sent, and where its answer arrives."""

    def __init__(self, rank: int, rows: torch.Tensor, buffer: torch.Tensor, size_bytes: int):
        self.rank, self.rows, self.buffer = rank, rows, buffer
        self.raw, self.into = buffer[:size_bytes], buffer[: size_bytes + _TAIL_BYTES]
        self.tail = self.into[size_bytes:]
        self.sent: Any = None
        """The message, which gloo would drop if nobody held it."""
        self.arrived = threading.Event()
        self.error: RuntimeError | None = None
        """Error by which the connection broke before the answer had arrived."""


class _Asking:
    """The questions of one rank. Several threads may ask. It is wide because it also waits for their answers."""

    def __init__(
        self, ranks: RankGroup, group: Any, row_bytes: int, part_rows: int, num_buffers: int, asked: list[int]
    ):
        self._ranks, self._group, self._row_bytes = ranks, group, row_bytes
        self._buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(num_buffers):
            self._buffers.put(torch.empty(part_rows * row_bytes + _TAIL_BYTES, dtype=torch.uint8, device="cpu"))
        self._lock = threading.Lock()
        self._number = 0
        self._dropped: set[_Question] = set()
        """Questions whose answers nobody will take, and whose buffers are free again once they have arrived."""
        self.failure: tuple[str, tuple[int, ...]] | None = None
        """The failure that all later questions raise too, and the ranks to blame."""
        self._arriving: dict[int, queue.SimpleQueue[tuple[Any, _Question] | None]] = {
            rank: queue.SimpleQueue() for rank in asked
        }
        self.threads = [
            threading.Thread(target=self._await, args=(pipe,), daemon=True, name=f"penstock asks rank {rank}")
            for rank, pipe in self._arriving.items()
        ]
        """Each waits for the answers of one rank."""
        for thread in self.threads:
            thread.start()

    def exchange(
        self,
        kind: int,
        questions: Iterable[tuple[int, torch.Tensor]],
        take: Take,
        beside: Callable[[], None],
    ) -> int:
        """Ask ranks for rows, and take the answers; return how many rows came from disks."""
        self._check()
        waiting: deque[_Question] = deque()
        num_on_disk, is_beside_done = 0, False
        try:
            for rank, rows in questions:
                while (buffer := self._free_buffer(waits=not waiting)) is None:
                    if not is_beside_done:
                        is_beside_done = True
                        beside()
                    num_on_disk += self._taken(waiting, take)
                self._ask(kind, rank, rows, buffer, waiting)
            if not is_beside_done:
                beside()
            while waiting:
                num_on_disk += self._taken(waiting, take)
        finally:
            for question in waiting:
                self._drop(question)
        return num_on_disk

    def farewells(self, ranks: list[int]) -> list[Any]:
        """Tell ranks that nothing more will be asked; return what must be kept until they have heard it."""
        farewells, nothing = [], torch.empty(0, dtype=torch.int64, device="cpu")
        for rank in ranks:
            with suppress(RuntimeError):
                farewells.append(self._sent(rank, _FAREWELL, 0, nothing))
        for pipe in self._arriving.values():
            pipe.put(None)
        return farewells

    def end(self) -> None:
        """Free the connections, and the memory for answers."""
        self._group, self._buffers = None, queue.SimpleQueue()

    def _check(self) -> None:
        if self.failure is not None:
            raise RankError(self.failure[0], ranks=self.failure[1])

    def _free_buffer(self, *, waits: bool) -> torch.Tensor | None:
        """Return a buffer; ``None`` if there is none now and this reader has answers to take first."""
        while True:
            try:
                return self._buffers.get(block=waits, timeout=_POLL_S)
            except queue.Empty:
                if not waits:
                    return None
            self._check()  # others may have failed, and never give their buffers back

    def _ask(self, kind: int, rank: int, rows: torch.Tensor, buffer: torch.Tensor, waiting: deque[_Question]) -> None:
        with self._lock:
            self._number = number = (self._number + 1) % _NUM_TAGS
        question = _Question(rank, rows, buffer, len(rows) * self._row_bytes)
        waiting.append(question)
        try:
            arrival = self._group.recv([question.into], rank, _FIRST_ANSWER_TAG + number)
            self._arriving[rank].put((arrival, question))
            question.sent = self._sent(rank, kind, number, rows)
        except RuntimeError as error:
            raise self._failed(question, error) from error

    def _sent(self, rank: int, kind: int, number: int, rows: torch.Tensor) -> tuple[Any, torch.Tensor]:
        message = torch.empty(_HEAD + len(rows), dtype=torch.int64, device="cpu")
        message[0], message[1], message[2] = kind, number, len(rows)
        message[_HEAD:] = rows
        return self._group.send([message], rank, _QUESTION_TAG), message

    def _await(self, pipe: "queue.SimpleQueue[tuple[Any, _Question] | None]") -> None:
        """Wait for the answers of one rank."""
        while (entry := pipe.get()) is not None:
            arrival, question = entry
            try:
                arrival.wait(_FOREVER)
            except RuntimeError as error:
                question.error = error
            question.arrived.set()
            self._free_if_dropped(question)

    def _taken(self, waiting: deque[_Question], take: Take) -> int:
        """Wait for the first answer, and let it be taken; return how many of its rows came from a disk."""
        question = waiting[0]
        patience_s, heard_s = self._ranks.patience_s, time.monotonic()
        while not question.arrived.wait(min(_BEAT_S, patience_s)):
            with suppress(RankError):
                self._ranks.beat()  # who waits for this rank meanwhile
            if time.monotonic() - heard_s >= patience_s:
                raise self._failed(question, None)
        if question.error is not None:
            raise self._failed(question, question.error) from question.error
        rank, (num_on_disk, text) = question.rank, _told(question.tail)
        if num_on_disk < 0:
            raise RankError(f"rank {rank} could not give rows to this rank: {text}", ranks=(rank,))
        take(question.rows, question.raw)
        waiting.popleft()
        self._buffers.put(question.buffer)
        return num_on_disk

    def _failed(self, question: _Question, error: RuntimeError | None) -> RankError:
        """Return the error about a rank that did not answer. All later questions raise it too."""
        rank = question.rank
        if error is None:
            told = None
            text = (
                f"rank {rank} did not answer for {format_duration(self._ranks.patience_s)}: it hangs, or cannot be "
                "reached"
            )
        else:
            told = self._ranks.failure_of(rank, _GRACE_S)
            text = f"rank {rank} has ended, while this rank needed rows that it holds: {_reason(error)}"
        with self._lock:
            self.failure = self.failure or told or (text, (rank,))
        failure = RankError(self.failure[0], ranks=self.failure[1])
        self._ranks.tell_failure(failure)
        return failure

    def _drop(self, question: _Question) -> None:
        """Give the buffer of an answer back that nobody will take, once the answer has arrived."""
        with self._lock:
            self._dropped.add(question)
        self._free_if_dropped(question)

    def _free_if_dropped(self, question: _Question) -> None:
        with self._lock:
            is_free = question in self._dropped and question.arrived.is_set()
            if is_free:
                self._dropped.discard(question)
        if is_free and question.error is None:
            self._buffers.put(question.buffer)


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


def _nothing(*_: Any) -> int:
    return 0


def partners(machines: list[list[int]], rank: int) -> tuple[int, list[int], dict[int, int]]:
    """Return a rank's machine, the ranks that ask it, and the rank that it asks on each other machine."""
    machine = next(number for number, members in enumerate(machines) if rank in members)
    place, num_here = machines[machine].index(rank), len(machines[machine])
    others = [(number, members) for number, members in enumerate(machines) if number != machine]
    askers = [other for _, members in others for turn, other in enumerate(members) if turn % num_here == place]
    return machine, askers, {number: members[place % len(members)] for number, members in others}


def part_rows_for(row_bytes: int, num_machines: int, num_rows: int) -> int:
    """Return how many rows an answer has at most, in a table of so many rows."""
    part_bytes = max(LEAST_PART_BYTES, min(MOST_PART_BYTES, _WINDOW_BYTES // (2 * max(1, num_machines - 1))))
    return max(1, min(num_rows, part_bytes // max(row_bytes, _ROW_NUMBER_BYTES)))


def num_buffers_for(row_bytes: int, num_machines: int, num_rows: int) -> int:
    """Return for how many answers a rank has buffers."""
    part_bytes = part_rows_for(row_bytes, num_machines, num_rows) * max(row_bytes, _ROW_NUMBER_BYTES)
    return max(2, min(2 * (num_machines - 1), _WINDOW_BYTES // max(1, part_bytes)))


def link_bytes_for(row_bytes: int, num_machines: int, num_askers: int, num_rows: int) -> int:
    """Return the bytes of the buffers for answers and questions of one rank."""
    part_rows = part_rows_for(row_bytes, num_machines, num_rows)
    part_bytes = part_rows * row_bytes + _TAIL_BYTES
    question_bytes = _ROW_NUMBER_BYTES * (_HEAD + part_rows)
    num_buffers = num_buffers_for(row_bytes, num_machines, num_rows)
    return (num_buffers + num_askers) * (part_bytes + question_bytes) + _ROW_NUMBER_BYTES * part_rows


def _last_error() -> Any:
    """Return the error that Python has shown last, by which a process may be ending."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


@functools.cache
def _at_exit(process: int) -> None:  # noqa: ARG001  # a forked one arranges it for itself
    """Arrange that this process leaves all links before it ends, however it was started."""
    atexit.register(_leave_all)
    multiprocessing.util.Finalize(None, _leave_all, exitpriority=100)  # processes of a pool end without `atexit`


def _leave_all() -> None:
    """Answer what others still ask, unless this process ends by an error, which they should hear of soon."""
    links = [link for link in _links if link.is_of_this_process]
    waiting = [link for link in links if not link.has_failed]
    for link in waiting:
        link.leave(0.0)
    end_s = time.monotonic() + _EXIT_S
    for link in waiting:
        link.leave(max(0.0, end_s - time.monotonic()))
    for link in links:
        link.cut()
