"""Cases of a benchmark, each in a process of its own under a time limit, so that a crash or a hang is a result.

Processes are forked from one that has imported the libraries, which takes longer than most cases.
"""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

Case = TypeVar("Case")
Tell = Callable[[dict[str, Any]], None]
"""Takes a case's row as far as it is; a later one replaces it."""
Target = Callable[..., None]
"""Runs a case: a function of a module, called with the case, a folder of its own, a `Tell` and the other arguments."""
_PATH = re.compile(r"(?<![\w./-])/(?:[\w.+-]+/)+(?=[\w.+-]+/[\w.+-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Generic[Case]):
    """How a case ended."""

    case: Case
    """The case."""
    row: dict[str, Any] | None
    """What it told last, without folders of this machine; ``None``: nothing."""
    is_late: bool
    """Whether it ran past the limit, and was killed."""
    exit_code: int
    """Exit status of its process; negative: the signal that ended it."""
    log: str
    """The end of what it printed."""
    duration_s: float
    """Seconds that it took."""


def _child(target: Target, case: Any, folder: Path, arguments: tuple[Any, ...]) -> None:
    """Run a case in a forked process, which leads a group so that every process that it starts ends with it."""
    import faulthandler

    os.setsid()
    with (folder / "log.txt").open("wb", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.enable()

    def tell(row: dict[str, Any]) -> None:
        draft = folder / "row.new"
        draft.write_text(json.dumps(row))
        draft.replace(folder / "row.json")

    (folder / "disk").mkdir()
    target(case, folder / "disk", tell, *arguments)
    sys.stdout.flush()
    os._exit(0)  # what libraries do at exit is no part of the case


class _Running(Generic[Case]):
    """A case that is running in a process."""

    def __init__(
        self,
        context: ForkServerContext,
        target: Target,
        case: Case,
        arguments: tuple[Any, ...],
        limit_s: float,
        scratch: Path,
    ):
        self._case, self._limit_s = case, limit_s
        self._folder = Path(tempfile.mkdtemp(dir=scratch))
        self._process: ForkServerProcess = context.Process(target=_child, args=(target, case, self._folder, arguments))
        self._start_s = time.monotonic()
        self._process.start()
        self.sentinel = self._process.sentinel

    @property
    def left_s(self) -> float:
        """Seconds until its limit."""
        left_s: float = self._start_s + self._limit_s - time.monotonic()
        return max(0.0, left_s)

    def ended(self) -> Ended[Case] | None:
        """Return how it ended, if it is over or past its limit."""
        is_late = self._process.is_alive()
        if is_late and self.left_s > 0:
            return None
        if is_late:
            with contextlib.suppress(ProcessLookupError):  # it leads no group yet
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            self._process.kill()
        self._process.join()
        report, log = self._folder / "row.json", self._folder / "log.txt"
        return Ended(
            case=self._case,
            row=_without_folders(json.loads(report.read_text())) if report.is_file() else None,
            is_late=is_late,
            exit_code=self._process.exitcode or 0,
            log=_without_folders(log.read_text(errors="replace")[-6000:]) if log.is_file() else "",
            duration_s=round(time.monotonic() - self._start_s, 1),
        )


def _without_folders(value: Any) -> Any:
    """Return ``value`` with absolute paths cut to their last two parts, without folders of this machine."""
    if isinstance(value, str):
        return _PATH.sub("", value)
    if isinstance(value, dict):
        return {key: _without_folders(part) for key, part in value.items()}
    return [_without_folders(part) for part in value] if isinstance(value, list) else value


def run(
    target: Target,
    cases: Sequence[Case],
    *,
    arguments: tuple[Any, ...] = (),
    preloaded: Sequence[str],
    jobs: int,
    limit_s: float,
    scratch: Path,
) -> Iterator[Ended[Case]]:
    """Run cases, ``jobs`` at once, and yield how each ended as soon as it did."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    waiting, running = list(reversed(cases)), list[_Running[Case]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_Running(context, target, waiting.pop(), arguments, limit_s, scratch))
        connection.wait([process.sentinel for process in running], min(process.left_s for process in running))
        for process in tuple(running):
            ended = process.ended()
            if ended is not None:
                running.remove(process)
                yield ended
