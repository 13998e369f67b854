"""The choice of a kernel's schedule: a few are compiled and timed once, and the fastest is kept.

The likeliest is compiled at once. A thread compiles the others while training goes on with the likeliest; the first
call after that times them all.
"""

import atexit
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass

from penstock import native

NUM_TRIED = 3
"""Number of schedules tried per kernel: compiling one takes most of a second."""


@dataclass(frozen=True, slots=True)
class RowSchedule:
    """The division of a traversal's rows among instances."""

    rows: int
    """Rows that an instance processes at a time."""
    lanes: bool
    """Whether these are one row each of as many groups, not many rows of one group."""
    split: int
    """The most rows of a group per instance; longer groups are split, and their parts are added in order."""
    warps: int
    """Warps of an instance."""


def schedules(max_rows: int, mean_rows: float) -> list[RowSchedule]:
    """Return the ``NUM_TRIED`` schedules that a traversal tries, the likeliest first.

    ``max_rows`` is that of an instance, ``mean_rows`` that of a group. Two schedules suit groups of that length, the
    third suits others.
    """
    by_group = [RowSchedule(min(max_rows, rows), lanes=False, split=1024, warps=warps) for rows, warps in _BY_GROUP]
    by_lane = [RowSchedule(min(max_rows, rows), lanes=True, split=128, warps=warps) for rows, warps in _BY_LANE]
    suited, others = (by_group, by_lane) if mean_rows >= 8 else (by_lane, by_group)
    return list(dict.fromkeys([*suited, others[0]]))[:NUM_TRIED]


# Eight schedules were tried once; they differed from these only in rows per instance, and RGAT compiled 86 kernels.
_BY_GROUP = ((16, 2), (32, 4))
_BY_LANE = ((8, 2), (16, 4))


class Choices:
    """The schedules chosen for the kernels of one program on one kind of device, in memory and in a cache file.

    ``source``: the program's name, which identifies its contents; ``device``: the name of the device kind and its
    compiler. The file is always replaced as a whole. A file that cannot be read counts as empty, and a schedule that is
    no longer tried is ignored.
    """

    def __init__(self, source: str, device: str):
        safe = "".join(character if character.isalnum() else "_" for character in device)
        self._file_name = f"{source}-{safe}.json"
        self._chosen: dict[str, RowSchedule] = self._read()

    def find(self, kernel: str, shape: tuple[int, ...], tried: Sequence[RowSchedule]) -> RowSchedule | None:
        """Return the fastest of ``tried`` for a graph of that shape, if it was measured."""
        chosen = self._chosen.get(_key(kernel, shape))
        return chosen if chosen in tried else None

    def keep(self, kernel: str, shape: tuple[int, ...], chosen: RowSchedule) -> None:
        """Remember the choice, here and for other processes."""
        self._chosen = self._read() | self._chosen | {_key(kernel, shape): chosen}
        text = json.dumps({key: asdict(schedule) for key, schedule in sorted(self._chosen.items())}, indent=1)
        try:
            native.keep_source(text, self._file_name)
        except OSError:  # the disk is full: the next process measures again
            return

    def _read(self) -> dict[str, RowSchedule]:
        try:
            kept = json.loads((native.cache_folder() / self._file_name).read_text())
            return {key: RowSchedule(**schedule) for key, schedule in kept.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}


class Background:
    """A thread that calls functions one after the other, and lives as long as there are any.

    The end of the process drops those that have not begun, and waits for the one that has.
    """

    def __init__(self) -> None:
        self._jobs: deque[tuple[Callable[[], object], Future[None]]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        atexit.register(self.close)

    def submit(self, job: Callable[[], object]) -> "Future[None]":
        """Return a future that is done once the job has returned, or has raised what the future then holds."""
        future: Future[None] = Future()
        with self._lock:
            self._jobs.append((job, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="penstock schedules", daemon=True)
                self._thread.start()
        return future

    def wait(self) -> None:
        """Wait until all jobs are done."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """Drop the jobs that have not begun, and wait for the one that has."""
        with self._lock:
            for _, future in self._jobs:
                future.cancel()
            self._jobs.clear()
        self.wait()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job, future = self._jobs.popleft()
            try:
                job()
            except Exception as error:  # of Triton's compiler: this schedule is not tried
                future.set_exception(error)
            else:
                future.set_result(None)


BACKGROUND = Background()
"""The thread that compiles this process's schedules."""


def _key(kernel: str, shape: tuple[int, ...]) -> str:
    return f"{kernel} {'x'.join(map(str, shape))}"
