"""`penstock plan`: the cost of budgets for a step, before it is trained."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import optim

from penstock import remat
from penstock.cli._answer import Answer, ExitCode
from penstock.cli._progress import Steps
from penstock.cli._tables import print_table
from penstock.cli._target import called, function_of, shown_kind
from penstock.errors import PenstockError
from penstock.machines import Machine
from penstock.report import memory_timeline, pareto_curve, plan_marks, plan_timeline, save_asked
from penstock.units import format_bytes, format_duration

_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """The plans for one step, over a range of budgets."""

    problem: remat.RematProblem
    """The recorded step."""
    budgets_bytes: tuple[int, ...]
    """Budgets, ascending."""
    plans: tuple[remat.RematPlan | None, ...]
    """One plan per budget; ``None`` if the budget cannot be met."""
    smallest_bytes: int
    """The smallest budget that works."""
    method: remat.Method
    """Techniques that the plans may use."""
    machine: Machine | None
    """The machine whose times the plans use; ``None`` if times were measured."""
    asked_bytes: tuple[int, ...]
    """Budgets that the user asked for."""
    max_batches: dict[int, int]
    """The largest batch per budget that the user asked for, if the factory takes a batch."""


def answer(target: str, budgets: list[int], options: Mapping[str, Any], out: Path | None, steps: Steps) -> Answer:
    """Run `penstock plan`, with options of `remat.optimize`. The exit code is 3 if a budget cannot be met."""
    plans = make(target, budgets, options, steps)
    files = []
    if out is not None:
        steps.phase(f"drawing into {out}")
        files = write(plans, out)

    def shown(console: Console) -> None:
        show(plans, console)
        for file in files:
            console.print(f"  {file}", highlight=False, markup=False, soft_wrap=True)

    is_refused = any(budget < plans.smallest_bytes for budget in budgets)
    return Answer(
        data={**as_data(plans), "files": [str(file) for file in files]},
        show=shown,
        exit_code=ExitCode.NO_BUDGET if is_refused else ExitCode.GOOD,
    )


def make(target: str, budgets: list[int], options: Mapping[str, Any], steps: Steps) -> PlanTable:
    """Capture, profile and plan the step that ``target`` (``file.py:factory`` or ``module:factory``) makes."""
    factory = function_of(target, "makes the step", "() returns (step, example_inputs[, optimizer])")
    step, inputs, optimizer = _step_of(target, factory)
    options = {**options, "optimizer": optimizer}
    method: remat.Method = options["method"]
    machine = options["machine"]
    steps.phase("capturing the step" + (" and measuring its operators" if machine is None else f" for {machine.title}"))
    problem = remat.optimize(step, inputs, None, fullgraph=True, **options).plan.problem
    keep_all_bytes = remat.plan(problem, 2**62).keep_all_peak_bytes
    steps.phase("planning")
    smallest_bytes = remat.smallest_budget_bytes(problem, method=method)
    every = sorted({int(share * keep_all_bytes) for share in _SHARES} | {smallest_bytes} | set(budgets))
    plans = tuple(remat.pareto(problem, every, method=method))
    max_batches = {}
    if budgets and _takes_a_batch(factory):
        steps.phase("looking for the largest batch", len(budgets))
        for number, budget in enumerate(budgets, 1):
            max_batches[budget] = remat.max_batch(
                lambda batch: _step_of(target, factory, batch=batch)[:2], budget, **options
            )
            steps.advance(number, len(budgets))
    return PlanTable(
        problem=problem,
        budgets_bytes=tuple(every),
        plans=plans,
        smallest_bytes=smallest_bytes,
        method=method,
        machine=options["machine"],
        asked_bytes=tuple(budgets),
        max_batches=max_batches,
    )


def show(found: PlanTable, console: Console) -> None:
    """Print the table, and what it tried."""
    table = Table("budget", "peak", "extra time", "slower by", "swapped", "recomputed", "largest batch")
    for budget, plan in zip(found.budgets_bytes, found.plans, strict=True):
        batch = str(found.max_batches.get(budget, ""))
        if plan is None:
            table.add_row(format_bytes(budget), "[red]refused[/]", "", "", "", "", batch)
            continue
        swapped = sum(found.problem.storages[storage].size_bytes for storage in plan.gone_slots)
        num_again = len(plan.slots) - len(found.problem.operators)
        share = f"{plan.extra_s / max(plan.step_s, 1e-12):.1%}"
        table.add_row(
            format_bytes(budget),
            format_bytes(plan.peak_bytes),
            format_duration(plan.extra_s),
            share,
            format_bytes(swapped),
            str(num_again),
            batch,
        )
    print_table(table, console)
    console.print(_what_was_tried(found), highlight=False)
    console.print(
        f"The smallest budget that works is {found.smallest_bytes} bytes ({format_bytes(found.smallest_bytes)})."
    )
    if found.machine is not None:
        console.print(
            f"By the data sheet of {found.machine.title}; nothing was measured, and operators take no workspaces.",
            highlight=False,
        )


def _what_was_tried(found: PlanTable) -> str:
    """Return what the lines and columns of the table mean."""
    keep_all = format_bytes(remat.plan(found.problem, 2**62).keep_all_peak_bytes)
    yours = ", the smallest budget that works, and yours" if found.asked_bytes else ", and the smallest that works"
    swaps, recomputes = found.method != "recompute", found.method != "swap"
    if swaps and not found.problem.out_bandwidth_bytes_per_s:
        techniques = "recompute; to swap as well, give --disk or --host" if recomputes else "nothing without --disk"
    else:
        techniques = {"hybrid": "recompute and swap", "recompute": "recompute", "swap": "swap"}[found.method]
    return (
        f"Tried: {_SHARES[-1]:.0%} to 100% of the {keep_all} that the step takes without a plan{yours}. Plans may "
        f"{techniques}. Extra time: what a plan adds to the step, predicted. Swapped: bytes that leave the device and "
        "come back. Recomputed: operators that run again."
    )


def write(found: PlanTable, out: Path) -> list[Path]:
    """Write the problem, the curve, and a picture of a plan's memory.

    The plan is that for the first requested budget that can be met, or else the tightest one.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = [out / "problem.json", out / "pareto.png", out / "memory.png"]
    found.problem.save(files[0])
    save_asked(out, found.asked_bytes, found.method)
    curves = {"these plans": _points(found.plans)}
    if found.method != "recompute":
        curves["recompute only"] = _points(remat.pareto(found.problem, found.budgets_bytes, method="recompute"))
    pareto_curve(files[1], curves, title="Extra operator time over the peak")
    by_budget = dict(zip(found.budgets_bytes, found.plans, strict=True))
    asked = [plan for budget in found.asked_bytes if (plan := by_budget[budget]) is not None]
    shown, free = (asked or [plan for plan in found.plans if plan is not None])[0], found.plans[-1]
    assert free is not None
    memory_timeline(
        files[2],
        {
            "without a plan": plan_timeline(found.problem, free),
            "the plan" if asked else "the tightest plan": plan_timeline(found.problem, shown),
        },
        limit_bytes=shown.peak_bytes,
        limit_label="its peak",
        marks=plan_marks(found.problem, shown),
        title="Memory held over the operators of one step",
    )
    return files


def as_data(found: PlanTable) -> dict[str, object]:
    """Return the table for JSON."""
    rows = [
        {"budget_bytes": budget, "is_refused": True, "max_batch": found.max_batches.get(budget)}
        if plan is None
        else {
            "budget_bytes": budget,
            "is_refused": False,
            "peak_bytes": plan.peak_bytes,
            "extra_s": plan.extra_s,
            "step_s": plan.step_s,
            "swapped_bytes": sum(found.problem.storages[storage].size_bytes for storage in plan.gone_slots),
            "num_recomputed": len(plan.slots) - len(found.problem.operators),
            "max_batch": found.max_batches.get(budget),
        }
        for budget, plan in zip(found.budgets_bytes, found.plans, strict=True)
    ]
    machine = None if found.machine is None else found.machine.name
    return {"machine": machine, "smallest_bytes": found.smallest_bytes, "plans": rows}


def _points(plans: Sequence[remat.RematPlan | None]) -> list[tuple[int, float]]:
    return [(plan.peak_bytes, plan.extra_s / max(plan.step_s, 1e-12)) for plan in plans if plan is not None]


def _step_of(target: str, factory: Callable[..., Any], **parameters: int) -> tuple[Any, Sequence[Any], Any]:
    """Return what the factory makes. Raises ``PenstockError`` unless it is a step with its inputs."""
    result = called(target, factory, **parameters)
    if (
        isinstance(result, tuple)
        and len(result) in (2, 3)
        and callable(result[0])
        and isinstance(result[1], list | tuple)
    ):
        optimizer = result[2] if len(result) == 3 else None
        if optimizer is None or isinstance(optimizer, optim.Optimizer):
            return result[0], result[1], optimizer
    raise PenstockError(
        f"{target} returns {shown_kind(result)}, not (step, example_inputs): `return model, [tokens, targets]`, or "
        "`return (lambda x: model(x).square().mean()), [x], optimizer`"
    )


def _takes_a_batch(factory: Callable[..., Any]) -> bool:
    return any(parameter.name == "batch" for parameter in inspect.signature(factory).parameters.values())
