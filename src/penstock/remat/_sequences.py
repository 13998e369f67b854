"""The known sequences of graphs that steps call, with the plan of each graph."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.remat._decision import Decision
from penstock.remat._explain import Planned
from penstock.remat._piece import Variant
from penstock.remat._plan import RematPlan

_MAX_SEQUENCES = 64
"""Limit of sequences; the one that was remembered first is forgotten."""

Key = tuple[int, ...]
"""Identities of a sequence's variants."""


@dataclass(slots=True)
class Known:
    """Graphs that a step calls one after the other, and the plan of each."""

    variants: tuple[Variant, ...]
    plans: tuple[RematPlan, ...]
    planned: Planned | None
    """``None`` if they do not fit the budget, and take as little as they can."""
    standing_bytes: int
    """Bytes that stood beside the step when it was planned."""
    limit_bytes: int | None
    """The bytes that the process was to hold at most; ``None`` if there is no such number."""
    is_provisional: bool
    """Whether it takes as little as it can until the state of an optimizer is known."""


class Sequences:
    """The known sequences, the latest last."""

    def __init__(self) -> None:
        self._known: dict[Key, Known] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._known)

    def all(self) -> list[Known]:
        """Return all of them."""
        return list(self._known.values())

    def has(self, variants: Sequence[Variant]) -> bool:
        """Whether exactly these graphs are a sequence."""
        return tuple(map(id, variants)) in self._known

    def remember(self, known: Known) -> list[Key]:
        """Add a sequence. Return the keys of those that are forgotten for it."""
        self._known[tuple(map(id, known.variants))] = known
        forgotten = list(self._known)[:-_MAX_SEQUENCES]
        for oldest in forgotten:
            del self._known[oldest]
        return forgotten

    def forget(self, variant: Variant | None = None) -> None:
        """Forget the sequences with a graph, or all."""
        kept = {
            key: known for key, known in self._known.items() if variant is not None and variant not in known.variants
        }
        self._known = kept

    def longest(self, variants: Sequence[Variant], used: Sequence[RematPlan]) -> Known | None:
        """Return the longest that begins with ``variants``, called with the plans ``used`` except for the last."""
        so_far = list(map(id, variants))
        fitting = [
            known
            for key, known in self._known.items()
            if list(key[: len(so_far)]) == so_far and list(known.plans[: len(used)]) == used
        ]
        return max(fitting, key=lambda known: len(known.variants), default=None)

    def alike(self, variants: Sequence[Variant]) -> list[Known]:
        """Return the sequences of the same graphs for other arguments, the latest first."""
        does = [variant.piece.does for variant in variants]
        return [
            known
            for known in reversed(self._known.values())
            if [variant.piece.does for variant in known.variants] == does
        ]

    def of_larger(self, variants: Sequence[Variant], used: Sequence[RematPlan]) -> list[Known]:
        """Return sequences of graphs like ``variants``, none smaller, that begin with the plans ``used``.

        A short last batch is the first step of its kind, and so is one of a size that Dynamo has meanwhile made a
        symbol. If the step continues like such a sequence, it takes no more memory. The longest sequences come first.
        """
        so_far = [plan.decisions for plan in used]
        fitting = [
            known
            for known in reversed(self._known.values())
            if len(known.variants) >= len(variants)
            and [plan.decisions for plan in known.plans[: len(used)]] == so_far
            and all(_is_within(variant, larger) for variant, larger in zip(variants, known.variants, strict=False))
            and not any(plan.gone_slots for plan in known.plans)
        ]
        return sorted(fitting, key=lambda known: -len(known.variants))


def joined(plans: Sequence[RematPlan]) -> list[Decision]:
    """Return the decisions of the whole, from those of its graphs."""
    return list(itertools.chain.from_iterable(plan.decisions for plan in plans))


def _is_within(variant: Variant, larger: Variant) -> bool:
    """Whether both have the same operators on the same storages, none of which is smaller in ``other``."""
    if variant is larger:
        return True
    problem, bound = variant.problem, larger.problem
    return (
        problem is not None
        and bound is not None
        and (problem.num_forward, len(problem.operators)) == (bound.num_forward, len(bound.operators))
        and len(problem.storages) == len(bound.storages)
        and all(
            (mine.target, mine.inputs, mine.outputs) == (theirs.target, theirs.inputs, theirs.outputs)
            and mine.workspace_bytes <= theirs.workspace_bytes
            for mine, theirs in zip(problem.operators, bound.operators, strict=True)
        )
        and all(
            (mine.producer, mine.is_output) == (theirs.producer, theirs.is_output)
            and mine.size_bytes <= theirs.size_bytes
            for mine, theirs in zip(problem.storages, bound.storages, strict=True)
        )
    )
