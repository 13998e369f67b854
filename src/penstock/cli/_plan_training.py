"""`penstock plan --training`: a step of a model whose state exceeds the device, by a machine's data sheet."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from penstock.cli._advise import subject_of
from penstock.cli._answer import Answer, ExitCode
from penstock.cli._modelled import called as loss_of_model
from penstock.cli._progress import Steps
from penstock.cli._tables import print_table
from penstock.cli._target import called, function_of
from penstock.errors import BudgetError, PenstockError
from penstock.machines import Machine
from penstock.state import PlannedStep, Rates, StepKind, StepRecord, best_split, modelled_record, plain_s, verify
from penstock.units import format_bytes, format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """The plan for one budget."""

    budget_bytes: int
    """The budget."""
    is_exact: bool
    """Whether all updates run on the device, so that results equal plain PyTorch's to the bit."""
    step_s: float | None = None
    """Predicted seconds of a step; ``None`` if the budget cannot be met."""
    ratio: float | None = None
    """The same as a ratio to a step of a device that holds everything."""
    in_bytes: int = 0
    """Bytes that a step copies to the device."""
    out_bytes: int = 0
    """Bytes that a step copies from the device."""
    host_share: float = 0.0
    """Share of the parameters that the host updates."""
    limit: str = ""
    """The part of the machine that is busy longest, and how much of the step."""
    refusal: str = ""
    """The reason why the budget cannot be met; empty if it can."""


def answer(
    target: str, budgets: list[int], machine: Machine, num_micro_batches: int, host_rate: int | None, steps: Steps
) -> Answer:
    """Run the command. The exit code is 3 if a budget cannot be met. The default is all memory of the machine."""
    steps.phase(f"recording the step for {machine.title}")
    factory = function_of(target, "makes the model", "() returns (model, batch)")

    def make() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        subject = subject_of(target, called(target, factory))
        loss = subject.loss or loss_of_model
        return subject.model, lambda: loss(subject.model, subject.batch)

    try:
        record = modelled_record(make, machine)
    except RuntimeError as error:
        raise PenstockError(
            f"the step that {target} makes cannot be recorded: {type(error).__name__}: {error}. Its tensors have no "
            "numbers here, so it must not look at any, as .item() does, and its loss must be a scalar with a gradient"
        ) from error
    kind = StepKind(
        device_bytes_per_s=machine.memory_share * machine.memory_bytes_per_s, num_micro_batches=num_micro_batches
    )
    parameter_bytes = sum(record.storages[index].size_bytes for index in record.parameters)
    whole_s = plain_s(record, kind)
    rows: list[TrainingRow] = []
    every = [
        (budget, rate)
        for budget in sorted(budgets) or [machine.memory_bytes]
        for rate in (0, host_rate)
        if rate is not None
    ]
    steps.phase("planning", len(every))
    for number, (budget, rate) in enumerate(every, 1):
        if not (rate and rows[-1].refusal):  # what does not fit on the device alone is refused once
            rows.append(_row(record, kind, machine, budget, rate, whole_s))
        steps.advance(number, len(every))
    data = {
        "machine": machine.name,
        "is_modelled": True,
        "parameter_bytes": parameter_bytes,
        "plain_step_s": whole_s,
        "num_micro_batches": num_micro_batches,
        "plans": [{name: getattr(row, name) for name in TrainingRow.__dataclass_fields__} for row in rows],
    }
    return Answer(
        data=data,
        show=lambda console: _show(console, rows, whole_s, parameter_bytes, machine),
        exit_code=ExitCode.NO_BUDGET if any(row.step_s is None for row in rows) else ExitCode.GOOD,
    )


def _row(
    record: StepRecord, kind: StepKind, machine: Machine, budget: int, host_rate: int, whole_s: float
) -> TrainingRow:
    out_rate, in_rate = machine.lane_rates(to_disk=False)
    rates = Rates(
        in_bytes_per_s=in_rate, out_bytes_per_s=out_rate, both_in_bytes_per_s=in_rate, both_out_bytes_per_s=out_rate,
        host_bytes_per_s=host_rate,
    )  # fmt: skip
    try:
        share, planned = best_split(record, kind, rates, budget, elsewhere="backward")
    except BudgetError as error:
        return TrainingRow(budget_bytes=budget, is_exact=not host_rate, refusal=str(error))
    verify(planned.problem, planned.plan)
    return TrainingRow(
        budget_bytes=budget,
        is_exact=not host_rate,
        step_s=planned.simulated.step_s,
        ratio=planned.simulated.step_s / whole_s,
        in_bytes=planned.plan.in_bytes(planned.problem),
        out_bytes=planned.plan.out_bytes(planned.problem),
        host_share=share,
        limit=_limit(planned),
    )


def _limit(planned: PlannedStep) -> str:
    simulated = planned.simulated
    busy_s = {
        "device": sum(planned.problem.seconds),
        "in": simulated.in_s,
        "out": simulated.out_s,
        "host": simulated.update_s,
    }
    limit = max(busy_s, key=lambda part: busy_s[part])
    return f"{limit} {busy_s[limit] / simulated.step_s:.0%}"


def _show(console: Console, rows: list[TrainingRow], whole_s: float, parameter_bytes: int, machine: Machine) -> None:
    table = Table("budget", "updates", "step", "of plain", "in", "out", "busiest")
    for row in rows:
        budget, updates = (
            format_bytes(row.budget_bytes),
            f"{row.host_share:.0%} on host" if row.host_share else "device",
        )
        if row.step_s is None or row.ratio is None:
            table.add_row(budget, "", "[red]refused[/]", "", "", "", "")
        else:
            moved = (format_bytes(row.in_bytes), format_bytes(row.out_bytes))
            table.add_row(budget, updates, format_duration(row.step_s), f"{row.ratio:.2f}", *moved, row.limit)
    print_table(table, console)
    said = [row.refusal for row in rows if row.refusal]
    said.append(
        f"A step takes {format_duration(whole_s)} if everything fits: {format_bytes(parameter_bytes)} of parameters, "
        "and as much again for gradients and for each of Adam's two moments. Updates run in backward. In and out are "
        f"bytes of a step. By the data sheet of {machine.title}, under autocast with bfloat16; nothing was measured."
    )
    for text in dict.fromkeys(said):
        console.print(text, highlight=False, markup=False)
