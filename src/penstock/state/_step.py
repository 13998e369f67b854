"""The step of a training, put together from the record of one micro-batch and from where its updates run.

The order of uses decides what must be moved, and where updates run decides the order. In backward, a weight is on the
device when its gradient is. At `step()` or later, the gradient must stay or come back. On the host, neither weight nor
state ever comes in: the device reads only the weight's copy in the dtype of autocast.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.state._problem import HostUpdate, Rates, StateProblem, StepPage
from penstock.state._record import NOBODY, RecordedStorage, StepRecord

Place = Literal["backward", "step", "forward", "host"]
"""Where an update runs: in backward, at `step()`, just before the next forward reads the weight, on the host."""
_Key = tuple[str, int, int]
"""A page's kind, index of its storage or parameter in the record, and number of its slice, tensor or micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """The parts of a step, and the cost of its updates."""

    num_micro_batches: int = 1
    """Forward and backward passes for one update."""
    state_tensors: int = 2
    """Tensors of the parameter's size in the optimizer's state of each parameter."""
    device_bytes_per_s: float
    """Bytes of device memory per second that an update reads and writes."""
    device_passes: float = 7.0
    """Bytes of device memory that an update moves, as a multiple of its parameter's: Adam reads 4 and writes 3."""
    host_passes: float = 7.0
    """Bytes of host memory that an update on the host moves, as a multiple of its parameter's."""
    sum_passes: float = 2.0
    """Bytes of host memory that adding another micro-batch's gradient moves, as a multiple of its parameter's."""
    slice_bytes: int = 16 * 2**20
    """Bytes of a parameter that are updated at once."""
    min_page_bytes: int = 16 * 2**10
    """Parameters below that stay on the device, with their states."""
    min_saved_bytes: int = 4 * 2**20
    """Activations below that stay on the device."""
    reads_casts: bool = False
    """Whether weights that the device reads only as casts come in as casts, which each update writes anew: half of the
    bytes for every pass, and as many more for the update. That pays with several micro-batches.
    """
    waits_for_step: bool = False
    """Whether the host waits for `step()` before it updates: for clipping, or since the gradient may yet be changed."""


def can_be_on_host(record: StepRecord) -> frozenset[int]:
    """Return the parameters that the device reads only as casts, and more than once, so that the host can keep them."""
    num_casts: dict[int, int] = {}
    for storage in record.storages:
        if storage.cast_of != NOBODY:
            num_casts[storage.cast_of] = num_casts.get(storage.cast_of, 0) + 1
    return frozenset(
        index
        for index in record.parameters
        if num_casts.get(index, 0) > 1
        and all(record.names[position].startswith("aten._to_copy") for position in record.storages[index].uses)
    )


def plain_s(record: StepRecord, kind: StepKind) -> float:
    """Return the seconds of the step on a device that holds everything."""
    trained = {storage.gradient_of for storage in record.storages} - {NOBODY}
    updated_bytes = kind.device_passes * sum(record.storages[index].size_bytes for index in trained)
    return kind.num_micro_batches * sum(record.seconds) + updated_bytes / kind.device_bytes_per_s


def step_problem(
    record: StepRecord, kind: StepKind, places: Mapping[int, Place], rates: Rates, budget_bytes: int
) -> StateProblem:
    """Return the problem of a step whose updates run in ``places``, by index of the parameter in the record."""
    step = _StepBuilder(record, kind, places)
    for micro_batch in range(kind.num_micro_batches):
        step.add_pass(micro_batch)
    step.add_updates("step")
    pages, updates = step.pages()
    return StateProblem(
        seconds=tuple(step.seconds),
        pool_bytes=step.pool_bytes(),
        pages=pages,
        updates=updates,
        budget_bytes=budget_bytes,
        rates=rates,
    )


class _StepBuilder:
    """A step that is being put together. A position in the record is another one in the step."""

    def __init__(self, record: StepRecord, kind: StepKind, places: Mapping[int, Place]):
        self.seconds: list[float] = []
        self._record, self._kind = record, kind
        self._gradients = {storage.gradient_of: storage for storage in record.storages if storage.gradient_of != NOBODY}
        self._places: dict[int, Place] = {
            index: places.get(index, "step")
            for index in record.parameters
            if record.storages[index].size_bytes >= kind.min_page_bytes and index in self._gradients
        }
        self._frozen = {
            index
            for index in record.parameters
            if record.storages[index].size_bytes >= kind.min_page_bytes and index not in self._gradients
        }
        """Parameters without gradients, which are only read."""
        self._born: dict[int, int] = {}
        """Positions at which gradients are born, in the last micro-batch."""
        self._as_casts = can_be_on_host(record) if kind.reads_casts else frozenset()
        """Parameters on the device that are read as casts of a page of their own."""
        self._uses: dict[_Key, dict[int, bool]] = {}
        """For each page the positions of its uses, and whether they write."""
        self._held: list[tuple[int, int, int]] = []
        """Bytes of the pool, with the first and last position at which they are there."""

    # Operators

    def add_pass(self, micro_batch: int) -> None:
        """Add forward and backward of a micro-batch, with the updates that run there."""
        record = self._record
        is_last = micro_batch == self._kind.num_micro_batches - 1
        ready: dict[int, list[int]] = {}
        needed: dict[int, list[int]] = {}
        for parameter, place in self._places.items():
            ready.setdefault(self._gradients[parameter].uses[-1], []).append(parameter)
            if place == "forward" and micro_batch == 0:
                needed.setdefault(record.storages[parameter].uses[0], []).append(parameter)
        replaced = {storage.born for storage in record.storages if self._is_replaced(storage)}
        positions: list[int] = []
        for position, seconds in enumerate(record.seconds):
            for parameter in needed.get(position, ()):
                self._add_update(parameter)
            positions.append(self._add_operator(0.0 if position in replaced else seconds))
            for parameter in ready.get(position, ()):
                self._add_gradient(parameter, micro_batch, positions[self._gradients[parameter].born])
                if is_last and self._places[parameter] == "backward":
                    self._add_update(parameter)
        for index, storage in enumerate(record.storages):
            self._add_storage(index, storage, micro_batch, positions)

    def add_updates(self, place: Place) -> None:
        """Add the updates that run there, one after the other."""
        for parameter, where in self._places.items():
            if where == place:
                self._add_update(parameter)

    def _add_operator(self, seconds: float) -> int:
        self.seconds.append(seconds)
        return len(self.seconds) - 1

    def _add_gradient(self, parameter: int, micro_batch: int, born: int) -> None:
        """Add the use of a gradient that is a page: its birth, or a sum with what is there."""
        size_bytes = self._record.storages[parameter].size_bytes
        now, self._born[parameter] = len(self.seconds) - 1, born
        if self._places[parameter] == "host":
            self._use(("gradient", parameter, micro_batch), now, writes=True)
        elif self._is_summed(parameter) and micro_batch > 0:
            added = self._add_operator(3 * size_bytes / self._kind.device_bytes_per_s)
            self._use(("gradient", parameter, 0), added, writes=True)
            self._held.append((size_bytes, born, added))
        elif self._has_gradient_page(parameter):
            self._use(("gradient", parameter, 0), now, writes=True)

    def _add_update(self, parameter: int) -> None:
        """Add the update of a parameter on the device, slice by slice."""
        size_bytes = self._record.storages[parameter].size_bytes
        num_slices = self._num_slices(parameter)
        for number in range(num_slices):
            moved_bytes = self._kind.device_passes * size_bytes / num_slices
            position = self._add_operator(moved_bytes / self._kind.device_bytes_per_s)
            self._use(("weight", parameter, 0), position, writes=True)
            for tensor in range(self._kind.state_tensors):
                self._use(("state", parameter, number * self._kind.state_tensors + tensor), position, writes=True)
            if self._has_gradient_page(parameter):
                self._use(("gradient", parameter, 0), position, writes=False)
        if not self._has_gradient_page(parameter):
            gradient = self._gradients[parameter]
            self._held.append((gradient.size_bytes, self._born[parameter], len(self.seconds) - 1))
        if parameter in self._as_casts:
            position = self._add_operator(1.5 * size_bytes / self._kind.device_bytes_per_s)
            self._use(("weight", parameter, 0), position, writes=False)
            self._use(("cast", parameter, 0), position, writes=True)

    def _use(self, key: _Key, position: int, *, writes: bool) -> None:
        uses = self._uses.setdefault(key, {})
        uses[position] = uses.get(position, False) or writes

    # Storages of a micro-batch

    def _add_storage(self, index: int, storage: RecordedStorage, micro_batch: int, positions: list[int]) -> None:
        if index in self._frozen or index in self._places:
            is_read = index in self._frozen or (self._places[index] != "host" and index not in self._as_casts)
            if is_read:
                self._use_all(("weight", index, 0), storage, positions)
        elif self._is_replaced(storage):
            for position in storage.uses[1:] or storage.uses:
                self._use(("cast", storage.cast_of, 0), positions[position], writes=False)
        elif self._is_saved(storage):
            self._use_all(("saved", index, micro_batch), storage, positions)
            self._use(("saved", index, micro_batch), positions[storage.dies], writes=False)
        elif storage.gradient_of in self._places:
            return  # a page, or held until its update
        elif storage.born != NOBODY:
            dies = storage.uses[-1] if storage.cast_of != NOBODY else min(storage.dies, len(positions) - 1)
            self._held.append((storage.size_bytes, positions[storage.born], positions[dies]))
        elif micro_batch == 0:
            tensors = 2 + self._kind.state_tensors if index in self._gradients else 1
            self._held.append((tensors * storage.size_bytes, 0, -1))

    def _use_all(self, key: _Key, storage: RecordedStorage, positions: list[int]) -> None:
        for position, writes in zip(storage.uses, storage.writes, strict=True):
            self._use(key, positions[position], writes=writes)

    def _is_saved(self, storage: RecordedStorage) -> bool:
        """Whether these are activations that forward leaves to backward."""
        return (
            0 <= storage.born < self._record.backward <= storage.uses[-1] <= storage.dies < len(self._record.seconds)
            and storage.size_bytes >= self._kind.min_saved_bytes
            and storage.cast_of == NOBODY
        )

    def _is_replaced(self, storage: RecordedStorage) -> bool:
        """Whether this cast of a parameter is a page, which the host or the last update has written."""
        return self._places.get(storage.cast_of) == "host" or (
            storage.cast_of in self._as_casts and storage.cast_of in self._places
        )

    def _is_summed(self, parameter: int) -> bool:
        return self._kind.num_micro_batches > 1 and self._places[parameter] != "host"

    def _has_gradient_page(self, parameter: int) -> bool:
        """Whether the gradient leaves, or waits for other micro-batches or for its update."""
        return self._places[parameter] != "backward" or self._kind.num_micro_batches > 1

    def _num_slices(self, parameter: int) -> int:
        return max(1, round(self._record.storages[parameter].size_bytes / self._kind.slice_bytes))

    # Results

    def pool_bytes(self) -> tuple[int, ...]:
        """Return the bytes of the pool while each operator runs."""
        changes = [0] * (len(self.seconds) + 1)
        for size_bytes, first, last in self._held:
            changes[first] += size_bytes
            if last >= 0:
                changes[last + 1] -= size_bytes
        return (*itertools.accumulate(changes[:-1]),)

    def pages(self) -> tuple[tuple[StepPage, ...], tuple[HostUpdate, ...]]:
        """Return all pages, and what the host does with them."""
        keys = list(self._uses)
        numbers = {key: number for number, key in enumerate(keys)}
        after = len(self.seconds) - 1 if self._kind.waits_for_step else NOBODY
        updates = []
        for key in keys:
            kind, parameter, micro_batch = key
            if kind == "gradient" and self._places[parameter] == "host":
                is_last = micro_batch == self._kind.num_micro_batches - 1
                passes = (self._kind.sum_passes if micro_batch else 0) + (self._kind.host_passes if is_last else 0)
                updates.append(
                    HostUpdate(
                        reads=numbers[key],
                        writes=numbers["cast", parameter, 0] if is_last else NOBODY,
                        size_bytes=round(passes * self._record.storages[parameter].size_bytes),
                        after=after if is_last else NOBODY,
                    )
                )
        return tuple([self._page(key) for key in keys]), tuple(updates)

    def _page(self, key: _Key) -> StepPage:
        kind, index, number = key
        uses = self._uses[key]
        positions = sorted(uses)
        if kind == "gradient" and not uses[positions[0]]:  # the last step's, which dies in this one
            first = next(position for position in positions if uses[position])
            positions = sorted(positions, key=lambda position: (position < first, position))
        num_operators = len(self.seconds)
        in_place = [position + num_operators * (position < positions[0]) for position in positions]
        is_on_host = self._places.get(index) == "host"
        storage = self._record.storages[index]
        suffix = f"[{number}]" if kind == "state" else ""
        return StepPage(
            name=f"{kind} of {storage.name}{suffix}",
            size_bytes=self._size_of(kind, index),
            uses=tuple(in_place),
            writes=tuple([uses[position] for position in positions]),
            is_born=kind in ("saved", "gradient"),
            leaves=kind == "gradient" and is_on_host,
            is_from_host=kind == "cast" and is_on_host,
        )

    def _size_of(self, kind: str, index: int) -> int:
        size_bytes = self._record.storages[index].size_bytes
        if kind == "state":
            return -(-size_bytes // self._num_slices(index))
        if kind == "cast":
            return next(storage.size_bytes for storage in self._record.storages if storage.cast_of == index)
        if kind == "gradient" and not self._is_summed(index):
            return self._gradients[index].source_bytes or size_bytes
        return size_bytes
