"""Mini-batches that take other paths through a model than the one that was measured.

Layers that are dropped at random, experts, and branches on values make some mini-batches of a model that is run whole
take more than the first did. Therefore the first mini-batches of a training are measured as they run, and so are some
after each that saved more than they did. Each of these has all memory to itself. The memory that the fleet expects
units to take grows with the measurements. If it does not fit, the mini-batch runs above the budget, and the user gets a
warning, since its need was not known before.
"""

import warnings
from typing import Any

from penstock.errors import BudgetNotKeptWarning
from penstock.fleet._memory import DeviceMemory
from penstock.fleet._meter import UnitMeter
from penstock.fleet._problem import UnitKind
from penstock.fleet._whole import WholeBatch
from penstock.fleet._worker import TOLERANCE, Expected

_NUM_MEASURED = 4
"""Mini-batches in a row that have to show nothing new."""


class Ways:
    """Knowledge about the mini-batches of one job: call ``begin`` before each, ``learn`` after it."""

    def __init__(self) -> None:
        self._num_left = _NUM_MEASURED
        self._most = (0, 0)
        self._said_bytes = 0
        self._shapes: set[Any] = set()  # any: signatures
        self._seen: dict[tuple[Any, UnitKind, int], int] = {}  # any: a signature
        """The most bytes that units took, by the shape of their batch, their kind and their shard."""

    def begin(self, mini: WholeBatch, memory: DeviceMemory, known: Expected) -> Expected:
        """Prepare to measure the mini-batch if it may show something new.

        Return what its units are expected to take.
        """
        if mini.work.structure.signature not in self._shapes:
            self._shapes.add(mini.work.structure.signature)
            self._num_left = _NUM_MEASURED
        if self._num_left:
            mini.meter = UnitMeter(memory)
        return _Wider(mini, known, self._seen, memory.room_bytes, takes_all=self._num_left > 0)

    def learn(self, mini: WholeBatch, budget_bytes: int) -> None:
        """Update the expectations with what the units of ``mini`` took."""
        seen = len(mini.tasks), sum(mini.saved_by_shard.values())
        is_new = seen[0] > self._most[0] or seen[1] > self._most[1]
        self._most = max(seen[0], self._most[0]), max(seen[1], self._most[1])
        self._num_left = _NUM_MEASURED if is_new else max(0, self._num_left - 1)
        if mini.meter is None:
            return
        for index, peak_bytes in mini.meter.peaks.items():
            key = _key(mini, index)
            self._seen[key] = max(peak_bytes, self._seen.get(key, 0))
        most_bytes = max(mini.meter.totals.values(), default=0)
        if most_bytes > max(budget_bytes + budget_bytes // TOLERANCE, self._said_bytes):
            self._said_bytes = 2 * most_bytes
            training = mini.work.training
            warnings.warn(
                f"job {training.job.name!r}: a mini-batch of step {training.position.step + 1} took {most_bytes} "
                f"bytes, above the budget of {budget_bytes} bytes: it is larger than the first one, or it takes "
                "another path through the model, for example because layers are dropped at random or experts are "
                "chosen. Training goes on above the budget. Give a larger budget, or smaller batches: "
                "Job(accumulate=4, ...)",
                BudgetNotKeptWarning,
                stacklevel=2,
            )


class _Wider:
    """Memory of units as the pilot measured it, or the larger memory seen since, as far as the budget allows.

    While mini-batches may show something new, each of them ``takes_all`` of the memory, and keeps nothing else there.
    """

    def __init__(
        self,
        mini: WholeBatch,
        known: Expected,
        seen: dict[tuple[Any, UnitKind, int], int],
        budget_bytes: int,
        *,
        takes_all: bool,
    ):
        self._mini, self._known, self._seen, self._budget_bytes = mini, known, seen, budget_bytes
        self._takes_all = takes_all

    def transient_bytes(self, index: int) -> int:
        if self._mini.tasks[index].kind is UnitKind.STEP:  # does not depend on the model's path
            return self._known.transient_bytes(index)
        most_bytes = max(self._known.transient_bytes(index), self._seen.get(_key(self._mini, index), 0))
        room_bytes = self._budget_bytes - sum(item.size_bytes for item in self._mini.needs(index))
        # Next to the items of other jobs, a unit that took another path exceeded the budget by 5% in one of four runs.
        return room_bytes if self._takes_all else min(most_bytes, room_bytes)

    def remaining_bytes(self, index: int) -> int:
        return self._known.remaining_bytes(index)

    def recompute_s(self, index: int) -> float:
        return self._known.recompute_s(index)


def _key(mini: WholeBatch, index: int) -> tuple[Any, UnitKind, int]:
    task = mini.tasks[index]
    return mini.work.structure.signature, task.kind, task.shard
