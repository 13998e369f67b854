"""What `advise` returns: options with their costs, as a table and as code."""

from dataclasses import dataclass

from penstock.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to train the step."""

    name: str
    """Such as ``"offload"`` or ``"checkpoint + offload"``."""
    rooms: tuple[str, ...]
    """The rooms that it uses; empty for plain PyTorch."""
    is_refused: bool
    """Whether it does not keep the budget, or does not work with this model."""
    reason: str
    """Why it is refused; empty where it is not."""
    peak_bytes: int | None
    """True peak of the device in a training step, gradients and optimizer state included; ``None``: not known."""
    ratio: float | None
    """Its step over plain PyTorch's, forward and backward; ``None``: not known."""
    is_measured: bool
    """Whether peak and ratio were measured in trial steps, rather than predicted from the profile."""
    code: str
    """Python to paste: ``model``, ``batches``, ``optimizer``, ``loss`` and a shared ``budget`` are the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Options for a step under a budget, those that keep it first, the fastest first."""

    options: tuple[Option, ...]
    """All that were looked at."""
    budget_bytes: int | None
    """What was asked for; ``None``: no limit."""
    plain_peak_bytes: int | None
    """Of plain PyTorch, where it is known."""
    plain_is_measured: bool
    """Whether ratios are to plain steps that ran in turn with the others, rather than to its operators' times."""
    smallest_bytes: int | None
    """The smallest budget that a planned step keeps; ``None`` where the step cannot be planned as one graph."""
    notes: tuple[str, ...]
    """Whatever else was noticed."""
    best_name: str | None
    """Of the option to take; ``None`` where none keeps the budget."""

    @property
    def best(self) -> Option:
        """The option to take. Raises ``ValueError`` where none keeps the budget, saying what each would need."""
        for option in self.options:
            if option.name == self.best_name:
                return option
        reasons = "; ".join(f"{one.name}: {one.reason}" for one in self.options)
        least = "" if self.smallest_bytes is None else f" {self._least()}"
        raise ValueError(f"nothing trains this step within {_shown(self.budget_bytes)}. {reasons}.{least}")

    def explain(self) -> str:
        """The options as a table, why some are refused, what was noticed, and the best one's code."""
        lines = [f"budget {_shown(self.budget_bytes)}, plain PyTorch's peak {_shown(self.plain_peak_bytes)}"]
        width, reasons = max(len(one.name) for one in self.options), dict[str, list[str]]()
        for one in self.options:
            mark = "*" if one.name == self.best_name else " "
            peak = "unknown" if one.peak_bytes is None else format_bytes(one.peak_bytes)
            ratio = "unknown" if one.ratio is None else f"{one.ratio:.2f}"
            how = "measured" if one.is_measured else "predicted"
            outcome = "refused" if one.is_refused else how
            lines.append(f"{mark} {one.name:<{width}}  peak {peak:>10}  step {ratio:>7} of plain  {outcome}")
            if one.is_refused:
                reasons.setdefault(one.reason, []).append(one.name)
        if not self.plain_is_measured:
            lines.append("plain PyTorch did not run: ratios are to the times of its operators, one by one")
        lines += [f"{', '.join(names)} refused: {reason}" for reason, names in reasons.items()]
        lines += self.notes
        if self.best_name is not None:
            lines += ["", self.best.code]
        elif self.smallest_bytes is not None:
            lines += ["", f"Nothing trains this step within {_shown(self.budget_bytes)}. {self._least()}"]
        return "\n".join(lines)

    def _least(self) -> str:
        assert self.smallest_bytes is not None
        least_bytes = self.smallest_bytes
        return f"The smallest budget that a plan keeps is {least_bytes} bytes ({format_bytes(least_bytes)})."


def _shown(size_bytes: int | None) -> str:
    return "none" if size_bytes is None else format_bytes(size_bytes)
