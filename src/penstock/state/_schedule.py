"""A plan of a step: its copies, what is given back when, and what each of them waits for.

Copies in get memory of their own: their lane's. The host gives memory back in the order of the plan, and hands it out
again in that order, while the device may be a whole step behind. So a copy in waits for the last use of everything that
was given back before it was issued, whichever of these ranges it gets. Within a lane everything runs in order, so the
latest operator and the latest copy out are enough. No addresses are planned: in a model of an H100, steps with planned
addresses were 2 to 4% longer, since gaps between pages took memory, and planning took 5 to 10 times as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.state._problem import StateProblem

NEVER = -(2**62)
"""The number that an operator or copy waits for that waits for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """A copy of a page, and what it waits for. Numbers below 0 are of the step before: -1 was its last."""

    page: int
    """Index of the page."""
    use: int
    """Number of the page's use that it comes in for, or after which it leaves."""
    position: int
    """A copy in is issued before the operator at this position, a copy out after it."""
    operator: int = NEVER
    """The operator that it waits for: the last one on memory that was given back, or for a copy out on its page."""
    out: int = NEVER
    """(Of a copy in) the copy out that it waits for: the last one from such memory, or of its own page."""
    update: int = NEVER
    """(Of a copy in) the host update that it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """The end of a page's time on the device, after its copy out has been issued, or without one."""

    page: int
    """Index of the page."""
    use: int
    """Number of the page's last use before it."""
    position: int
    """Position of the operator before which its memory is given back."""
    out: int = NEVER
    """Number of its copy out, below 0 if that is of the step before; `NEVER` if nothing has to be copied."""
    dies: bool = False
    """Whether the page does not exist any more, so that nothing has to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """All copies of a step, with their places and waits. It is frozen before the step begins."""

    kept: tuple[tuple[bool, ...], ...]
    """For each page and use, whether the page stays until its next use."""
    copies_in: tuple[PageCopy, ...]
    """In the order in which they are issued, which is the order of their lane."""
    copies_out: tuple[PageCopy, ...]
    """In the order in which they are issued, which is the order of their lane."""
    give_backs: tuple[GiveBack, ...]
    """In the order of their positions. At one position they come before copies in."""
    needs_in: tuple[int, ...]
    """For each operator, the copy in that it waits for. It may have been issued in the step before: below 0."""
    needs_out: tuple[int, ...]
    """For each operator, the copy out that it waits for, since its results may get that memory."""

    def in_bytes(self, problem: StateProblem) -> int:
        """Return the bytes that a step copies in."""
        return sum(problem.pages[copy.page].size_bytes for copy in self.copies_in)

    def out_bytes(self, problem: StateProblem) -> int:
        """Return the bytes that a step copies out."""
        return sum(problem.pages[copy.page].size_bytes for copy in self.copies_out)


Arrival = tuple[int, int, int, int]
"""A copy in: the position at which it is issued (below 0 in the step before), that of its use, its page, the use."""
Departure = tuple[int, int, int, int]
"""A copy out: the position after which it is issued, that before which its memory is given back (which may lie in the
next step), its page, the number of the use.
"""


def with_waits(
    problem: StateProblem, kept: Sequence[Sequence[bool]], arrivals: Sequence[Arrival], departures: Sequence[Departure]
) -> StatePlan:
    """Return the plan with what every copy and operator waits for."""
    size = problem.num_operators
    outs = sorted(departures, key=lambda departure: (departure[0], departure[2:]))
    ins = sorted(arrivals, key=lambda arrival: (arrival[0] % size, arrival[0] < 0))
    give_backs = _give_backs(problem, kept, outs)
    copies_in, needs_in = _copies_in(problem, kept, ins, outs, give_backs)
    return StatePlan(
        kept=tuple([tuple(flags) for flags in kept]),
        copies_in=copies_in,
        copies_out=tuple(
            [PageCopy(page=page, use=use, position=position, operator=position) for position, _, page, use in outs]
        ),
        give_backs=give_backs,
        needs_in=needs_in,
        needs_out=_needs_out(problem, kept, give_backs),
    )


def _give_backs(
    problem: StateProblem, kept: Sequence[Sequence[bool]], outs: Sequence[Departure]
) -> tuple[GiveBack, ...]:
    size = problem.num_operators
    left = {(page, use): (number, back) for number, (_, back, page, use) in enumerate(outs)}
    give_backs = []
    for index, page in enumerate(problem.pages):
        for use, position in enumerate(page.uses):
            if kept[index][use]:
                continue
            number, back = left.get((index, use), (NEVER, position % size + 1))
            steps, place = divmod(back, size)
            out = number - steps * len(outs) if number != NEVER else NEVER
            dies = page.is_born and use == len(page.uses) - 1 and number == NEVER
            give_backs.append(GiveBack(page=index, use=use, position=place, out=out, dies=dies))
    return tuple(sorted(give_backs, key=lambda give: (give.position, give.out, give.page)))


def _copies_in(
    problem: StateProblem,
    kept: Sequence[Sequence[bool]],
    ins: Sequence[Arrival],
    outs: Sequence[Departure],
    give_backs: Sequence[GiveBack],
) -> tuple[tuple[PageCopy, ...], tuple[int, ...]]:
    size, num_ins, num_outs, num_updates = problem.num_operators, len(ins), len(outs), len(problem.updates)
    updates = {update.writes: number for number, update in enumerate(problem.updates)}
    lanes = [give for give in give_backs if problem.is_one_memory or not _is_of_operators(problem, kept, give)]
    positions = np.array([give.position for give in lanes])
    operators = np.maximum.accumulate([give.position - 1 if give.out == NEVER else NEVER for give in lanes] or [NEVER])
    latest = np.maximum.accumulate([give.out for give in lanes] or [NEVER])
    own: dict[int, list[tuple[int, int]]] = {}
    for number, (_, back, page, _) in enumerate(outs):
        own.setdefault(page, []).append((back % size, number - num_outs * (back // size)))
    copies: list[PageCopy] = []
    needs_in = [NEVER] * size
    for number, (issued, used, page, use) in enumerate(ins):
        position, is_for_next = issued % size, issued < 0
        before = int(np.searchsorted(positions, position, side="right")) - 1
        operator, out = int(operators[-1]) - size, int(latest[-1]) - num_outs  # from the end of the step before
        if before >= 0:
            operator, out = max(operator, int(operators[before])), max(out, int(latest[before]))
        if problem.is_one_memory:
            operator = position - 1  # the host begins it, and is where the device is
        mine = [other - num_outs * (back > position) for back, other in own.get(page, ())]
        update = updates[page] - num_updates * (not is_for_next) if page in updates else NEVER
        out = max([out, *mine])
        copies.append(PageCopy(page=page, use=use, position=position, operator=operator, out=out, update=update))
        needs_in[used] = max(needs_in[used], number - num_ins * is_for_next)
    return tuple(copies), tuple(needs_in)


def _needs_out(
    problem: StateProblem, kept: Sequence[Sequence[bool]], give_backs: Sequence[GiveBack]
) -> tuple[int, ...]:
    """Return the copies out that operators wait for: those from memory that operators' results may get."""
    needs_out = [NEVER] * problem.num_operators
    for give in give_backs:
        if give.out != NEVER and (problem.is_one_memory or _is_of_operators(problem, kept, give)):
            needs_out[give.position] = max(needs_out[give.position], give.out)
    return tuple(needs_out)


def _is_of_operators(problem: StateProblem, kept: Sequence[Sequence[bool]], give: GiveBack) -> bool:
    """Whether an operator allocated the memory: that of a born page until it leaves for the first time."""
    return problem.pages[give.page].is_born and all(kept[give.page][: give.use])
