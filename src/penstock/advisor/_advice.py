"""The result of `advise`: options with their costs, as a table and as code, and the choice between them."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.arguments import checked
from penstock.units import format_bytes

AS_FAST = 1.03
"""Factor within which options count as equally fast, since measurements are not more precise than that."""
_SIMPLEST = ("plain", "checkpoint", "offload", "remat", "training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to train the step."""

    name: str
    """Name of the option, such as ``"offload"`` or ``"checkpoint + offload"``."""
    rooms: tuple[str, ...]
    """Rooms that it uses; empty for plain PyTorch."""
    is_refused: bool
    """Whether it exceeds the budget or does not work with this model."""
    reason: str
    """The reason why it is refused; empty if it is not."""
    peak_bytes: int | None
    """True device peak of a training step, with gradients and optimizer state; ``None`` if not known."""
    ratio: float | None
    """Its step time divided by plain PyTorch's, for forward and backward; ``None`` if not known."""
    is_measured: bool
    """Whether peak and ratio were measured in trial steps, not predicted from the profile."""
    code: str
    """Python code to paste. It uses your ``model``, ``batches``, ``optimizer``, ``loss`` and a shared ``budget``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The options for a step under a budget: first those that keep it, fastest first."""

    options: tuple[Option, ...]
    """All options that were considered."""
    budget_bytes: int | None
    """The budget that was given; ``None`` if there is no limit."""
    plain_peak_bytes: int | None
    """Peak of plain PyTorch, if known."""
    plain_is_measured: bool
    """Whether ratios compare with plain steps that ran in the same rounds, not with the times of plain's operators."""
    smallest_bytes: int | None
    """The smallest budget that a planned step keeps; ``None`` if the step cannot be planned as one graph."""
    notes: tuple[str, ...]
    """Further remarks on the model and the batch."""
    best_name: str | None
    """Name of the best option; ``None`` if none keeps the budget."""

    @property
    def best(self) -> Option:
        """The best option. Raises ``ValueError`` if none keeps the budget, with what each would need."""
        for option in self.options:
            if option.name == self.best_name:
                return option
        reasons = "; ".join(f"{option.name}: {option.reason}" for option in self.options)
        least = "" if self.smallest_bytes is None else f" {self._least()}"
        raise ValueError(f"no option trains this step within {_shown(self.budget_bytes)}. {reasons}.{least}")

    def explain(self) -> str:
        """Return a table of the options, why some are refused, further remarks, and the code of the best option."""
        lines = [f"budget {_shown(self.budget_bytes)}, plain PyTorch's peak {_shown(self.plain_peak_bytes)}"]
        width, reasons = max(len(option.name) for option in self.options), dict[str, list[str]]()
        for option in self.options:
            mark = "*" if option.name == self.best_name else " "
            peak = "unknown" if option.peak_bytes is None else format_bytes(option.peak_bytes)
            ratio = "unknown" if option.ratio is None else f"{option.ratio:.2f}"
            how = "measured" if option.is_measured else "predicted"
            outcome = "refused" if option.is_refused else how
            lines.append(f"{mark} {option.name:<{width}}  peak {peak:>10}  step {ratio:>7} of plain  {outcome}")
            if option.is_refused:
                reasons.setdefault(option.reason, []).append(option.name)
        if not self.plain_is_measured:
            lines.append("plain PyTorch did not run: ratios are to the sum of its operators' times")
        lines += [f"{', '.join(names)} refused: {reason}" for reason, names in reasons.items()]
        lines += self.notes
        if self.best_name is not None:
            lines += ["", self.best.code]
        elif self.smallest_bytes is not None:
            lines += ["", f"No option trains this step within {_shown(self.budget_bytes)}. {self._least()}"]
        return "\n".join(lines)

    def _least(self) -> str:
        assert self.smallest_bytes is not None
        least_bytes = self.smallest_bytes
        return f"The smallest budget that a plan keeps is {least_bytes} bytes ({format_bytes(least_bytes)})."


def _shown(size_bytes: int | None) -> str:
    return "none" if size_bytes is None else format_bytes(size_bytes)


@checked("penstock.advisor.choose(advice.options)")
def choose(options: Sequence[Option]) -> Option | None:
    """Return the fastest option that is not refused; among equally fast ones the simplest, then the lowest peak.

    Options without a ratio come last. Returns ``None`` if all are refused.
    """
    taken = [option for option in options if not option.is_refused]
    if not taken:
        return None
    known = [option for option in taken if option.ratio is not None] or taken
    fastest = min(option.ratio or 0.0 for option in known)
    as_fast = [option for option in known if (option.ratio or 0.0) <= AS_FAST * fastest]
    return min(as_fast, key=_effort)


def _effort(option: Option) -> tuple[int, int]:
    rank = _SIMPLEST.index(option.name) if option.name in _SIMPLEST else len(_SIMPLEST)
    return rank, option.peak_bytes or 0
