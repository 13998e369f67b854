"""Which updates run on the host: none for results equal to the bit, else as many as make the step shortest.

An update on the host spares the link the weight and its state, and takes time that the host must have until the next
forward reads the weight. Late layers have most of it: their gradients come first in backward, and they are read last in
forward. So they go first, and how many is tried.
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace

from penstock.errors import BudgetError
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
    kinds = (kind,) if kind.num_micro_batches == 1 else (kind, replace(kind, reads_casts=True))

    def problems(share: float) -> list[StateProblem]:
        where = places(record, share, elsewhere)
        return [step_problem(record, each, where, rates, budget_bytes) for each in kinds]

    if not rates.host_bytes_per_s:
        return 0.0, best_plan(problems(0.0))
    return best_share(problems)


def best_share(problems: Callable[[float], Iterable[StateProblem]]) -> tuple[float, PlannedStep]:
    """Return the share of updates on the host for which one of its ``problems`` has the fastest plan, and that plan.

    Raises ``BudgetError`` if no plan keeps the budget, and ``ValueError`` if there are no problems at all.
    """

    def best_of(shares: Iterable[float]) -> tuple[float, PlannedStep]:
        tried = [(share, problem) for share in shares for problem in problems(share)]
        planned = best_plan(problem for _, problem in tried)
        return next(share for share, problem in tried if problem is planned.problem), planned

    best = best_of(_SHARES)
    with contextlib.suppress(BudgetError, ValueError):  # of those near it
        closer = best_of(share for share in (best[0] - _REFINED, best[0] + _REFINED) if 0 < share < 1)
        best = min(best, closer, key=lambda pair: pair[1].simulated.step_s)
    return best


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
