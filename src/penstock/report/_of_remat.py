"""The part of a page about a planned step: memory over its operators, other budgets, and the largest storages."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from penstock import remat
from penstock.arguments import checked
from penstock.files import read_text
from penstock.report._model import Curves, Headline, Mark, ReportTable, Section, Series, hue
from penstock.report._part import Part, table
from penstock.report._plans import plan_marks, plan_timeline
from penstock.report._thin import thin, thin_positions
from penstock.units import format_bytes, format_duration

_ASKED_FILE = "asked.json"
_SHARES = (0.95, 0.8, 0.65, 0.5, 0.35, 0.2)
"""Budgets on the curve, as shares of the peak without a plan."""


def parts_of_step(step: remat.OptimizedStep) -> list[Part]:
    """Return a part per planned shape of the arguments, for the last four."""
    return [part_of_planned(planned) for planned in step.plans[-4:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The budgets and the method that plans were asked for, saved next to a problem."""

    budgets_bytes: tuple[int, ...] = ()
    method: remat.Method = "hybrid"


@checked("penstock.report.save_asked(folder, [6 * 2**30], 'hybrid')")
def save_asked(folder: Path, budgets_bytes: Sequence[int], method: remat.Method) -> None:
    """Write ``asked.json``, with the budgets and the method, next to a problem, for `part_of_problem`."""
    asked = _Asked(budgets_bytes=tuple(budgets_bytes), method=method)
    (folder / _ASKED_FILE).write_bytes(TypeAdapter(_Asked).dump_json(asked))


def part_of_problem(file: Path) -> Part:
    """Return the part for a problem that ``penstock plan --out`` saved.

    It shows the plan for the first requested budget that can be met, or else the tightest plan. Raises ``ValueError``
    for damaged files.
    """
    problem = remat.RematProblem.load(file)
    beside = file.with_name(_ASKED_FILE)
    asked = TypeAdapter(_Asked).validate_json(read_text(beside)) if beside.is_file() else _Asked()
    smallest_bytes = remat.smallest_budget_bytes(problem, method=asked.method)
    met = [budget for budget in asked.budgets_bytes if budget >= smallest_bytes]
    budget_bytes = (met or [smallest_bytes])[0]
    plan = remat.plan(problem, budget_bytes, method=asked.method)
    planned = remat.Planned(problem=problem, plan=plan, budget_bytes=budget_bytes)
    return part_of_planned(planned, "the plan" if met else "the tightest plan", asked)


def part_of_planned(planned: remat.Planned, what: str = "the plan", asked: _Asked | None = None) -> Part:
    """Return the part for a plan, with the cost of other budgets."""
    problem, plan = planned.problem, planned.plan
    swapped_bytes = sum(problem.storages[storage].size_bytes for storage in plan.gone_slots)
    budget_bytes = planned.budget_bytes if planned.has_budget else None
    num_again = len(plan.slots) - len(problem.operators)
    done = [f"recomputes {num_again:,} operators"] if num_again else []
    if plan.gone_slots:
        done.append(f"swaps {len(plan.gone_slots):,} storages ({format_bytes(swapped_bytes)})")
    text = (
        f"{what.capitalize()} reduces the predicted peak of the step from {format_bytes(plan.keep_all_peak_bytes)} to "
        f"{format_bytes(plan.peak_bytes)}, {format_bytes(problem.static_bytes)} of which are held throughout. It "
        f"{' and '.join(done) or 'keeps everything'}, for {plan.extra_s / max(plan.step_s, 1e-12):.1%} more time "
        f"than the operators of the plain step take ({format_duration(plan.extra_s)} on {format_duration(plan.step_s)}"
        + (f", of which {format_duration(plan.stall_s)} are waits)." if plan.stall_s else ").")
    )
    section = Section(
        kind="remat",
        title="A step planned for a budget",
        text=text,
        headline=Headline(
            what=f"remat, {what}",
            peak_bytes=plan.peak_bytes,
            is_peak_predicted=True,
            budget_bytes=budget_bytes,
            stall_s=plan.stall_s,
            stall_share=plan.stall_s / plan.step_s if plan.step_s else None,
            out_bytes=swapped_bytes,
            in_bytes=swapped_bytes,
        ),
        charts=(_memory(planned, budget_bytes), _pareto(planned, what, asked or _Asked())),
        tables=(_storages(planned),),
    )
    return Part(section=section)


def _memory(planned: remat.Planned, budget_bytes: int | None) -> Curves:
    problem, plan = planned.problem, planned.plan
    free = remat.plan(problem, 2**62)
    series = [
        Series(
            name=f"{name}: peak {format_bytes(drawn.peak_bytes)}",
            points=_steps(problem, drawn),
            style="step",
            colour=hue(index),
        )
        for name, drawn, index in (("as planned", plan, 0), ("without a plan", free, 1))
    ]
    colours = {"recomputed": hue(2), "swapped out": hue(0), "called back": hue(3)}
    return Curves(
        title="Memory held over the operators of one step.",
        reading="Memory rises in forward and falls in backward. Ticks below show where the plan recomputes operators, "
        "and where storages leave the device and begin to come back. The peak must stay below the dashed line.",
        x_label="time of operators",
        x_unit="s",
        y_label="held on the device",
        y_unit="bytes",
        series=tuple(reversed(series)),
        limit=budget_bytes,
        limit_label="budget",
        marks=tuple(
            Mark(name=name, positions=thin_positions(times_s), num_events=len(times_s), colour=colours[name])
            for name, times_s in plan_marks(problem, plan).items()
        ),
    )


def _steps(problem: remat.RematProblem, plan: remat.RematPlan) -> tuple[tuple[float, float], ...]:
    return thin(plan_timeline(problem, plan))


def _pareto(planned: remat.Planned, what: str, asked: _Asked) -> Curves:
    problem, plan = planned.problem, planned.plan
    budgets = [*(int(share * plan.keep_all_peak_bytes) for share in _SHARES), *asked.budgets_bytes]
    plans = [point for point in remat.pareto(problem, budgets, method=asked.method) if point is not None]
    points = sorted({(point.peak_bytes, point.extra_s / max(point.step_s, 1e-12)) for point in plans})
    points.append((plan.keep_all_peak_bytes, 0.0))
    chosen = ((float(plan.peak_bytes), plan.extra_s / max(plan.step_s, 1e-12)),)
    return Curves(
        title="What bytes cost.",
        reading="Each point of the curve is a plan for another budget: further left is less memory, further up is more "
        "time. No budget that was tried to the left of the first point can be met.",
        x_label="predicted peak",
        x_unit="bytes",
        y_label="extra time over the plain step",
        y_unit="share",
        series=(
            Series(name="plans for other budgets", points=thin(points), style="both", colour=hue(1)),
            Series(name=what, points=thin(chosen), style="points", colour=hue(0)),
        ),
    )


def _storages(planned: remat.Planned) -> ReportTable:
    problem = planned.problem
    lines: list[Sequence[str]] = []
    for index, reason in planned.reasons():
        storage = problem.storages[index]
        decision, _, why = reason.partition(": ")
        size = format_bytes(storage.size_bytes)
        why = why.removeprefix(size).removeprefix(", ").strip()
        lines.append((storage.name, size, decision, why, problem.operators[storage.producer].module))
    return table(
        "The largest storages that backward needs",
        ("storage", "bytes", "decision", "why", "module"),
        lines,
        note="Largest first.",
        most=40,
    )
