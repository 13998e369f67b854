"""A plan as text: the decision on every storage and its reason, largest first."""

import math
from dataclasses import dataclass

from penstock.remat._bound import least_extra_s
from penstock.remat._plan import RematPlan
from penstock.remat._problem import RematProblem
from penstock.units import format_bytes, format_duration

NOTHING_PLANNED = (
    "nothing is planned yet. A step is planned when it first runs with gradients, or, if it has several graphs, after "
    "that run. Nothing is planned without gradients, or if no plan fits the budget"
)
_MAX_SHAPES = 3
"""Largest number of graphs' shapes in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A step and its plan."""

    problem: RematProblem
    """The step that was planned."""
    plan: RematPlan
    """The decisions on its storages."""
    budget_bytes: int
    """The budget of the plan; 2**62 without a budget."""
    shapes: tuple[str, ...] = ("",)
    """Shapes of the arguments that it was planned for, such as ``"32x128 int64"``, for each graph of the step."""

    @property
    def num_graphs(self) -> int:
        """Number of graphs of the step."""
        return len(self.shapes)

    @property
    def has_budget(self) -> bool:
        """Whether there is a budget."""
        return self.budget_bytes < 2**62

    @property
    def peak_bytes(self) -> int:
        """Predicted peak bytes on the device, including everything."""
        return self.plan.peak_bytes

    def reasons(self) -> list[tuple[int, str]]:
        """Return, per storage that backward needs, its number and the decision on it, the largest first."""
        needed = {
            storage for operator in self.problem.operators[self.problem.num_forward :] for storage in operator.inputs
        }
        forward = [
            index
            for index, storage in enumerate(self.problem.storages)
            if storage.producer < self.problem.num_forward and (index in needed or self._is_kept_for_others(index))
        ]
        forward.sort(key=lambda index: (-self.problem.storages[index].size_bytes, index))
        return [(index, self._reason(index)) for index in forward]

    def explain(self, most: int | None = 20) -> str:
        """Return budget, peak, time and the decisions on the largest storages, as text. ``most=None`` shows all."""
        plan, problem = self.plan, self.problem
        budget = f" in a budget of {format_bytes(self.budget_bytes)}" if self.has_budget else ""
        graphs = f"{self.num_graphs} graphs" if self.num_graphs > 1 else ""
        shapes = [shape for shape in dict.fromkeys(self.shapes) if shape]
        more = "..." if len(shapes) > _MAX_SHAPES else ""
        of = ", ".join(part for part in (*shapes[:_MAX_SHAPES], more, graphs) if part)
        lines = [f"for {of}:"] if of else []
        lines += [
            f"peak {format_bytes(plan.peak_bytes)}{budget} (without a plan {format_bytes(plan.keep_all_peak_bytes)}), "
            f"of which {format_bytes(problem.static_bytes)} are held all along",
            f"extra time {format_duration(plan.extra_s)} on {format_duration(plan.step_s)} of operators "
            f"({plan.extra_s / max(plan.step_s, 1e-12):.1%}), of which stalls {format_duration(plan.stall_s)}"
            + self._bound(),
        ]
        reasons = self.reasons()
        for index, reason in reasons[:most]:
            storage = problem.storages[index]
            module = problem.operators[storage.producer].module
            lines.append(f"  {storage.name} ({module}): {reason}" if module else f"  {storage.name}: {reason}")
        if most is not None and len(reasons) > most:
            lines.append(f"  and {len(reasons) - most} smaller ones")
        return "\n".join(lines)

    def _bound(self) -> str:
        """Return how much time every plan for the budget adds, as text; nothing if that is none."""
        least_s = least_extra_s(self.problem, self.budget_bytes) if self.plan.extra_s and self.has_budget else 0.0
        if not 0 < least_s < math.inf:
            return ""
        share = least_s / max(self.plan.step_s, 1e-12)
        return f"; no plan for this budget adds less than {format_duration(least_s)} ({share:.1%})"

    def _is_kept_for_others(self, index: int) -> bool:
        slots = self.plan.slots[self.problem.num_forward :]
        return any(
            index in self.problem.operators[operator].inputs
            for operator in set(slots)
            if operator < self.problem.num_forward
        )

    def _reason(self, index: int) -> str:
        storage = self.problem.storages[index]
        size = format_bytes(storage.size_bytes)
        decision = self.plan.decisions[index]
        if storage.is_output:
            return f"kept: {size}, an output"
        if index in self.plan.gone_slots:
            num_away = self.plan.fetch_slots[index] - self.plan.gone_slots[index]
            return f"swapped: {size}, away while {num_away} operators run"
        if decision.recomputes:
            operator = self.problem.operators[storage.producer]
            times = self.plan.slots[self.problem.num_forward :].count(storage.producer)
            if not times:
                return f"dropped: {size}, not needed any more"
            return f"recomputed: {size} for {format_duration(times * operator.duration_s)}" + (
                f" ({times} times)" if times > 1 else ""
            )
        return f"kept: {size}" + (", the budget has room" if self.has_budget else "")
