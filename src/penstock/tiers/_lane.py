"""A lane: a serial queue of copies in one direction of one link.

Jobs start in the order in which they were submitted. A job consists of independent pieces, which the lane's few threads
carry out in parallel, since one request at a time does not keep a disk busy. The bytes of unfinished jobs are bounded:
``wait_for_room`` waits, and reports how long it waited.

Lanes drain before ``fork`` and stay idle during it, so that a child never inherits half a copy. The child has no lane
threads; its lanes refuse work.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from penstock.devices import stay_on_node
from penstock.errors import ForkedProcessError

_IDLE_S = 10.0
"""Seconds after which an idle thread ends, so that an unclosed lane leaves none; new ones start when needed."""


class LaneJob:
    """One copy on a lane: finished when all its pieces are, or canceled before any began."""

    __slots__ = ("_finished", "_num_left", "context", "error", "label", "on_done", "pieces", "size_bytes", "start_s")

    def __init__(
        self, pieces: Sequence[Callable[[], None]], size_bytes: int, label: str, on_done: Callable[["LaneJob"], None]
    ):
        self.pieces = deque(pieces)
        self.size_bytes = size_bytes
        self.label = label
        self.error: Exception | None = None
        self.context: object = None
        """Data of the submitter for use in ``on_done``."""
        self.start_s = 0.0
        self.on_done = on_done
        """Called on a lane thread after the last piece."""
        self._num_left = len(pieces)
        self._finished = threading.Event()

    @property
    def is_finished(self) -> bool:
        """Whether every piece is done and ``on_done`` has returned."""
        return self._finished.is_set()

    def wait(self) -> float:
        """Block until the job is finished; return the seconds waited. Errors stay in ``error``."""
        if self._finished.is_set():
            return 0.0
        start_s = time.perf_counter()
        self._finished.wait()
        return time.perf_counter() - start_s

    def end_piece(self, error: Exception | None) -> bool:
        """Mark a piece as done, and drop the others after the first error; return whether none is left."""
        self._num_left -= 1
        if error is not None and self.error is None:
            self.error = error
            self._num_left -= len(self.pieces)
            self.pieces.clear()
        return self._num_left == 0

    def end(self) -> None:
        """Mark the job as finished or canceled, and free what it holds."""
        self.pieces.clear()
        self.on_done = _do_nothing  # frees what the callback held, which often includes the job
        self._finished.set()


def _do_nothing(_: LaneJob) -> None:
    """Stand in for ``on_done`` of a job that has ended."""


class InFlight:
    """The bytes of a lane's unfinished jobs, and the time in which there were some. The lane holds its lock."""

    def __init__(self) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0
        self.finished_bytes = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0

    def begin(self, size_bytes: int) -> None:
        """Add a job."""
        if not self.now_bytes:
            self._busy_since_s = time.perf_counter()
        self.now_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def end(self, size_bytes: int, *, is_finished: bool) -> None:
        """Remove a job, which was finished or canceled."""
        self.now_bytes -= size_bytes
        self.finished_bytes += size_bytes if is_finished else 0
        if not self.now_bytes:
            self._busy_s += time.perf_counter() - self._busy_since_s

    def rate_bytes_per_s(self) -> float | None:
        """Return bytes per second over the busy time; ``None`` before the first job has finished."""
        busy_s = self._busy_s
        if self.now_bytes:
            busy_s += time.perf_counter() - self._busy_since_s
        return self.finished_bytes / busy_s if self.finished_bytes and busy_s else None


class Lane:
    """A serial queue of copies. Call ``submit`` from any thread, and ``close`` when done.

    Its threads stay on ``node``.
    """

    def __init__(self, name: str, *, num_threads: int, max_in_flight_bytes: int, node: int | None = None):
        self.name = name
        self.node = node
        self.num_threads = num_threads
        self.max_in_flight_bytes = max_in_flight_bytes
        self.in_flight = InFlight()
        self._condition = threading.Condition(threading.Lock())
        self._queue: deque[LaneJob] = deque()
        self._num_running = 0
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._is_forked_copy = False
        _lanes.add(self)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of jobs that are queued or running."""
        return self.in_flight.now_bytes

    def submit(
        self, pieces: Sequence[Callable[[], None]], *, size_bytes: int, label: str, on_done: Callable[[LaneJob], None]
    ) -> LaneJob:
        """Queue a copy.

        ``on_done(job)`` runs on a lane thread after the last piece, with ``job.error`` set or ``None``. An exception in
        a piece fails the job, and its remaining pieces are dropped. A job larger than the bound runs alone. Call
        ``wait_for_room`` first; ``submit`` itself never blocks. ``pieces`` must have at least one element.
        """
        job = LaneJob(pieces, size_bytes, label, on_done)
        with self._condition:
            self._refuse_if_gone()
            self._start_threads()
            self._queue.append(job)
            self.in_flight.begin(size_bytes)
            self._condition.notify_all()
        return job

    def wait_for_room(self, size_bytes: int) -> float:
        """Block until a job of ``size_bytes`` fits the bound on bytes in flight; return the seconds waited."""
        start_s = time.perf_counter()
        with self._condition:
            self._refuse_if_gone()
            if self._has_room(size_bytes):
                return 0.0
            self._condition.wait_for(lambda: self._is_closed or self._has_room(size_bytes))
        return time.perf_counter() - start_s

    def cancel(self, job: LaneJob) -> bool:
        """Cancel a job of which no piece has begun. Return whether it was canceled; then ``on_done`` never runs."""
        with self._condition:
            if job.start_s or job not in self._queue:
                return False
            self._queue.remove(job)
            self._forget(job, is_finished=False)
        return True

    def rate_bytes_per_s(self) -> float | None:
        """Return bytes per second over the time in which a copy was under way; ``None`` before the first."""
        with self._condition:
            return self.in_flight.rate_bytes_per_s()

    def drain(self) -> None:
        """Block until nothing is queued or running."""
        with self._condition:
            self._condition.wait_for(lambda: not self._queue and not self._num_running)

    def close(self) -> None:
        """Finish what is queued and end the threads. Idempotent."""
        with self._condition:
            if self._is_forked_copy:
                return
            self._is_closed = True
            self._condition.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _has_room(self, size_bytes: int) -> bool:
        in_flight_bytes = self.in_flight.now_bytes
        return not in_flight_bytes or in_flight_bytes + size_bytes <= self.max_in_flight_bytes

    def _refuse_if_gone(self) -> None:
        if self._is_forked_copy:
            raise ForkedProcessError(
                f"lane {self.name!r} belongs to the parent process; a forked child cannot move the parent's bytes. "
                "Create the offloader or tiers inside the child instead."
            )
        if self._is_closed:
            raise ValueError(f"lane {self.name!r} is closed")

    def _start_threads(self) -> None:
        if len(self._threads) == self.num_threads:
            return
        for index in range(len(self._threads), self.num_threads):
            # With stacks of the default size: `threading.stack_size` belongs to the process, and two lanes that set and
            # reset it at once left a small one for every later thread.
            thread = threading.Thread(target=self._work, name=f"penstock {self.name} {index}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no memory for a stack: fewer threads are slower, only none is an error
                if not self._threads:
                    raise
                return
            self._threads.append(thread)

    def _next_piece(self) -> tuple[LaneJob, Callable[[], None]] | None:
        """Wait for the next piece in order; return ``None`` if this thread should end.

        The caller holds the condition.
        """
        self._condition.wait_for(lambda: self._queue or self._is_closed, timeout=_IDLE_S)
        if not self._queue:
            self._threads.remove(threading.current_thread())
            return None
        job = self._queue[0]
        piece = job.pieces.popleft()
        if not job.pieces:
            self._queue.popleft()
        if not job.start_s:
            job.start_s = time.time()
        self._num_running += 1
        return job, piece

    def _end_piece(self, job: LaneJob, error: Exception | None) -> bool:
        """Mark a piece as done; return whether it was the job's last. The caller holds the condition."""
        was_queued = bool(job.pieces)
        is_last = job.end_piece(error)
        if was_queued and not job.pieces:
            self._queue.remove(job)
        return is_last

    def _forget(self, job: LaneJob, *, is_finished: bool) -> None:
        self.in_flight.end(job.size_bytes, is_finished=is_finished)
        job.end()
        self._condition.notify_all()

    def _work(self) -> None:
        """Carry out pieces until the lane is closed or idle. Runs on each of the lane's threads."""
        stay_on_node(self.node)
        while True:
            with self._condition:
                item = self._next_piece()
            if item is None:
                return
            job, piece = item
            error: Exception | None = None
            try:
                piece()
            except Exception as raised:  # every error belongs to the job, not to this thread
                error = raised
            with self._condition:
                is_last = self._end_piece(job, error)
            if is_last:
                job.on_done(job)
            with self._condition:
                self._num_running -= 1
                if is_last:
                    self._forget(job, is_finished=True)
                elif not self._num_running:
                    self._condition.notify_all()
            del item, job, piece, error  # an idle thread would keep what they refer to alive

    def hold_for_fork(self) -> None:
        """Wait until nothing is queued or running, and let nothing begin until `resume` or `orphan`."""
        self._condition.acquire()
        self._condition.wait_for(lambda: not self._queue and not self._num_running)

    def resume(self) -> None:
        """Go on in the parent after a fork."""
        self._condition.release()

    def orphan(self) -> None:
        """Refuse work in the forked child, which has no lane threads."""
        self._is_forked_copy = True
        self._threads = []
        self._condition = threading.Condition(threading.Lock())


# Lanes act before a fork and in the parent as well, so `penstock.forks` does not suffice.
_lanes: "weakref.WeakSet[Lane]" = weakref.WeakSet()
_held: list[Lane] = []


def _before_fork() -> None:
    for lane in sorted(_lanes, key=id):
        lane.hold_for_fork()
        _held.append(lane)


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().resume()


def _after_fork_in_child() -> None:
    while _held:
        _held.pop().orphan()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
