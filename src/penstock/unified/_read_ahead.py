"""Reading the pages of a mapped graph before a sampler touches them."""

import mmap
import resource

import torch

from penstock.storages import address
from penstock.unified._library import library

_FAULTY_SHARE = 1 / 64
"""Share of the places touched that had to be waited for, above which they are asked for in advance."""
_ABSENT_SHARE = 1 / 256
"""Share of those asked for, below which that is not worth its calls."""


class ReadAhead:
    """Asks the system for pages of a file, all of a hop at once, for as long as there are some that it does not have.

    A map whose pages are in the page cache is read as fast as memory, and asking costs more than that. So nothing is
    asked for until a sampler had to wait for the disk. ``is_told``: whether the system tells this process which pages
    it has; if it does not, all are asked for from then on.
    """

    def __init__(self, is_told: bool):
        self._is_told, self._is_wanted = is_told, False
        self._num_absent, self._faults = 0, _major_faults()

    def before(self, array: torch.Tensor, places: torch.Tensor) -> None:
        """Ask for the pages in which ``array[places]`` lies."""
        compiled = library("sampling")
        if not self._is_wanted or compiled is None:
            return
        self._num_absent += compiled.penstock_read_ahead(
            address(array), array.element_size(), address(places), len(places), mmap.PAGESIZE, self._is_told
        )

    def after(self, num_places: int) -> None:
        """Decide from this hop, which touched so many places, what is done in the next."""
        faults = _major_faults()
        if self._is_wanted:
            self._is_wanted = not self._is_told or self._num_absent >= _ABSENT_SHARE * num_places
        else:
            self._is_wanted = faults - self._faults > _FAULTY_SHARE * num_places
        self._num_absent, self._faults = 0, faults


def _major_faults() -> int:
    """Return how often this process has waited for the disk to give it a page."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
