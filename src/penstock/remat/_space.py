"""The decisions that a planner may choose from, and the costs of each choice."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.remat._decision import Decision
from penstock.remat._problem import Method, RematProblem
from penstock.remat._simulate import FlatProblem, Simulation, simulate

MIN_SWAP_BYTES = 64 * 1024
"""Size below which storages are not worth a request."""
RECOMPUTE = [Decision.RECOMPUTE, Decision.RECOMPUTE_PER_GROUP, Decision.RECOMPUTE_PER_USE]
"""Ways to recompute, from most held and least computed to the reverse."""
Decisions = NDArray[np.uint8]
"""A ``Decision`` per storage."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Decisions and their costs."""

    decisions: Decisions
    """Decisions, one per storage of the problem."""
    peak_bytes: int
    """Peak without static bytes."""
    extra_s: float
    """Seconds beyond the plain step."""


class Tries:
    """A count of the simulations of a search, which bounds it."""

    def __init__(self) -> None:
        self.count = 0


@dataclass(frozen=True, slots=True)
class Space:
    """The choices for one problem: which storages may be recomputed, and which swapped. Nothing in it changes."""

    graph: FlatProblem
    """The problem as arrays."""
    allows_recompute: bool
    """Whether the method may recompute at all."""
    allows_swap: bool
    """Whether the method may swap at all, and there is a place to swap to."""
    may_recompute: NDArray[np.bool_]
    """Per storage, whether it may be recomputed."""
    may_swap: NDArray[np.bool_]
    """Per storage, whether it may be swapped."""
    is_needed: NDArray[np.bool_]
    """Per storage, whether it is made in forward and backward reads it."""

    @staticmethod
    def of(problem: RematProblem, method: Method) -> "Space":
        """Return the choices that ``method`` has."""
        graph = FlatProblem(problem)
        allows_recompute = method != "swap"
        allows_swap = method != "recompute" and problem.can_swap
        forward = graph.producers < problem.num_forward
        needed = np.array([bool(needs) for needs in graph.needs], dtype=bool)
        goes = ~graph.is_output.astype(bool)
        once = np.array(
            [bool(problem.operators[storage.producer].must_run_once) for storage in problem.storages], dtype=bool
        )
        moves = np.array([not storage.must_stay for storage in problem.storages], dtype=bool)
        return Space(
            graph,
            allows_recompute,
            allows_swap,
            may_recompute=forward & goes & ~once & allows_recompute,
            may_swap=forward & goes & moves & (graph.sizes >= MIN_SWAP_BYTES) & allows_swap,
            is_needed=forward & needed & goes,
        )

    def without_swaps(self) -> "Space":
        """Return the same choices, but nothing may be swapped."""
        return replace(self, may_swap=np.zeros_like(self.may_swap))

    def simulated(self, decisions: Decisions, tries: Tries | None = None) -> Simulation | None:
        """Play a step with these decisions; return ``None`` if they recompute endlessly."""
        if tries is not None:
            tries.count += 1
        return simulate(self.graph, decisions)

    def evaluated(self, decisions: Decisions, tries: Tries | None = None) -> Candidate | None:
        """Return the candidate with the costs of ``decisions``; ``None`` if they recompute endlessly."""
        simulation = self.simulated(decisions, tries)
        return None if simulation is None else Candidate(decisions, simulation.peak_bytes, simulation.extra_s)

    def allows(self, candidate: Candidate) -> bool:
        """Whether the candidate contains no decision that this problem forbids."""
        swapped = candidate.decisions == Decision.SWAP
        return bool((~recomputed(candidate.decisions) | self.may_recompute).all() and (~swapped | self.may_swap).all())

    def saved_bytes(self, candidate: Candidate) -> int:
        """Return the bytes that are held when backward begins."""
        simulation = self.simulated(candidate.decisions)
        assert simulation is not None
        num_forward = self.graph.num_forward
        return int(simulation.live_bytes[num_forward]) if num_forward < len(simulation.live_bytes) else 0

    def groups(self) -> Iterator[tuple[NDArray[np.int64], list[Decision]]]:
        """Yield, per forward operator, its storages that may be recomputed, or swapped if backward needs them.

        Each group comes with the decisions that all its storages may have.
        """
        swaps = self.may_swap & self.is_needed
        free = self.may_recompute | swaps
        for producer in np.unique(self.graph.producers[free]):
            group = np.flatnonzero(free & (self.graph.producers == producer))
            choices = [Decision.KEEP]
            choices += RECOMPUTE if self.may_recompute[group].all() else []
            choices += [Decision.SWAP] if swaps[group].all() else []
            yield group, choices


def recomputed(decisions: Decisions) -> NDArray[np.bool_]:
    """Return which storages are recomputed."""
    which: NDArray[np.bool_] = (decisions != Decision.KEEP) & (decisions != Decision.SWAP)
    return which
