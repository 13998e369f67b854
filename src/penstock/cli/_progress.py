"""Progress of a command on standard error: its phases, and the time left if it can be estimated.

On a terminal, one line is redrawn; elsewhere, and with ``--json``, a line appears every half minute if there is news.
"""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from penstock.units import format_duration

_QUIET_S = 30.0
"""Seconds between lines without a terminal; shorter phases print nothing."""


class Steps:
    """The phases of one command. A context manager, which restores the terminal."""

    def __init__(self, *, is_wanted: bool = False, console: Console | None = None):
        console = console or Console(stderr=True)
        self.is_wanted = is_wanted
        """Whether the command prints its story while it runs."""
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._console = console
        self._what, self._start_s, self._said_s = "", 0.0, time.monotonic()
        if is_wanted and console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                _Left(),
                console=console,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )

    def phase(self, what: str, total: int | None = None) -> None:
        """Begin the next phase: ``what`` in a few words, with ``total`` parts if that is known."""
        if self._progress is None:
            self._what, self._start_s = what, time.monotonic()
            self._say(what)
            return
        self._progress.start()
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=total)

    def advance(self, done: int, total: int) -> None:
        """Report that ``done`` of the ``total`` parts of this phase are done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total)
        elif self._progress is None and 0 < done < total:
            left_s = (time.monotonic() - self._start_s) / done * (total - done)
            self._say(f"{self._what}: {done} of {total}, about {format_duration(left_s)} left")

    def _say(self, line: str) -> None:
        if time.monotonic() - self._said_s > _QUIET_S:
            self._said_s = time.monotonic()
            self._console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        """Clear the line, so that later output stands alone."""
        if self._progress is not None:
            self._progress.stop()

    def __enter__(self) -> "Steps":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class _Left(ProgressColumn):
    """A column such as ``"3 of 9, 12.0 s left"``, or the time so far if the total is unknown."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(f"{format_duration(task.elapsed or 0.0)}", style="dim")
        done = f"{task.completed:.0f} of {task.total:.0f}"
        left_s = task.time_remaining
        return Text(done if left_s is None else f"{done}, {format_duration(left_s)} left", style="dim")
