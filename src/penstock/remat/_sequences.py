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


class Sequences:
    """The known sequences, the latest last."""

    def __init__(self) -> None:
        self._known: dict[Key, Known] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._known)

    def has(self, variants: Sequence[Variant]) -> bool:
        """Whether exactly these graphs are a sequence."""
        return tuple(map(id, variants)) in self._known

    def remember(self, made: Known) -> list[Key]:
        """Add a sequence. Return the keys of those that are forgotten for it."""
        self._known[tuple(map(id, made.variants))] = made
        forgotten = list(self._known)[:-_MAX_SEQUENCES]
        for oldest in forgotten:
            del self._known[oldest]
        return forgotten

    def forget(self, variant: Variant | None = None) -> None:
        """Forget the sequences with a graph, or all."""
        kept = {key: one for key, one in self._known.items() if variant is not None and variant not in one.variants}
        self._known = kept

    def longest(self, variants: Sequence[Variant], used: Sequence[RematPlan]) -> Known | None:
        """Return the longest that begins with ``variants``, called with the plans ``used`` except for the last."""
        so_far = list(map(id, variants))
        fitting = [
            one
            for key, one in self._known.items()
            if list(key[: len(so_far)]) == so_far and list(one.plans[: len(used)]) == used
        ]
        return max(fitting, key=lambda one: len(one.variants), default=None)

    def alike(self, variants: Sequence[Variant]) -> list[Known]:
        """Return the sequences of the same graphs for other arguments, the latest first."""
        does = [one.piece.does for one in variants]
        return [one for one in reversed(self._known.values()) if [two.piece.does for two in one.variants] == does]

    def of_larger(self, variants: Sequence[Variant], used: Sequence[RematPlan]) -> list[Known]:
        """Return sequences of graphs like ``variants``, none smaller, that begin with the plans ``used``.

        A short last batch is the first step of its kind, and so is one of a size that Dynamo has meanwhile made a
        symbol. If the step continues like such a sequence, it takes no more memory. The longest sequences come first.
        """
        so_far = [one.decisions for one in used]
        fitting = [
            known
            for known in reversed(self._known.values())
            if len(known.variants) >= len(variants)
            and [one.decisions for one in known.plans[: len(used)]] == so_far
            and all(_is_within(one, other) for one, other in zip(variants, known.variants, strict=False))
            and not any(one.gone_slots for one in known.plans)
        ]
        return sorted(fitting, key=lambda one: -len(one.variants))


def joined(plans: Sequence[RematPlan]) -> list[Decision]:
    """Return the decisions of the whole, from those of its graphs."""
    return list(itertools.chain.from_iterable(one.decisions for one in plans))


def _is_within(variant: Variant, other: Variant) -> bool:
    """Whether both have the same operators on the same storages, none of which is smaller in ``other``."""
    if variant is other:
        return True
    one, two = variant.problem, other.problem
    return (
        one is not None
        and two is not None
        and (one.num_forward, len(one.operators)) == (two.num_forward, len(two.operators))
        and len(one.storages) == len(two.storages)
        and all(
            (mine.target, mine.inputs, mine.outputs) == (others.target, others.inputs, others.outputs)
            and mine.workspace_bytes <= others.workspace_bytes
            for mine, others in zip(one.operators, two.operators, strict=True)
        )
        and all(
            (mine.producer, mine.is_output) == (others.producer, others.is_output)
            and mine.size_bytes <= others.size_bytes
            for mine, others in zip(one.storages, two.storages, strict=True)
        )
    )
