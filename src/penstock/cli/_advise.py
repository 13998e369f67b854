"""`penstock advise`: the room that fits a model into a budget best."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from penstock import advisor
from penstock.cli._answer import Answer, ExitCode
from penstock.cli._progress import Steps
from penstock.cli._target import called, function_of, shown_kind
from penstock.errors import PenstockError
from penstock.machines import Machine
from penstock.tiers import Budget
from penstock.units import format_bytes

_KEYS = ("model", "batch", "loss", "optimizer")
_FIELDS = ("name", "is_refused", "reason", "peak_bytes", "ratio", "is_measured", "code")
_RIGHT = "`return model, batch`, or `return {'model': model, 'batch': batch, 'loss': loss, 'optimizer': optimizer}`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model, batch, loss and optimizer that a factory returned."""

    model: nn.Module
    """The model to train."""
    batch: Any  # whatever the model takes
    """One batch."""
    loss: Callable[..., Any] | None
    """A function of ``(model, batch)`` that returns a scalar; ``None``: the model returns its own loss."""
    optimizer: Any  # what `penstock.advise` takes
    """The optimizer, for the bytes of its state."""


def answer(target: str, budget: int, host: int | None, disk: Path | None, rounds: int, steps: Steps) -> Answer:
    """Ask `penstock.advise`. The exit code is 3 if every option is refused."""
    subject = _subject_from(target, steps)
    steps.phase(f"measuring what fits {format_bytes(budget)}")
    said: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        if said[-1:] != [what]:
            steps.phase(what, total)
        said.append(what)
        steps.advance(done, total)

    advice = advisor.advise(
        subject.model, subject.batch, budget, loss=subject.loss, optimizer=subject.optimizer, host=host, disk=disk,
        rounds=rounds, progress=progress,
    )  # fmt: skip
    fits = any(not option.is_refused for option in advice.options)
    return Answer(
        data={
            "budget_bytes": budget,
            "best": advice.best.name if fits else None,
            "smallest_bytes": advice.smallest_bytes,
            "plain_peak_bytes": advice.plain_peak_bytes,
            "notes": advice.notes,
            "options": [{name: getattr(option, name) for name in _FIELDS} for option in advice.options],
        },
        show=lambda console: _show(advice.explain(), console),
        exit_code=ExitCode.GOOD if fits else ExitCode.NO_BUDGET,
    )


def on_machine(
    target: str, budget: int | None, host: int | None, disk: Path | None, machine: Machine, steps: Steps
) -> Answer:
    """Predict the options on ``machine`` from its data sheet."""
    from penstock.cli import _modelled

    subject = _subject_from(target, steps)
    return _modelled.answer(subject, budget, Budget(host=host, disk=disk), machine, steps)


def _subject_from(target: str, steps: Steps) -> Subject:
    steps.phase(f"calling {target}")
    factory = function_of(target, "makes the model", "() returns (model, batch)")
    return subject_of(target, called(target, factory))


def subject_of(target: str, made: object) -> Subject:
    """Check what a factory returned. Raises ``PenstockError``, which shows what it should return."""
    if isinstance(made, Mapping):
        parts = dict(made)
        unknown, missing = [key for key in parts if key not in _KEYS], [key for key in _KEYS[:2] if key not in parts]
        if unknown or missing:
            what = f"has no {missing[0]!r}" if missing else f"has {unknown[0]!r}, which nobody reads"
            raise PenstockError(f"the mapping that {target} returns {what}: {_RIGHT}")
    elif isinstance(made, tuple | list) and len(made) == 2:
        parts = {"model": made[0], "batch": made[1]}
    else:
        raise PenstockError(f"{target} returns {shown_kind(made)}, not a model with a batch: {_RIGHT}")
    if not isinstance(parts["model"], nn.Module):
        raise PenstockError(f"the model that {target} returns is {shown_kind(parts['model'])}, no module: {_RIGHT}")
    loss = parts.get("loss")
    if loss is not None and not callable(loss):
        raise PenstockError(
            f"the loss that {target} returns is {shown_kind(loss)}, and is to be a function: "
            "`'loss': lambda model, batch: model(batch).square().mean()`"
        )
    return Subject(model=parts["model"], batch=parts["batch"], loss=loss, optimizer=parts.get("optimizer"))


def _show(text: str, console: Console) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
