"""Which steps are still to be measured, and what measuring has shown."""

from collections.abc import Iterable

from penstock.remat._sequences import Key

_MAX_MEASURED = 4
"""Limit of measured steps per sequence. Measuring ends earlier when a step keeps the budget."""
_MAX_TRIED, _MAX_MISSED = 16, 3


class Measured:
    """A count of the steps that were measured, by sequence."""

    def __init__(self) -> None:
        self._tries_left, self._num_missed = _MAX_TRIED, 0
        """Number of steps that may still be measured, and number that could not be."""
        self._nums: dict[Key, int] = {}
        """How often steps of each sequence were measured, until one kept the budget."""

    @property
    def may_go_on(self) -> bool:
        """Whether more steps may be measured."""
        return self._tries_left > 0

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
            self._tries_left = min(_MAX_TRIED, self._tries_left + _MAX_MEASURED)
        for key in forgotten:
            self._nums.pop(key, None)

    def keeps(self, key: Key, known: Iterable[Key]) -> None:
        """Note that a step of this sequence kept the budget. Measuring ends if all ``known`` ones do."""
        self._nums[key] = _MAX_MEASURED
        if all(self._nums.get(sequence, 0) >= _MAX_MEASURED for sequence in known):
            self._tries_left = 0

    def exceeds(self, key: Key) -> bool:
        """Note that a step of this sequence exceeded the budget; return whether to plan it again."""
        self._nums[key] = self._nums.get(key, 0) + 1
        return self._nums[key] < _MAX_MEASURED
