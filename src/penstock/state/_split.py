"""Which updates run on the host: none for results equal to the bit, else as many as make the step shortest.

An update on the host spares the link the weight and its state, and takes time that the host must have until the next
forward reads the weight. Late layers have most of it: their gradients come first in backward, and they are read last in
forward. So they go first, and how many is tried.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from penstock.state._plan import PlannedStep, best_plan
from penstock.state._problem import Rates, StateProblem
from penstock.state._record import NOBODY, StepRecord
from penstock.state._step import Place, StepKind, can_be_on_host, step_problem

_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Shares of the parameters that are tried first."""
_REFINED = 0.1
"""Distance from the best of them at which two more are tried."""


def best_split(
    record: StepRecord, kind: StepKind, rates: Rates, budget_bytes: int, *, elsewhere: Place
) -> tuple[float, PlannedStep]:
    """Return the share of the parameters that are best updated on the host, and the plan of that step.

    All others are updated ``elsewhere``; without ``rates.host_bytes_per_s`` all are. With several micro-batches, their
    weights come in as casts if that is faster. Raises ``BudgetError`` if no plan keeps the budget.
    """
    shares = _SHARES if rates.host_bytes_per_s else (0.0,)
    kinds = (kind,) if kind.num_micro_batches == 1 else (kind, replace(kind, reads_casts=True))
    tried: list[tuple[float, StateProblem]] = []

    def problems(which: tuple[float, ...]) -> Iterator[StateProblem]:
        for share, each in itertools.product(which, kinds):
            tried.append((share, step_problem(record, each, places(record, share, elsewhere), rates, budget_bytes)))
            yield tried[-1][1]

    def share_of(planned: PlannedStep) -> float:
        return next(share for share, problem in tried if problem is planned.problem)

    best = best_plan(problems(shares))
    if len(shares) > 1:
        near = tuple(share for share in (share_of(best) - _REFINED, share_of(best) + _REFINED) if 0 < share < 1)
        closer = best_plan(problems(near))
        best = min(best, closer, key=lambda planned: planned.simulated.step_s)
    return share_of(best), best


def places(record: StepRecord, share: float, elsewhere: Place) -> dict[int, Place]:
    """Return where each parameter is updated if the host updates that share of their bytes, the late layers first."""
    ready = {storage.gradient_of: storage.uses[-1] for storage in record.storages if storage.gradient_of != NOBODY}
    where: dict[int, Place] = dict.fromkeys(record.parameters, elsewhere)
    left_bytes = share * sum(record.storages[index].size_bytes for index in record.parameters)
    for index in sorted(can_be_on_host(record) & ready.keys(), key=lambda index: ready[index]):
        size_bytes = record.storages[index].size_bytes
        if left_bytes >= size_bytes / 2:
            where[index] = "host"
            left_bytes -= size_bytes
    return where
