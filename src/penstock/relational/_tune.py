"""Which schedule of a kernel is the fastest on this device: a few are compiled side by side, timed once, and kept."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from penstock import native

NUM_TRIED = 3
"""Schedules of a kernel: each is compiled, which takes most of a second."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a traversal's rows are shared out."""

    rows: int
    """Of an instance at a time."""
    lanes: bool
    """Whether these are one row each of as many groups, not many rows of one."""
    split: int
    """Rows of a group at most that one instance goes through; longer ones are split, and their parts added in order."""
    warps: int
    """Of an instance."""


def schedules(max_rows: int, mean_rows: float) -> list[Schedule]:
    """The ``NUM_TRIED`` that a traversal tries, the likeliest first.

    ``max_rows``: of an instance; ``mean_rows``: of a group. Two suit groups of that length, the third suits others.
    """
    by_group = [Schedule(min(max_rows, rows), lanes=False, split=1024, warps=warps) for rows, warps in _BY_GROUP]
    by_lane = [Schedule(min(max_rows, rows), lanes=True, split=128, warps=warps) for rows, warps in _BY_LANE]
    suited, others = (by_group, by_lane) if mean_rows >= 8 else (by_lane, by_group)
    return list(dict.fromkeys([*suited, others[0]]))[:NUM_TRIED]


_BY_GROUP = ((16, 2), (32, 4))
_BY_LANE = ((8, 2), (16, 4))


class Choices:
    """What was chosen for the kernels of one program on one kind of device, in memory and in a file of the cache.

    ``source``: the program's name, which tells its contents apart; ``device``: the kind's name and what compiles for
    it. The file is replaced whole. One that cannot be read, or names a schedule that is no longer tried, counts as
    none.
    """

    def __init__(self, source: str, device: str):
        safe = "".join(one if one.isalnum() else "_" for one in device)
        self._file_name = f"{source}-{safe}.json"
        self._chosen: dict[str, Schedule] = self._read()

    def find(self, kernel: str, shape: tuple[int, ...], tried: Sequence[Schedule]) -> Schedule | None:
        """The fastest of ``tried`` for a graph of that shape, where it was measured."""
        chosen = self._chosen.get(_key(kernel, shape))
        return chosen if chosen in tried else None

    def keep(self, kernel: str, shape: tuple[int, ...], chosen: Schedule) -> None:
        """Remember it, here and for other processes."""
        self._chosen = self._read() | self._chosen | {_key(kernel, shape): chosen}
        text = json.dumps({key: asdict(one) for key, one in sorted(self._chosen.items())}, indent=1)
        try:
            native.keep_source(text, self._file_name)
        except OSError:  # a full disk: measured again in the next process
            return

    def _read(self) -> dict[str, Schedule]:
        try:
            kept = json.loads((native.cache_folder() / self._file_name).read_text())
            return {key: Schedule(**one) for key, one in kept.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}


def compile_side_by_side(compilers: Sequence[Callable[[], object]]) -> None:
    """Call all, each of which asks Triton for a kernel without launching it; Triton compiles them in threads."""
    import triton

    with ThreadPoolExecutor(len(compilers)) as pool, triton.AsyncCompileMode(pool):
        for one in compilers:
            one()


def _key(kernel: str, shape: tuple[int, ...]) -> str:
    return f"{kernel} {'x'.join(map(str, shape))}"
