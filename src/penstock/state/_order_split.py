"""Which updates the host takes over from the device, from the recorded order of a step in which the device does all.

An update on the host spares the link the weight and the states, and takes time that the host must have before the next
forward reads the weight. Late layers have most of it: their gradients come first in backward, and forward reads them
last. So they go first, and how many is tried with a plan for each share. The order of such a step follows from the
recorded one: the update's operators are missing, the gradient leaves for good, and the weight comes in from the host,
under autocast as the cast that all its operators read.
"""

from collections.abc import Collection, Iterator

from penstock.errors import BudgetError
from penstock.state._order import Details, StepOrder, UpdateOnDevice, UpdateOnHost
from penstock.state._order_problem import OrderedProblem, problem_of
from penstock.state._problem import Rates, StateProblem
from penstock.state._split import best_share


def weights_for_host(order: StepOrder, budget_bytes: int, rates: Rates) -> frozenset[int]:
    """Return keys of the weights that are best updated on the host; none if that is not known to be faster."""

    def problems(share: float) -> Iterator[StateProblem]:
        ordered = problem_on_host(order, late_weights(order, share), budget_bytes, rates)
        if ordered is not None:
            yield ordered.problem

    try:
        share, _ = best_share(problems)
    except (BudgetError, ValueError):  # nothing fits, or nothing could be planned
        return frozenset()
    return late_weights(order, share)


def problem_on_host(
    order: StepOrder, weights: Collection[int], budget_bytes: int, rates: Rates
) -> OrderedProblem | None:
    """Return the problem of the step in which the host updates these weights, too."""
    return problem_of(updated_on_host(order, weights), budget_bytes, rates, is_one_memory=False)


def late_weights(order: StepOrder, share: float) -> frozenset[int]:
    """Return keys of the weights whose gradients are complete first, up to that share of the bytes of all of them."""
    updates = list(_movable(order))
    left_bytes = share * sum(update.weight_bytes for update in updates)
    chosen = set[int]()
    for update in sorted(updates, key=lambda update: _complete(order, update)):
        if left_bytes >= update.weight_bytes / 2:
            chosen.add(update.weight)
            left_bytes -= update.weight_bytes
    return frozenset(chosen)


def _movable(order: StepOrder) -> Iterator[UpdateOnDevice]:
    """Yield the updates of weights that are updated once, from a gradient that begins in the step."""
    assert order.details is not None
    times: dict[int, int] = {}
    for update in order.details.updates_on_device:
        times[update.weight] = times.get(update.weight, 0) + 1
    for update in order.details.updates_on_device:
        if times[update.weight] == 1 and update.gradient in order.begun and update.states:
            yield update


def _complete(order: StepOrder, update: UpdateOnDevice) -> int:
    """Return the position at which a gradient is used last before its update."""
    own = range(update.first, update.last + 1)
    uses = (place for place, needed in enumerate(order.needs) if update.gradient in needed and place not in own)
    return max(uses, default=order.begun[update.gradient])


def updated_on_host(order: StepOrder, weights: Collection[int]) -> StepOrder:
    """Return the order of the same step if the host updates these weights."""
    details = order.details
    assert details is not None
    updates = [update for update in _movable(order) if update.weight in weights]
    casts = {
        update.weight: [key for key, parts in details.made_of.items() if parts == (update.weight,)]
        for update in updates
    }
    twin_of = {cast: own[0] for own in casts.values() for cast in own}  # all casts of a weight are one page
    taken_away = _taken_away(order, updates, casts)
    halved = {update.gradient for update in updates if casts[update.weight]}
    needs: list[tuple[int, ...]] = []
    sizes: list[tuple[int, ...]] = []
    writes: list[tuple[bool, ...]] = []
    for place, (needed, size_bytes, written) in enumerate(zip(order.needs, order.sizes, details.writes, strict=True)):
        kept = [
            (twin_of.get(key, key), size // 2 if key in halved else size, is_written)
            for key, size, is_written in zip(needed, size_bytes, written, strict=True)
            if key not in taken_away.get(place, ())
        ]
        needs.append(tuple([key for key, _, _ in kept]))
        sizes.append(tuple([size for _, size, _ in kept]))
        writes.append(tuple([is_written for _, _, is_written in kept]))
    own = {place for update in updates for place in range(update.first, update.last + 1)}
    used = {key for needed in needs for key in needed}
    return StepOrder(
        needs=needs,
        sizes=sizes,
        begun={key: place for key, place in order.begun.items() if key not in twin_of},
        others_bytes=order.others_bytes,
        num_measured=order.num_measured,
        details=Details(
            writes=writes,
            born_bytes={
                key: size // 2 if key in halved else size
                for key, size in details.born_bytes.items()
                if key not in twin_of
            },
            died=details.died,
            made_of={key: parts for key, parts in details.made_of.items() if key not in twin_of},
            hollow=details.hollow,
            updates=[*details.updates, *(_on_host(order, update, casts[update.weight], used) for update in updates)],
            seconds=[0.0 if place in own else seconds for place, seconds in enumerate(details.seconds)],
        ),
    )


def _taken_away(
    order: StepOrder, updates: Collection[UpdateOnDevice], casts: dict[int, list[int]]
) -> dict[int, set[int]]:
    """Return for each position the keys of pages that nobody needs there any more."""
    taken_away: dict[int, set[int]] = {}
    for update in updates:
        for place in range(update.first, update.last + 1):
            taken_away.setdefault(place, set()).update((update.weight, update.gradient, *update.states))
        for cast in casts[update.weight]:
            taken_away.setdefault(max(order.begun.get(cast, 1) - 1, 0), set()).add(update.weight)
    return taken_away


def _on_host(order: StepOrder, update: UpdateOnDevice, casts: list[int], used: set[int]) -> UpdateOnHost:
    assert order.details is not None
    asked = max(order.details.put_off.get(update.weight, update.asked), _complete(order, update))
    writes = tuple([key for key in (*casts[:1], update.weight) if key in used])
    return UpdateOnHost(reads=(update.gradient,), writes=writes, size_bytes=update.host_bytes, after=asked)
