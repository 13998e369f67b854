"""`penstock advise --machine`: predictions for a step on another machine, from its data sheet."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from penstock import offload, remat
from penstock.cli._advise import Subject
from penstock.cli._answer import Answer, ExitCode
from penstock.cli._progress import Steps
from penstock.cli._tables import print_table
from penstock.errors import BudgetError
from penstock.machines import Machine
from penstock.tiers import Budget
from penstock.units import format_bytes, format_duration

_FIELDS = ("name", "is_refused", "reason", "peak_bytes", "ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledOption:
    """One way to train the step on that machine."""

    name: str
    """The name that `penstock.advise` uses."""
    peak_bytes: int | None
    """Predicted peak; ``None`` if it does not fit."""
    ratio: float | None
    """Predicted time as a ratio to the plain step's; ``None`` if it does not fit."""
    reason: str = ""
    """The reason why it does not fit; empty if it does."""

    @property
    def is_refused(self) -> bool:
        """Whether it does not fit."""
        return bool(self.reason)


def answer(subject: Subject, budget: int | None, tiers: Budget, machine: Machine, steps: Steps) -> Answer:
    """Plan the step with the machine's times. Exit code 3 if nothing fits ``budget``, by default all of its memory."""
    budget = machine.memory_bytes if budget is None else budget
    steps.phase(f"capturing the step for {machine.title}")
    loss = subject.loss or called
    problem = remat.optimize(
        lambda batch: loss(subject.model, batch), [subject.batch], tiers, optimizer=subject.optimizer,
        machine=machine, fullgraph=True,
    ).plan.problem  # fmt: skip
    plain = remat.plan(problem, 2**62)
    steps.phase("planning")
    options = [_fits("plain", plain.peak_bytes, 1.0, budget)]
    methods: list[tuple[str, remat.Method]] = [("remat (recompute)", "recompute"), ("remat (hybrid)", "hybrid")]
    for name, method in methods if problem.out_bandwidth_bytes_per_s else methods[:1]:
        options.append(_planned(name, problem, budget, method))
    if problem.out_bandwidth_bytes_per_s:
        options.append(_offloaded(subject, plain, budget, machine, to_disk=tiers.host_bytes is None))
    best = min(
        (option for option in options if option.ratio is not None), key=lambda option: option.ratio or 0.0, default=None
    )
    data = {
        "machine": machine.name,
        "is_modelled": True,
        "budget_bytes": budget,
        "best": best.name if best is not None else None,
        "plain_peak_bytes": plain.peak_bytes,
        "plain_step_s": plain.step_s,
        "options": [{name: getattr(option, name) for name in _FIELDS} for option in options],
    }
    return Answer(
        data=data,
        show=lambda console: _show(console, options, plain.step_s, budget, machine),
        exit_code=ExitCode.GOOD if best is not None else ExitCode.NO_BUDGET,
    )


def _fits(name: str, peak_bytes: int, ratio: float, budget: int) -> ModelledOption:
    if peak_bytes > budget:
        reason = f"its peak of {format_bytes(peak_bytes)} is above the budget"
        return ModelledOption(name=name, peak_bytes=None, ratio=None, reason=reason)
    return ModelledOption(name=name, peak_bytes=peak_bytes, ratio=ratio)


def _planned(name: str, problem: remat.RematProblem, budget: int, method: remat.Method) -> ModelledOption:
    try:
        plan = remat.plan(problem, budget, method=method)
    except BudgetError as error:
        return ModelledOption(name=name, peak_bytes=None, ratio=None, reason=str(error).partition(".")[0])
    return _fits(name, plan.peak_bytes, 1 + plan.extra_s / max(plan.step_s, 1e-12), budget)


def _offloaded(
    subject: Subject, plain: remat.RematPlan, budget: int, machine: Machine, *, to_disk: bool
) -> ModelledOption:
    """Return the prediction of the offloader's planner, on tensors without bytes.

    Bytes that autograd does not save count as they do in the plain step's peak.
    """
    name = "offload"
    try:
        model = copy.deepcopy(subject.model).to("meta")
        batch = torch.utils._pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to("meta"), subject.batch)
        loss = subject.loss or called
        problem = offload.modelled_cycle(
            model, lambda: loss(model, batch).backward(), machine, to_disk=to_disk, is_staged=to_disk
        )
    except RuntimeError as error:
        reason = f"the step does not run on tensors without bytes: {str(error).splitlines()[0]}"
        return ModelledOption(name=name, peak_bytes=None, ratio=None, reason=reason)
    keep_all_bytes = offload.plan(problem).keep_all_peak_bytes
    beside_bytes = max(0, plain.peak_bytes - keep_all_bytes)
    try:
        plan = offload.plan(replace(problem, base_bytes=(beside_bytes,) * problem.num_events, budget_bytes=budget))
    except BudgetError as error:
        return ModelledOption(name=name, peak_bytes=None, ratio=None, reason=str(error).partition(".")[0])
    return _fits(name, plan.peak_bytes, 1 + plan.stall_s / max(problem.step_s, 1e-12), budget)


def called(model: torch.nn.Module, batch: Any) -> Any:
    """Return the loss of a model without a user's loss function, as `penstock.advise` does."""
    if isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    return output if isinstance(output, torch.Tensor) else output.loss


def _show(console: Console, options: list[ModelledOption], step_s: float, budget: int, machine: Machine) -> None:
    table = Table("option", "peak", "step time (plain = 1)", "why it is refused")
    for option in options:
        peak = "" if option.peak_bytes is None else format_bytes(option.peak_bytes)
        table.add_row(option.name, peak, "" if option.ratio is None else f"{option.ratio:.2f}", option.reason)
    print_table(table, console)
    console.print(
        f"By the data sheet of {machine.title}, for a budget of {format_bytes(budget)}; nothing was measured. The "
        f"plain step would take {format_duration(step_s)}, at {machine.matmul_share:.0%} of the peak rate of matrix "
        f"products, {machine.memory_share:.0%} of the memory's and {machine.link_share:.0%} of links'.",
        highlight=False,
    )
    for source in machine.sources:
        console.print(f"  {source}", highlight=False)
