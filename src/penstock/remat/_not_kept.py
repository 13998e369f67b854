"""Steps that do not keep their budget. Each way in which that happens is reported once, or raised."""

from collections.abc import Sequence

from penstock.errors import BudgetError, BudgetNotKeptWarning
from penstock.remat._warn import warn
from penstock.units import format_bytes

_GOES_ON = "Training continues above the budget."


class NotKept:
    """Warnings with `BudgetNotKeptWarning`, once for each way, or ``BudgetError`` if the user chose ``strict``."""

    def __init__(self, *, strict: bool):
        self._strict = strict
        self._said: set[str] = set()

    def first(self, peak_bytes: int, budget_bytes: int) -> None:
        """Report that a step whose graphs are not known yet takes too much."""
        self._say(
            "first",
            f"the first step of its kind takes {_exactly(peak_bytes)} or more, above the budget of "
            f"{_exactly(budget_bytes)}. Which graphs belong to it is known only after it has run, so in this step each "
            "graph saves as little as it can. From the next step on the graphs are planned together, and may fit",
        )

    def perhaps_first(self, peak_bytes: int, budget_bytes: int) -> None:
        """Report that such a step may have taken too much: an upper bound, known after it has run.

        It is no error even if ``strict``.
        """
        if not self._strict:
            self._say(
                "first",
                f"the first step of its kind may have taken up to {_exactly(peak_bytes)}, above the budget of "
                f"{_exactly(budget_bytes)}, because it was not known before which graphs belong to it. From now on its "
                "graphs are planned together",
            )

    def lowest(self, peak_bytes: int, budget_bytes: int) -> None:
        """Report that a step whose graphs are known takes too much."""
        self._say(
            "lowest",
            f"this step takes {_exactly(peak_bytes)} or more, above the budget of {_exactly(budget_bytes)}, although "
            f"its graphs take as little as they can. {_GOES_ON} Give budget={peak_bytes} or a smaller batch",
        )

    def together(self, error: BudgetError, breaks: Sequence[str], outside_bytes: int) -> None:
        """Report that a step's graphs, separated by ``breaks``, cannot be planned together with what is outside."""
        num_graphs = len(breaks)
        graphs = f"the {num_graphs} graphs of a step do" if num_graphs > 1 else "the graph of a step does"
        beside = (
            f" together with {format_bytes(outside_bytes)} that the step takes outside of them" if outside_bytes else ""
        )
        where = "; ".join(reason for reason in dict.fromkeys(breaks) if reason)
        broken = f" (it breaks at {where})" if where else ""
        self._say("lowest", f"{graphs} not fit{beside}{broken}: {error} {_GOES_ON}", error)

    def measured(self, peak_bytes: int, budget_bytes: int) -> None:
        """Report that a step took more than its plan, even after the plan had left room for the difference."""
        self._say(
            "measured",
            f"a step took {_exactly(peak_bytes)}, above the budget of {_exactly(budget_bytes)}: code outside of its "
            f"graphs, such as a loss or an eager part, needs the difference. {_GOES_ON}",
        )

    def eagerly(self, peak_bytes: int, budget_bytes: int) -> None:
        """Report that nothing of a step was compiled."""
        self._say(
            "eagerly",
            f"PyTorch cannot compile any part of this step, which took {_exactly(peak_bytes)}, above the budget of "
            f"{_exactly(budget_bytes)}; TORCH_LOGS=graph_breaks shows why. {_GOES_ON}",
        )

    def aside(self, peak_bytes: int, budget_bytes: int) -> None:
        """Report that the parameters of a compiled model were trained without a call of it."""
        self._say(
            "aside",
            f"a step took {_exactly(peak_bytes)}, above the budget of {_exactly(budget_bytes)}, and the compiled model "
            "was not called in it: only its own call is planned, and no other method, no part of it and not the "
            f"original. {_GOES_ON} Compile what you call: penstock.remat.compile(model.method, budget=...)",
        )

    def profiled(self, rest_bytes: int) -> None:
        """Report that the temporary memory of eager operators cannot be measured."""
        self._say(
            "profiled",
            f"the part of this step that runs eagerly saves {format_bytes(rest_bytes)}, which is counted. The "
            "temporary memory of its operators cannot be measured without a C compiler, so the budget may be "
            "exceeded: apt-get install gcc",
        )

    def under_transforms(self) -> None:
        """Report that what eager code saves cannot be counted."""
        self._say(
            "under transforms",
            "this step uses torch.func, which allows no hooks on saved tensors: what eager code saves cannot be "
            "counted, so the budget covers only the compiled graphs. Leave room for the rest",
        )

    def _say(self, way: str, text: str, error: BudgetError | None = None) -> None:
        if self._strict:
            raise error or BudgetError(text)
        if way not in self._said:
            self._said.add(way)
            warn(text, BudgetNotKeptWarning)


def _exactly(size_bytes: int) -> str:
    return f"{size_bytes:,} bytes ({format_bytes(size_bytes)})"
