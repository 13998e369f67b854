"""Display of a running fleet: a live table on a terminal, lines elsewhere."""

import time
from collections.abc import Callable, Sequence
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from penstock.arguments import checked
from penstock.fleet._life import JobState
from penstock.fleet._state import JobRow
from penstock.fleet._worker import Worker
from penstock.units import format_bytes

_LINES_S = 30.0
_MOST_ROWS = 40
_BEGUN = (JobState.RUNNING.value, JobState.WAITING.value)


class Show:
    """A display.

    ``kind`` is ``"auto"``, ``"rich"``, ``"plain"`` or ``None``. It draws only when you call ``update``.
    """

    def __init__(self, kind: str | None, rows: Callable[[], list[JobRow]], workers: Sequence[Worker]):
        if kind not in ("auto", "rich", "plain", None):
            raise ValueError(f"`progress` must be 'auto', 'rich', 'plain' or None, got {kind!r}")
        self._console = Console(stderr=True)
        is_rich = kind == "rich" or (kind == "auto" and self._console.is_terminal)
        self._rows, self._workers = rows, workers
        self._start_s = self._said_s = time.time()
        self._is_plain = kind is not None and not is_rich
        self._live = Live(console=self._console, auto_refresh=False, transient=False) if is_rich else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self.update()
            self._live.stop()
        elif self._is_plain:
            self._say()

    def update(self) -> None:
        """Draw the current state; lines are printed twice a minute."""
        if self._live is not None:
            self._live.update(Group(jobs_table(self._rows()), self.devices_table()), refresh=True)
        elif self._is_plain and time.time() - self._said_s > _LINES_S:
            self._say()

    def devices_table(self) -> Table:
        """Return a table of what the devices do."""
        table = Table("device", "computes", "stalls", "units", "peak", "of", "moved out", "moved in")
        for worker in self._workers:
            past_s = max(time.time() - self._start_s, 1e-9)
            tiers = worker.memory.waterfall.counts()
            table.add_row(
                f"{worker.device} #{worker.index}",
                f"{worker.log.busy.compute_s / past_s:.0%}",
                f"{worker.log.busy.stall_s / past_s:.0%}",
                str(worker.log.busy.num_units),
                format_bytes(worker.memory.peak_bytes),
                format_bytes(worker.memory.budget_bytes),
                format_bytes(tiers["parked_bytes"]),
                format_bytes(tiers["fetched_bytes"]),
            )
        return table

    def _say(self) -> None:
        self._said_s = time.time()
        rows = self._rows()
        counts = {state: sum(row.state == state.value for row in rows) for state in JobState}
        said = ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)
        left_s = sum(max(0, row.num_steps - row.step) * row.seconds_per_step for row in rows if row.state in _BEGUN)
        eta = f", about {left_s / max(1, len(self._workers)):.0f} s left" if left_s else ""
        self._console.print(f"fleet: {said}; {sum(row.step for row in rows)} steps{eta}", highlight=False)


@checked("fleet.jobs_table(running.rows())")
def jobs_table(rows: Sequence[JobRow]) -> Table:
    """Return a table of jobs and their progress."""
    table = Table("job", "state", "step", "of", "loss", "validation", "s/step", "left", "device")
    shown = sorted(rows, key=lambda row: (row.state not in _BEGUN, row.place))[:_MOST_ROWS]
    for row in sorted(shown, key=lambda row: row.place):
        left_s = max(0, row.num_steps - row.step) * row.seconds_per_step
        last = [f"{key} {value:.4g}" for key, value in row.validation.items() if key != "step"]
        table.add_row(
            escape(row.name),
            row.state if row.error is None else f"{row.state}: {escape(row.error[:60])}",
            str(row.step),
            str(row.num_steps or "?"),
            "" if row.loss is None else f"{row.loss:.4f}",
            ", ".join(last),
            f"{row.seconds_per_step:.3g}" if row.seconds_per_step else "",
            f"{left_s:.0f} s" if row.state in _BEGUN and left_s else "",
            row.device,
        )
    if len(rows) > len(shown):
        table.add_row(f"and {len(rows) - len(shown)} more", *[""] * 8)
    return table
