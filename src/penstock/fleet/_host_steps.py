"""Optimizer steps of a fleet on the host: gradients go to host memory, weights come back, states stay there.

A group's first step runs on the device and makes the states. Later steps run in a thread, while the device computes
other shards. Whoever needs the weights waits for the step.
"""

import contextlib
import time

import torch

from penstock.devices import backend_of
from penstock.fleet._groups import Group
from penstock.fleet._halves import make_twin
from penstock.fleet._job import AUTOCAST_DTYPES
from penstock.fleet._memory import DeviceMemory, Item
from penstock.fleet._stepper import FIELD_OF
from penstock.fleet._training import JobTraining
from penstock.host_stepping import (
    FEWEST_TRIED,
    HostLane,
    HostStep,
    host_view,
    is_faster,
    is_number,
    may_step,
    seconds_per_element,
    settings_of,
    step_on_host,
)
from penstock.stepping import State
from penstock.tiers import Handle, HandleState, ViewLayout, gate

_POLL_S = 1e-4
_CALL = "Job(..., update='device')"


class HostSteps:
    """The host's steps for the jobs of one device, all called by the device's thread."""

    def __init__(self, memory: DeviceMemory):
        self.memory, self.lane = memory, HostLane(backend_of(memory.device).numa_node)
        self._waiting: list[GroupStep] = []
        """Steps whose copies out are under way."""
        self._queued: list[GroupStep] = []
        """Steps that the thread has, or has had."""

    def can_step(self, training: JobTraining, group: Group) -> bool:
        """Whether the host could step a group: its optimizer and what that keeps are such that a CPU can use them."""
        master = training.optimizer.master
        numbers = (training.states.numbers.get(name, {}) for name in group.layouts)
        return may_step(master) and all(is_number(value) for state in numbers for value in state.values())

    def takes(self, training: JobTraining, group: Group) -> bool:
        """Whether the host will step a group that it can step, as far as is known before it begins.

        The group was stepped before, so that its states exist, and not everything is on the device at this moment.
        """
        # A first step runs on the device, since only the optimizer knows which states it makes.
        if training.update != "host" or group.item is None:
            return False
        states, gradients = training.states.packed.get(group), training.open_step.gradients.get(group)
        items = _items(training, group)
        needed = () if gradients is None else gradients.places
        if training.states.stepped.isdisjoint(group.layouts) or not training.states.stepped.issuperset(needed):
            return False
        stays = states is not None or not group.item.has_copy_below
        if stays and all(item.storages is not None for item in items):
            return False  # nothing of it has to cross the link
        return all(map(_may_be_in_memory, items))

    def begin(self, training: JobTraining, group: Group, factor: torch.Tensor | None) -> bool:
        """Let a group's tensors, gradients and states leave the device, and step it when they have left.

        Returns whether it will be stepped here, for which all of them have to be in host memory. ``factor`` scales the
        gradients.
        """
        if not (self.takes(training, group) and self.can_step(training, group)):
            return False
        items = _items(training, group)
        for item in items:
            if item.storages is not None or any(
                handle is not None and handle.state is HandleState.ARRIVING for handle in item.handles or ()
            ):
                self.memory.evict(item)
        if not all(_may_be_in_memory(item) for item in items):
            return False
        if group.twin is None:
            self._make_twin(training, group)
        self._waiting.append(GroupStep(self, training, group, factor))
        del training.open_step.gradients[group]
        self.poll()
        return True

    def _make_twin(self, training: JobTraining, group: Group) -> None:
        dtype = AUTOCAST_DTYPES.get(training.job.precision)
        if dtype is None or len(group.shards) != 1:
            return
        casts = [
            name
            for name in group.layouts
            if training.weights.casts.get(name) and not _has_hooks(training.weights.parameters[name])
        ]
        if casts:
            make_twin(self.memory, training.job.name, group, casts, dtype)

    def poll(self) -> None:
        """Hand on steps whose tensors have left, and note those that have ended."""
        for step in [step for step in self._waiting if step.is_ready]:
            self._hand_over(step)
        for step in [step for step in self._queued if step.is_done and step.error is None]:
            self.end(step)

    def wait_for(self, step: "GroupStep") -> None:
        """Wait until a step has ended. Raise ``RuntimeError`` if its bytes could not be copied out."""
        while step in self._waiting:
            step.finish_out()
            self.memory.waterfall.reap()
            if step.is_ready:
                self._hand_over(step)
            else:
                time.sleep(_POLL_S)
        self.lane.hurry(step)
        step.wait()

    def end(self, step: "GroupStep") -> None:
        """Forget a step that has ended or cannot begin, and free its gradients."""
        for steps in (self._waiting, self._queued):
            if step in steps:
                steps.remove(step)
        step.close()
        self.memory.discard(step.gradients.item)

    def decide(self, training: JobTraining) -> None:
        """Choose the faster processor for a job with ``update="auto"``, once both have been measured."""
        out, back = self.memory.waterfall.rates_bytes_per_s()
        tried = _tried_state(training)
        if out is None or back is None or tried is None:
            return
        parameter, state = tried
        training.update = "device"
        with contextlib.suppress(Exception):  # an optimizer may raise anything if it does not work here
            if may_step(training.optimizer.master):
                with gate.computing():
                    seconds = seconds_per_element(training.optimizer.master, parameter, state)
                training.update = "host" if is_faster(seconds, parameter, state, (out, back)) else "device"

    def close(self) -> None:
        """End the thread."""
        self._waiting.clear()
        self.lane.close()

    def _hand_over(self, step: "GroupStep") -> None:
        self._waiting.remove(step)
        self._queued.append(step)
        step.begin()
        self.lane.put(step, is_first=True)  # backward ends with what the next forward needs first


class GroupStep(HostStep):
    """The step of one group in host memory."""

    def __init__(self, host: HostSteps, training: JobTraining, group: Group, factor: torch.Tensor | None):
        super().__init__()
        self._host, self._training, self._group, self._factor = host, training, group, factor
        self.gradients, self._states = training.open_step.gradients[group], training.states.packed.get(group)
        self._twin = group.twin
        self._items = _items(training, group)
        self._settings = settings_of(training.optimizer.master)
        self._numbers: dict[str, State] = {}
        """Per parameter, the entries of its state that are numbers and that the step has changed."""
        for item in self._items:
            item.pending = self

    @property
    def is_ready(self) -> bool:
        """Whether no copy reads or writes any of its bytes."""
        return all(handle.is_settled for handle in self._handles()) and not any(
            item.held_bytes() for item in self._items
        )

    def _handles(self) -> list[Handle]:
        return [handle for item in self._items for handle in item.handles or () if handle is not None]

    def begin(self) -> None:
        """Note that the host is about to write to its bytes."""
        for handle in self._handles():
            handle.before_host_write()

    def finish_out(self) -> None:
        """Wait for the copies out. Raise ``RuntimeError`` if one failed."""
        for item in self._items:
            for handle in item.handles or ():
                if handle is not None:
                    handle.finish_out()
                    if handle.state is HandleState.KEPT or not handle.is_in_memory:
                        raise RuntimeError(
                            f"{item.label} could not be copied to host memory, where the optimizer was to step it; "
                            "resume from the last checkpoint"
                        )

    def finish(self) -> None:
        """Wait for the step, because somebody needs its weights or states. Raise its error."""
        self._host.wait_for(self)
        if self.error is not None:
            raise self.error
        self._host.end(self)

    def abandon(self) -> None:
        """Wait until nothing works on its bytes any more; they are needed nowhere."""
        with contextlib.suppress(RuntimeError):
            self._host.wait_for(self)
        self._host.end(self)

    def close(self) -> None:
        """Keep the numbers that the step has changed, and let its tensors be used again."""
        for name, changed in self._numbers.items():
            self._training.states.numbers[name] |= changed
        for item in self._items:  # last, since another device may take the job from here on
            item.pending = None

    def compute(self) -> None:
        """Step the group, and write its twin."""
        with gate.computing(is_awaited=True):
            self._step()

    def _step(self) -> None:
        training, group = self._training, self._group
        assert group.item is not None
        states: dict[str, State] = {name: dict(training.states.numbers.get(name, {})) for name in group.layouts}
        if self._states is not None:
            for key, (index, layout) in self._states.places.items():
                name, _, field = key.rpartition(FIELD_OF)
                states[name][field] = _view(self._states.item, index, layout)
        weights = {name: _view(group.item, 0, layout) for name, layout in group.layouts.items()}
        for name, (index, layout) in self.gradients.places.items():
            gradient = _view(self.gradients.item, index, layout).to(weights[name].dtype)
            if self._factor is not None:
                gradient.mul_(self._factor)
            self._numbers[name] = step_on_host(
                training.optimizer.master,
                self._settings,
                training.weights.parameters[name],
                weights[name],
                gradient,
                states[name],
                _CALL,
            )
        if self._twin is not None:
            for name, layout in self._twin.layouts.items():
                _view(self._twin.item, 0, layout).copy_(weights[name])


def _items(training: JobTraining, group: Group) -> list[Item]:
    """Return the items of a group: its tensors, gradients, states and twin, as far as they exist."""
    parts = [training.open_step.gradients.get(group), training.states.packed.get(group), group.twin]
    return [item for item in (group.item, *(part.item for part in parts if part is not None)) if item is not None]


def _may_be_in_memory(item: Item) -> bool:
    """Whether all bytes of an item are in host memory, or on the device without a place in a tier."""
    handles = [handle for handle in item.handles or () if handle is not None]
    return all(handle.is_in_memory for handle in handles) and (bool(handles) or item.storages is not None)


def _tried_state(training: JobTraining) -> tuple[torch.Tensor, State] | None:
    """Return a parameter of moderate size that has a state, and that state with tensors without bytes."""
    states: dict[str, State] = {name: dict(training.states.numbers.get(name, {})) for name in training.states.stepped}
    for packed in training.states.packed.values():
        for key, (_, layout) in packed.places.items():
            name, _, field = key.rpartition(FIELD_OF)
            states[name][field] = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
    sizes = {name: training.weights.parameters[name].numel() for name in states}
    if not sizes:
        return None
    name = min(sizes, key=lambda candidate: (sizes[candidate] < FEWEST_TRIED, abs(sizes[candidate] - FEWEST_TRIED)))
    return training.weights.parameters[name], states[name]


def _has_hooks(parameter: torch.Tensor) -> bool:
    """Whether somebody wants to see the gradient of this very tensor."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _view(item: Item, index: int, layout: ViewLayout) -> torch.Tensor:
    assert item.handles is not None
    handle = item.handles[index]
    if handle is None:  # a storage without bytes
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype)
    return host_view(handle, layout.dtype, layout.shape, layout.stride, layout.storage_offset)
