"""Which steps are still to be measured, and what measuring has shown."""

from collections.abc import Iterable

from penstock.remat._sequences import Key

_MAX_EXCEEDED = 4
"""Limit of measured steps of a sequence that exceed the budget one after the other, each of which is planned again."""
_MAX_TRIED, _MAX_MISSED = 16, 3
_NUM_DUE = 4
"""Calls that are looked at from 1, 2, 4, 8, ... on: a step may have several, each of another kind."""


def is_due(num_calls: int) -> bool:
    """Whether the memory of a call is looked at, which is its number: at 1, 2, 4, 8, ... and shortly after.

    What a training holds changes as long as it runs, and measuring takes as long as a small step.
    """
    return num_calls - (1 << (num_calls.bit_length() - 1)) < _NUM_DUE


def is_first_due(num_calls: int) -> bool:
    """Whether a call is the first of such a round, after rounds with enough calls."""
    return num_calls > _NUM_DUE and num_calls.bit_count() == 1


class Measured:
    """A count of the steps that were measured, by sequence."""

    def __init__(self) -> None:
        self._tries_left, self._num_missed = _MAX_TRIED, 0
        """Number of steps that may still be measured, and number that could not be."""
        self._nums: dict[Key, int] = {}
        """How often steps of each sequence have exceeded the budget since one kept it; 0 if the last one did."""

    def goes_on(self, num_calls: int) -> bool:
        """Whether the step of a call is measured."""
        return self._tries_left > 0 or is_due(num_calls)

    def missed(self) -> bool:
        """Note a step that could not be measured; return whether it is time to say so."""
        self._num_missed += 1
        return self._num_missed == _MAX_MISSED

    def tried(self) -> None:
        """Note a step that was measured."""
        self._tries_left -= 1

    def planned(self, forgotten: Iterable[Key], *, is_new: bool) -> None:
        """Note that a sequence was planned, and that others were forgotten for it."""
        if is_new:
            self._tries_left = min(_MAX_TRIED, self._tries_left + _MAX_EXCEEDED)
        for key in forgotten:
            self._nums.pop(key, None)

    def keeps(self, key: Key, known: Iterable[Key]) -> None:
        """Note that a step of this sequence kept the budget. If all ``known`` ones do, only a few are measured."""
        self._nums[key] = 0
        if not any(self._nums.get(sequence, 1) for sequence in known):
            self._tries_left = 0

    def exceeds(self, key: Key) -> bool:
        """Note that a step of this sequence exceeded the budget; return whether to plan it again."""
        self._nums[key] = self._nums.get(key, 0) + 1
        return self._nums[key] < _MAX_EXCEEDED
