"""Optima of small cases, as mixed-integer linear programs solved by HiGHS: yardsticks for what plans and schedules.

The fastest step under a byte budget. After Checkmate (Jain et al., MLSys 2020): one stage per backward operator; which
forward operators run again in it, which storages are held when it begins, and which are freed after which operator.
Forward runs once and in order, backward too; outputs of backward live to their last use. Every forward operator makes
one storage at most: with several, the program would need to know of copies made in vain.

With swaps, storages may also leave over one lane and come back over another. Each lane carries no more bytes between
two moments than its bandwidth allows, and the step may wait in any stage. Where a moment inside of a stage matters, the
program takes the better one, so no real plan is faster than its optimum.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from penstock import fleet, remat


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The solver's result for one budget."""

    extra_s: float
    """Seconds that the best plan found adds to the step: recomputation and stalls."""
    bound_s: float
    """No plan adds less."""


def fastest(
    problem: remat.RematProblem, budget_bytes: int, limit_s: float = 300.0, *, method: remat.Method = "recompute"
) -> Optimum | None:
    """Return the optimum under ``budget_bytes``, static bytes included; ``None`` if none fits or the time ran out."""
    program = _HybridProgram if method == "hybrid" else _Program
    return program(problem, budget_bytes - problem.static_bytes).solve(limit_s)


def shortest_makespan_s(problem: fleet.FleetProblem, limit_s: float = 60.0) -> float | None:
    """Return when the last unit ends in the best schedule, on equal devices without copies; whole seconds, few units.

    A variable says whether a unit begins at a time; units of a job follow each other, and no more compute at a time
    than there are devices.
    """
    chains = [[round(job.unit(index).compute_s) for index in range(job.num_units)] for job in problem.jobs]
    horizon = sum(map(sum, chains))
    keys = [
        (job, index, time) for job, chain in enumerate(chains) for index in range(len(chain)) for time in range(horizon)
    ]
    columns = {key: column for column, key in enumerate(keys)}
    end = len(columns)
    rows: list[dict[int, float]] = []
    limits: list[tuple[float, float]] = []

    def add(row: dict[int, float], low: float, high: float) -> None:
        rows.append(row)
        limits.append((low, high))

    for job, chain in enumerate(chains):
        for index, duration in enumerate(chain):
            add({columns[job, index, time]: 1.0 for time in range(horizon)}, 1, 1)
            begins = {columns[job, index, time]: float(time) for time in range(horizon)}
            if index + 1 < len(chain):
                later = {columns[job, index + 1, time]: -float(time) for time in range(horizon)}
                add(begins | later, -np.inf, -duration)
            else:
                add({**begins, end: -1.0}, -np.inf, -duration)
    for time in range(horizon):
        busy = [
            columns[job, index, begin]
            for job, chain in enumerate(chains)
            for index, duration in enumerate(chain)
            for begin in range(max(0, time - duration + 1), time + 1)
        ]
        add(dict.fromkeys(busy, 1.0), 0, len(problem.devices))
    outcome = milp(
        c=np.append(np.zeros(end), 1.0),
        integrality=np.ones(end + 1),
        bounds=Bounds(np.zeros(end + 1), np.append(np.ones(end), horizon)),
        constraints=LinearConstraint(_sparse(rows, end + 1), *map(np.array, zip(*limits, strict=True))),
        options={"time_limit": limit_s},
    )
    return float(outcome.fun) if outcome.success else None


def _sparse(rows: list[dict[int, float]], num_columns: int) -> csr_matrix:
    entries = [(index, column, value) for index, row in enumerate(rows) for column, value in row.items()]
    lines, columns, values = zip(*entries, strict=True)
    return csr_matrix((values, (lines, columns)), shape=(len(rows), num_columns))


class _Program:
    def __init__(self, problem: remat.RematProblem, budget_bytes: int):
        self.problem = problem
        self.num_forward = problem.num_forward
        self.stages = range(problem.num_forward, len(problem.operators))
        self.storages = [index for index, storage in enumerate(problem.storages) if storage.producer < self.num_forward]
        for operator in problem.operators[: self.num_forward]:
            if len(operator.outputs) > 1:
                raise ValueError(
                    f"{operator.name} makes {len(operator.outputs)} storages; this program knows operators of one"
                )
        self.unit = max([storage.size_bytes for storage in problem.storages] + [1])
        self.budget = budget_bytes / self.unit
        self.users: dict[int, list[int]] = {storage: [] for storage in range(len(problem.storages))}
        for index, operator in enumerate(problem.operators):
            for storage in set(operator.inputs):
                self.users[storage].append(index)
        self.columns: dict[tuple[str, int, int, int], int] = {}
        self.costs: list[float] = []
        self.upper: list[float] = []
        self.is_whole: list[int] = []
        self.rows: list[tuple[dict[int, float], float]] = []
        """Sums of columns that are at most a number."""

    def solve(self, limit_s: float) -> Optimum | None:
        self._variables()
        self._what_is_there()
        self._forward_memory()
        for stage in self.stages:
            self._backward_memory(stage)
        outcome = milp(
            c=np.array(self.costs),
            integrality=np.array(self.is_whole),
            bounds=Bounds(np.zeros(len(self.upper)), np.array(self.upper)),
            constraints=LinearConstraint(
                _sparse([row for row, _ in self.rows], len(self.costs)), ub=np.array([limit for _, limit in self.rows])
            ),
            options={"time_limit": limit_s, "mip_rel_gap": 1e-6},
        )
        if outcome.x is None:
            return None
        return Optimum(extra_s=float(outcome.fun), bound_s=float(outcome.mip_dual_bound))

    def _add(self, key: tuple[str, int, int, int], cost: float, upper: float, is_whole: bool) -> None:
        self.columns[key] = len(self.costs)
        self.costs.append(cost)
        self.upper.append(upper)
        self.is_whole.append(int(is_whole))

    def _variables(self) -> None:
        """Add variables: whether operators run again in a stage, and which storages it holds at its start and frees."""
        for stage in self.stages:
            for index, operator in enumerate(self.problem.operators[: self.num_forward]):
                may_run = 0.0 if operator.must_run_once else 1.0
                self._add(("run", stage, index, 0), operator.duration_s, may_run, True)
            for storage in self.storages:
                self._add(("held", stage, storage, 0), 0.0, 1.0, True)
                for user in self._possible_users(storage, stage):
                    self._add(("freed", stage, storage, user), 0.0, 1.0, False)

    def _possible_users(self, storage: int, stage: int) -> list[int]:
        """Return the operators after which a storage may be freed in a stage: its producer and those that read it."""
        users = [user for user in self.users[storage] if user < self.num_forward or user == stage]
        return [self.problem.storages[storage].producer, *users]

    def _is_run(self, stage: int, operator: int) -> tuple[dict[int, float], float]:
        """Return columns and a constant whose sum is 1 if ``operator`` runs in ``stage``."""
        if operator == stage:
            return {}, 1.0
        return {self.columns["run", stage, operator, 0]: 1.0}, 0.0

    def _at_most(self, row: dict[int, float], limit: float) -> None:
        self.rows.append((row, limit))

    def _what_is_there(self) -> None:
        for stage in self.stages:
            for storage in self.storages:
                held = self.columns["held", stage, storage, 0]
                producer = self.problem.storages[storage].producer
                if self.problem.storages[storage].is_output:
                    self._at_most({held: -1.0}, -1.0)
                if stage > self.num_forward:
                    before = self.columns["held", stage - 1, storage, 0]
                    column = self.columns["run", stage - 1, producer, 0]
                    self._at_most({held: 1.0, before: -1.0, column: -1.0, **self._fetched(stage - 1, storage)}, 0.0)
                for user in self._possible_users(storage, stage)[1:]:
                    run, constant = self._is_run(stage, user)
                    column = self.columns["run", stage, producer, 0]
                    self._at_most({**run, held: -1.0, column: -1.0, **self._fetched(stage, storage)}, -constant)

    def _fetched(self, stage: int, storage: int) -> dict[int, float]:
        """Return a term of -1 if a storage comes back in a stage."""
        del stage, storage
        return {}

    def _forward_memory(self) -> None:
        """Bound the memory of forward: storages held for backward, and storages that forward still reads."""
        first = self.num_forward
        for index, operator in enumerate(self.problem.operators[:first]):
            row, used = {}, operator.workspace_bytes / self.unit
            for storage in self.storages:
                entry = self.problem.storages[storage]
                last = max([user for user in self.users[storage] if user < first], default=entry.producer)
                if entry.producer <= index <= last:
                    used += entry.size_bytes / self.unit
                elif entry.producer <= index and self.stages:
                    row[self._there(index, storage)] = entry.size_bytes / self.unit
            self._at_most(row, self.budget - used)

    def _there(self, index: int, storage: int) -> int:
        """Return the column that says that forward operator ``index`` runs beside a storage that it needs no more."""
        del index
        return self.columns["held", self.num_forward, storage, 0]

    def _backward_memory(self, stage: int) -> None:
        """Bound the memory of each stage: what it begins with, plus what it makes, less what it has freed."""
        problem, unit = self.problem, self.unit
        now: dict[int, float] = {
            self.columns["held", stage, storage, 0]: self._size(storage) for storage in self.storages
        }
        others = sum(self._size(backward_storage) for backward_storage in self._backward_storages(stage))
        for operator in (*range(self.num_forward), stage):
            run, constant = self._is_run(stage, operator)
            workspace = problem.operators[operator].workspace_bytes / unit
            result = 0.0
            if operator != stage:
                result = sum(self._size(output) for output in problem.operators[operator].outputs)
            for column in run:
                now[column] = now.get(column, 0.0) + result
            peak = dict(now)
            for column in run:
                peak[column] += workspace
            own = sum(self._size(output) for output in problem.operators[stage].outputs) if operator == stage else 0.0
            for column, size in self._moved(stage, operator).items():
                peak[column] = peak.get(column, 0.0) + size
            self._at_most(peak, self.budget - others - constant * workspace - own)
            for storage in self.storages:
                if operator in self._possible_users(storage, stage):
                    now[self._free(stage, storage, operator)] = -self._size(storage)

    def _moved(self, stage: int, operator: int) -> dict[int, float]:
        """Return what lanes add to the memory of an operator in a stage, and take from it."""
        del stage, operator
        return {}

    def _free(self, stage: int, storage: int, operator: int) -> int:
        """Return the column that says that a storage is freed after an operator of a stage, its last reader."""
        freed = self.columns["freed", stage, storage, operator]
        run, constant = self._is_run(stage, operator)
        self._at_most({freed: 1.0, **dict.fromkeys(run, -1.0)}, constant)
        if stage + 1 in self.stages:
            self._at_most({freed: 1.0, self.columns["held", stage + 1, storage, 0]: 1.0}, 1.0)
        for user in self._possible_users(storage, stage)[1:]:
            if user > operator:
                run, constant = self._is_run(stage, user)
                self._at_most({freed: 1.0, **run}, 1.0 - constant)
        return freed

    def _backward_storages(self, stage: int) -> list[int]:
        """Return storages of earlier stages that this or a later stage reads, or that are outputs."""
        results = []
        for storage, entry in enumerate(self.problem.storages):
            is_older = self.num_forward <= entry.producer < stage
            if is_older and (entry.is_output or max(self.users[storage], default=entry.producer) >= stage):
                results.append(storage)
        return results

    def _size(self, storage: int) -> float:
        return self.problem.storages[storage].size_bytes / self.unit


class _HybridProgram(_Program):
    """The same with storages that leave and come back over lanes."""

    def _variables(self) -> None:
        super()._variables()
        entries = self.problem.storages
        self.movable = [
            storage for storage in self.storages if not entries[storage].is_output and not entries[storage].must_stay
        ]
        for storage in self.movable:
            self._add(("swapped", 0, storage, 0), 0.0, 1.0, True)
            for index in self._after_forward_use(storage):
                self._add(("gone", index, storage, 0), 0.0, 1.0, True)
                self._add(("there", index, storage, 0), 0.0, 1.0, False)
            for stage in self.stages:
                self._add(("begins", stage, storage, 0), 0.0, 1.0, True)
                self._add(("leaves", stage, storage, 0), 0.0, 1.0, False)
                self._add(("out", stage, storage, 0), 0.0, 1.0, False)
        for stage in self.stages:
            self._add(("stall", stage, 0, 0), 1.0, np.inf, False)

    def _after_forward_use(self, storage: int) -> range:
        """Return the forward operators that run after the last one that reads a storage."""
        used = [user for user in self.users[storage] if user < self.num_forward]
        return range(max([*used, self.problem.storages[storage].producer]) + 1, self.num_forward)

    def _there(self, index: int, storage: int) -> int:
        return self.columns.get(("there", index, storage, 0), super()._there(index, storage))

    def _fetched(self, stage: int, storage: int) -> dict[int, float]:
        return {self.columns["begins", stage, storage, 0]: -1.0} if storage in self.movable else {}

    def _moved(self, stage: int, operator: int) -> dict[int, float]:
        moved = {self.columns["leaves", stage, storage, 0]: -self._size(storage) for storage in self.movable}
        if operator == stage:
            moved |= {self.columns["begins", stage, storage, 0]: self._size(storage) for storage in self.movable}
        return moved

    def _what_is_there(self) -> None:
        super()._what_is_there()
        for storage in self.movable:
            self._presence(storage)
        self._lane_out()
        self._lane_back()

    def _presence(self, storage: int) -> None:
        """Say when a swapped storage is on the device: until it has left, and again from the beginning of its copy."""
        columns, first = self.columns, self.num_forward
        swapped = columns["swapped", 0, storage, 0]
        self._at_most(
            dict.fromkeys((columns["begins", stage, storage, 0] for stage in self.stages), 1.0) | {swapped: -1.0}, 0
        )
        gone = [columns["gone", index, storage, 0] for index in self._after_forward_use(storage)]
        for index, column in zip(self._after_forward_use(storage), gone, strict=True):
            there = columns["there", index, storage, 0]
            self._at_most({columns["held", first, storage, 0]: 1.0, there: -1.0}, 0.0)
            self._at_most({swapped: 1.0, column: -1.0, there: -1.0}, 0.0)
            self._at_most({column: 1.0, swapped: -1.0}, 0.0)
            self._at_most({column: 1.0, columns["held", first, storage, 0]: 1.0}, 1.0)
        for column, later in itertools.pairwise(gone):
            self._at_most({column: 1.0, later: -1.0}, 0.0)
        for stage in self.stages:
            held, leaves, out = (columns[what, stage, storage, 0] for what in ("held", "leaves", "out"))
            self._at_most({swapped: 1.0, held: -1.0, out: -1.0}, 0.0)
            self._at_most({leaves: 1.0, swapped: -1.0}, 0.0)
            self._at_most({leaves: 1.0, held: -1.0}, 0.0)
            if stage + 1 in self.stages:
                self._at_most({leaves: 1.0, columns["held", stage + 1, storage, 0]: 1.0}, 1.0)
                self._at_most({out: 1.0, columns["out", stage + 1, storage, 0]: -1.0}, 0.0)
            for user in self._possible_users(storage, stage)[1:]:
                run, constant = self._is_run(stage, user)
                self._at_most({leaves: 1.0, **run}, 1.0 - constant)
        if gone:
            self._at_most({gone[-1]: 1.0, columns["out", first, storage, 0]: -1.0}, 0.0)

    def _time(self, stage: int, *, until_own: bool = False) -> tuple[dict[int, float], float]:
        """Return columns and a constant that add up to the time at which a stage begins, or its own operator does."""
        operators = self.problem.operators
        row: dict[int, float] = {}
        for before in range(self.num_forward, stage + until_own):
            row[self.columns["stall", before, 0, 0]] = 1.0
            for index in range(self.num_forward):
                row[self.columns["run", before, index, 0]] = operators[index].duration_s
        return row, sum(operator.duration_s for operator in operators[:stage])

    def _lane_out(self) -> None:
        """Bound the bytes that have left by a moment, of those that were made after another."""
        problem, storages = self.problem, self.problem.storages
        per_s = problem.out_bandwidth_bytes_per_s / self.unit
        for made in range(self.num_forward):
            made_s = sum(operator.duration_s for operator in problem.operators[: made + 1])
            later = [storage for storage in self.movable if storages[storage].producer >= made]
            for index in range(made + 1, self.num_forward):
                row = {
                    self.columns["gone", index, storage, 0]: self._size(storage)
                    for storage in later
                    if index in self._after_forward_use(storage)
                }
                begin_s = sum(operator.duration_s for operator in problem.operators[:index])
                if row:
                    self._at_most(row, per_s * (begin_s - made_s))
            for stage in self.stages:
                row = {self.columns["out", stage, storage, 0]: self._size(storage) for storage in later}
                columns, begin_s = self._time(stage)
                if row:
                    self._at_most(
                        row | {column: -per_s * of for column, of in columns.items()}, per_s * (begin_s - made_s)
                    )

    def _lane_back(self) -> None:
        """Bound the bytes whose copy back begins after one stage has begun and that another one needs."""
        per_s = self.problem.in_bandwidth_bytes_per_s / self.unit
        for first, last in itertools.combinations_with_replacement(self.stages, 2):
            needed = [
                storage
                for storage in self.movable
                if any(self.num_forward <= user <= last for user in self.users[storage])
            ]
            row = {
                self.columns["begins", stage, storage, 0]: self._size(storage)
                for storage in needed
                for stage in range(first, last + 1)
            }
            (ends, end_s), (begins, begin_s) = self._time(last, until_own=True), self._time(first)
            for column, of in ends.items():
                row[column] = row.get(column, 0.0) - per_s * (of - begins.get(column, 0.0))
            if needed:
                self._at_most(row, per_s * (end_s - begin_s))
