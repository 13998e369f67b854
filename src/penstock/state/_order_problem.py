"""The problem that a planner solves, from the recorded order of a step.

A page stands from step to step, or it begins in a step. What begins and is away long enough for a copy out and back may
leave; anything else that begins is counted with operators' results, until it dies. A cast of a weight is emptied and
made again from the weight, so its uses after a pause are uses of the weight.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.state._order import Details, StepOrder
from penstock.state._problem import HostUpdate, Rates, StateProblem, StepPage

_LONG = 0.25
"""The share of a step above which a page that nobody uses again leaves for good until it dies."""


@dataclass(frozen=True, slots=True)
class OrderedProblem:
    """A problem whose pages have the keys of an order."""

    problem: StateProblem
    """The step to be planned."""
    keys: tuple[int, ...]
    """The key of each of its pages."""
    emptied: dict[int, list[int]]
    """For each operator, keys of casts that are emptied without a copy before it."""
    dead: dict[int, list[int]]
    """For each operator, keys of other pages that are usually dead before it, and that stay until then."""
    gone: dict[int, list[int]]
    """For each operator, keys of pages that are usually dead before it, and that left earlier or have no bytes."""


def problem_of(order: StepOrder, budget_bytes: int, rates: Rates, *, is_one_memory: bool) -> OrderedProblem | None:
    """Return the problem of repeating a step; ``None`` if too little was recorded."""
    details = order.details
    size = len(order.needs)
    if (
        details is None
        or not size
        or not len(details.seconds) == len(details.writes) == size == len(order.others_bytes)
    ):
        return None
    if not _are_plain(order, details):
        return None
    ordered = _problem(order, details, budget_bytes, rates, is_one_memory=is_one_memory, is_scarce=False)
    if _least_bytes(ordered.problem) > budget_bytes:
        ordered = _problem(order, details, budget_bytes, rates, is_one_memory=is_one_memory, is_scarce=True)
    return ordered


def _least_bytes(problem: StateProblem) -> int:
    """Return the bytes that a step takes in which everything leaves that may."""
    needed = list(problem.taken_bytes)
    for page in problem.pages:
        for position in {use % problem.num_operators for use in page.uses}:
            needed[position] += page.size_bytes
    return max(needed)


def _problem(
    order: StepOrder, details: Details, budget_bytes: int, rates: Rates, *, is_one_memory: bool, is_scarce: bool
) -> OrderedProblem:
    """``is_scarce``: whether something has to leave even if its copies take longer than its pause."""
    size = len(order.needs)
    steps = _Uses(order, details, rates, is_scarce=is_scarce)
    pages, keys = [], []
    dead: dict[int, list[int]] = {}
    gone: dict[int, list[int]] = {}
    pool = _Pool(order.others_bytes)
    for key in sorted({key for needed in order.needs for key in needed} | details.born_bytes.keys()):
        if key in details.made_of:
            steps.add_made(key, pool)
            continue
        if key in details.hollow:  # first, since its parts live as long
            gone.setdefault((steps.life(key)[1] + 1) % size, []).insert(0, key)
            continue
        page = steps.born(key) if key in order.begun else steps.standing(key)
        if page is None:
            birth, death = steps.life(key)
            pool.add(birth, death, details.born_bytes.get(key, 0))
            dead.setdefault((death + 1) % size, []).append(key)
        else:
            pages.append(page)
            keys.append(key)
            if page.leaves:
                gone.setdefault((steps.life(key)[1] + 1) % size, []).append(key)
    return OrderedProblem(
        problem=StateProblem(
            seconds=tuple(details.seconds),
            pool_bytes=pool.smeared(),
            pages=tuple(pages),
            updates=(*_updates(details, pages, keys, size),),
            budget_bytes=budget_bytes,
            rates=rates,
            is_one_memory=is_one_memory,
        ),
        keys=tuple(keys),
        emptied=steps.emptied,
        dead=dead,
        gone=gone,
    )


def _are_plain(order: StepOrder, details: Details) -> bool:
    """Whether the host reads only what began in the step, and writes only what stands and what nobody else writes, nor
    uses later in the step.
    """
    asked = {key: update.after for update in details.updates for key in update.writes}
    if any(place > asked.get(key, place) for place, needed in enumerate(order.needs) for key in needed):
        return False
    read = {key for update in details.updates for key in update.reads}
    written = {key for update in details.updates for key in update.writes}
    changed = {
        key
        for needed, writes in zip(order.needs, details.writes, strict=True)
        for key, is_written in zip(needed, writes, strict=True)
        if is_written
    }
    put_together = details.hollow | details.made_of.keys()
    return read <= order.begun.keys() - put_together and not written & (order.begun.keys() | changed)


def _updates(details: Details, pages: Sequence[StepPage], keys: Sequence[int], size: int) -> Iterator[HostUpdate]:
    """Yield the updates on the host. Each begins when the page that it reads has left that is used last."""
    index_of = {key: index for index, key in enumerate(keys)}
    for update in details.updates:
        reads = max((index_of[key] for key in update.reads if key in index_of), key=lambda index: pages[index].uses[-1])
        size_bytes = update.size_bytes
        for write in [index_of[key] for key in update.writes if key in index_of] or [-1]:
            yield HostUpdate(reads=reads, writes=write, size_bytes=size_bytes, after=min(update.after, size - 1))
            size_bytes = 0  # a further page comes in after the same update


class _Pool:
    """Bytes of the pool by position of a step that repeats."""

    def __init__(self, others_bytes: Sequence[int]):
        self.bytes = list(others_bytes)

    def add(self, first: int, last: int, size_bytes: int) -> None:
        """Add bytes from ``first`` to ``last``, which may lie in the next step."""
        size = len(self.bytes)
        for position in range(first, min(last, first + size - 1) + 1):
            self.bytes[position % size] += size_bytes

    def smeared(self) -> tuple[int, ...]:
        """Return the most at each position and the one before, whose bytes are still there while views are made."""
        return tuple([max(pair) for pair in zip(self.bytes, [self.bytes[-1], *self.bytes[:-1]], strict=True)])


class _Uses:
    """The uses of each page of an order."""

    def __init__(self, order: StepOrder, details: Details, rates: Rates, *, is_scarce: bool):
        self._is_scarce = is_scarce
        self._order, self._details, self._rates = order, details, rates
        self._size = len(order.needs)
        self._uses: dict[int, dict[int, bool]] = {}
        self._sizes: dict[int, int] = dict(details.born_bytes)
        self._read_on_host = {key for update in details.updates for key in update.reads}
        self._written_on_host = {key for update in details.updates for key in update.writes}
        self._passed_s = [0.0]
        self.emptied: dict[int, list[int]] = {}
        for seconds in details.seconds:
            self._passed_s.append(self._passed_s[-1] + seconds)
        for position, (needed, sizes, writes) in enumerate(zip(order.needs, order.sizes, details.writes, strict=True)):
            for key, size_bytes, is_written in zip(needed, sizes, writes, strict=True):
                self._sizes[key] = max(size_bytes, self._sizes.get(key, 0))
                self._use(key, position, is_written=is_written)
        self._use_what_is_made_of()

    def _use(self, key: int, position: int, *, is_written: bool) -> None:
        uses = self._uses.setdefault(key, {})
        uses[position] = uses.get(position, False) or is_written

    def standing(self, key: int) -> StepPage:
        """Return a page that stands from step to step."""
        uses = self._uses[key]
        positions = tuple(sorted(uses))
        return StepPage(
            name=str(key),
            size_bytes=self._sizes[key],
            uses=positions,
            writes=tuple([uses[position] for position in positions]),
            is_from_host=key in self._written_on_host,
        )

    def life(self, key: int) -> tuple[int, int]:
        """Return where a page begins, and the last operator before it dies, which may be in the next step."""
        birth = max(self._order.begun[key] - 1, 0)
        uses = self._in_order(key, birth)
        last = uses[-1][0] if uses else birth
        death = self._details.died.get(key)
        if death is None:
            return birth, birth + self._size - 1 if uses and last >= self._size else max(last, self._size - 1)
        return birth, max(last, death if death >= birth else death + self._size)

    def born(self, key: int) -> StepPage | None:
        """Return a page that begins in the step; ``None`` if it is not worth to let it leave."""
        birth, death = self.life(key)
        uses = [
            (birth, True),
            *((place, is_written) for place, is_written in self._in_order(key, birth) if place > birth),
        ]
        size_bytes = self._sizes[key]
        there_and_back_s = size_bytes / self._rates.both_in_bytes_per_s + size_bytes / self._rates.both_out_bytes_per_s
        there_and_back_s += 2 * self._rates.copy_s
        pauses = [self._between_s(before[0], after[0]) for before, after in itertools.pairwise(uses)]
        end_s = self._between_s(uses[-1][0], death)
        is_read = key in self._read_on_host
        leaves = is_read or end_s > max(there_and_back_s, _LONG * self._passed_s[-1])
        if max(pauses, default=0.0) <= there_and_back_s * (not self._is_scarce) and not leaves:
            return None
        if not leaves:
            uses.append((death + 1, False))  # a view, by which the next operator begins, may come before its death
        return StepPage(
            name=str(key),
            size_bytes=size_bytes,
            uses=tuple([place for place, _ in uses]),
            writes=tuple([is_written for _, is_written in uses]),
            is_born=True,
            leaves=leaves,
        )

    def _use_what_is_made_of(self) -> None:
        """Count the uses of a cast after a pause as uses of its weight, and those of a sum as uses of its parts."""
        for key, parts in self._details.made_of.items():
            for first, _ in self._spans(key)[key not in self._details.hollow :]:
                for part in parts:
                    self._use(part, first % self._size, is_written=False)

    def add_made(self, key: int, pool: _Pool) -> None:
        """Count what is made of others with the pool while it is in use, and let it be emptied afterwards."""
        is_hollow = key in self._details.hollow
        for number, (first, last) in enumerate(self._spans(key)):
            # it is made again for a view of it, before its use
            pool.add(first - (is_hollow or number > 0), last, self._sizes[key])
            self.emptied.setdefault((last + 1) % self._size, []).append(key)

    def _spans(self, key: int) -> list[tuple[int, int]]:
        """Return first and last positions of uses without a long pause. A cast is in use when it begins."""
        birth = max(self._order.begun.get(key, 1) - 1, 0)
        if key in self._details.hollow:
            places = [place for place, _ in self._in_order(key, birth)]
        else:
            places = sorted({birth, *(place for place in self._uses.get(key, ()) if place >= birth)})
        pause_s = self._sizes[key] / self._rates.in_bytes_per_s
        spans = [(places[0], places[0])]
        for place in places[1:]:
            if self._between_s(spans[-1][1], place) > pause_s:
                spans.append((place, place))
            else:
                spans[-1] = spans[-1][0], place
        return spans

    def _in_order(self, key: int, birth: int) -> list[tuple[int, bool]]:
        """Return the uses of a page that begins in the step: those before its birth are in the next step."""
        uses = sorted(self._uses.get(key, {}).items())
        index = bisect.bisect_left(uses, (birth, False))
        return [*uses[index:], *((place + self._size, is_written) for place, is_written in uses[:index])]

    def _between_s(self, first: int, last: int) -> float:
        """Return the seconds from the end of an operator to the start of another one."""
        size, passed = self._size, self._passed_s

        def at(position: int) -> float:
            steps, place = divmod(position, size)
            return steps * passed[-1] + passed[place]

        return max(0.0, at(last) - at(first + 1))
