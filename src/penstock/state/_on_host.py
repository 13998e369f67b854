"""Optimizer updates on the host, in host memory: the gradient goes there, the weight comes back, the states stay."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from penstock.devices import backend_of
from penstock.host_stepping import (
    FEWEST_TRIED,
    HostLane,
    HostStep,
    host_view,
    is_here,
    is_large,
    is_number,
    seconds_per_element,
    step_in_one_pass,
    step_on_host,
)
from penstock.state._casts import Casts, CastTwin
from penstock.state._deferred import Deferred
from penstock.state._page import Narrow, Page
from penstock.state._pages import Pages
from penstock.stepping import State
from penstock.tiers import Handle

_CALL = "training(..., update='device')"


class HostUpdates:
    """A thread that runs the updates of one optimizer, one after the other.

    The next forward needs weights in the order of the model. Backward completes gradients in the opposite order, so of
    the updates that come during backward the last one is done first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pages: Pages, casts: Casts, *, last_first: bool):
        self.optimizer, self.pages, self.casts = optimizer, pages, casts
        self._last_first = last_first
        self.lane = HostLane(backend_of(pages.device).numa_node)
        self.scratch = Scratch()
        self.failed = False
        """Whether an update began and did not finish."""
        self.updated_bytes = 0
        """Bytes of host memory that updates have read and written."""

    def begin(self, due: Deferred, *, is_stateless: bool) -> bool:
        """Let all pages of an update leave (weight, gradient, then states), and do the update when they have left.

        Nobody waits for that but the thread that updates. Returns whether it will be done here, for which all pages
        have to fit into host memory. If a copy fails later, ``due`` itself is called. ``is_stateless`` says that an
        earlier update has left no state; else an empty state means that this would be the first update.
        """
        if not (due.state or is_stateless) or not _is_plain(due.state, due.pages, due.settings):
            return False
        twins = self.casts.of(due.pages[0], due.parameter)
        self.casts.forget(due.pages[0], but=twins)
        narrow = due.pages[1].narrow
        weight, gradient, *states = due.pages
        parts = [gradient] if narrow is None else [page for _, page in narrow.parts]
        pages = [weight, *parts, *states, *(twin.page for twin in twins)]
        if not all(map(self.pages.course.may_leave, pages)):
            return False
        if any(page.handle is not None and not page.handle.is_in_memory for page in pages):
            return False  # part of it is on a disk, so letting the rest leave would gain nothing
        self.pages.keep_what_is_made_of(weight)
        for page in (*pages, gradient):
            self.pages.let_leave(page)
        if not all(page.handle is not None and page.handle.is_in_memory for page in pages):
            self.casts.forget(due.pages[0])  # there may have been no room for some of them
            return False
        update = Update(self, due, pages, narrow, twins)
        self.pages.course.updated_on_host([page.key for page in parts], update.written, update.size_bytes)
        try:
            self.lane.put(update, is_first=self._last_first)
        except RuntimeError:  # no memory for a thread's stack
            update.take_back()
            return False
        if self.lane.busy_s:
            self.pages.replay.host_bytes_per_s = self.updated_bytes / self.lane.busy_s
        return True

    def tried_bytes_per_s(self) -> float | None:
        """Return the rate at which an update reads and writes host memory, tried on zeros; 0 if it does not work here.

        ``None`` until the optimizer has states.
        """
        trained = [
            tensor for tensor, state in list(self.optimizer.state.items()) if tensor.is_floating_point() and state
        ]
        if not trained:
            return None
        parameter = min(trained, key=lambda tensor: (tensor.numel() < FEWEST_TRIED, abs(tensor.numel() - FEWEST_TRIED)))
        state = self.optimizer.state[parameter]
        large = [value for value in state.values() if is_large(value)]
        if not _is_plain(state, [None, None, *large], self.optimizer.param_groups):
            return 0.0
        try:
            seconds = seconds_per_element(self.optimizer, parameter, state)
        except Exception:  # an optimizer may raise anything if it does not work here
            return 0.0
        written: float = parameter.element_size() + sum(value.nbytes for value in large) / parameter.numel()
        return float(2 * written + parameter.element_size()) / seconds

    def close(self) -> None:
        """Wait for the updates in the queue, and end the thread. A later `begin` starts it again."""
        self.failed = False
        self.lane.close()
        self.scratch = Scratch()


class Update(HostStep):
    """The update of one parameter in host memory. It is wide because it keeps all that has to be as it was then."""

    def __init__(
        self, owner: HostUpdates, due: Deferred, pages: list[Page], narrow: Narrow | None, twins: Sequence[CastTwin]
    ):
        """Take over the pages of an update: weight, gradient or its parts, states, casts of the weight."""
        super().__init__()
        self._owner, self._due, self.pages, self._narrow = owner, due, pages, narrow
        self._wide = due.pages[1]
        self._scaling = self._wide.scaling
        self._factor = None if self._scaling is None else self._scaling.factor_on_host()
        self._wide.scaling = None
        gradients = [due.gradient] if narrow is None else [tensor for tensor, _ in narrow.parts]
        tensors = [
            due.parameter,
            *gradients,
            *(value for value in due.state.values() if is_large(value)),
            *(twin.tensor for twin in twins),
        ]
        self._num_gradients, self._twins = len(gradients), twins  # their pages live as long as their tensors
        self._layouts = [
            (page, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
            for page, tensor in zip(pages, tensors, strict=True)
        ]
        self.written = [page.key for page in (pages[0], *(twin.page for twin in twins))]
        """Keys of the pages that come in with new bytes: the weight and its casts."""
        num_read = sum(page.size_bytes for page in pages) + self._wide.size_bytes * 2 * (narrow is not None)
        self.size_bytes = num_read + sum(page.size_bytes for page in (pages[0], *pages[1 + len(gradients) :]))
        """Bytes of host memory that it reads and writes."""
        self._settling = [_handle(page).settling() for page in pages]
        self._has_scaled = False
        """Whether the gradient itself was scaled in host memory, and not only what was made of it."""
        self._is_missed = False
        """Whether a page did not leave, so that it was not done."""
        self._numbers: State = {}
        """Entries of the state that are not pages and that the update changes."""
        for page in self._involved():
            page.pending = self
        due.put_off_small(self)

    @property
    def parameter(self) -> torch.Tensor:
        """The parameter that is updated."""
        return self._due.parameter

    def _involved(self) -> Iterable[Page]:
        return dict.fromkeys([*self.pages, self._wide])

    @property
    def is_ready(self) -> bool:
        """Whether no copy reads or writes any of its bytes in host memory."""
        return all(settling.is_done for settling in self._settling)

    def get_ready(self) -> None:
        """Wait until no copy does."""
        for settling in self._settling:
            settling.wait()

    @property
    def host_work(self) -> HostStep:
        return self

    def __call__(self) -> None:
        """Complete the update now, because somebody needs one of its pages."""
        start_s = time.perf_counter()
        self._owner.lane.hurry(self)
        self.wait()
        self._owner.pages.copies.stall_s += time.perf_counter() - start_s
        is_there = not self._is_missed
        self.forget()
        if is_there and self.error is None:
            self._owner.pages.outdated(self.pages)
        if self.error is not None:
            self._owner.failed = True
            raise self.error
        if not self._has_scaled or not is_there:
            self._wide.scaling = self._scaling
        if is_there:
            merge(self._due.live, self._due.state, self._numbers)
        else:
            self._due()

    def forget(self) -> None:
        self._due.drop_small()
        for page in self._involved():
            page.pending = None

    def take_back(self) -> None:
        """Let the update be as if it had never been asked for."""
        self.forget()
        self._wide.scaling = self._scaling

    def compute(self) -> None:
        """Update the parameter, and write its casts."""
        self._is_missed = not all(page.handle is not None and page.handle.is_in_memory for page in self.pages)
        self.is_counted = not self._is_missed
        if self._is_missed:
            return
        self._owner.updated_bytes += self.size_bytes
        weight, *values = [host_view(_handle(page), *layout) for page, *layout in self._layouts]
        twins = [values.pop() for _ in self._twins]
        gradients = [values.pop(0) for _ in range(self._num_gradients)]
        large = iter(values)
        state = {field: next(large) if is_large(value) else value for field, value in self._due.state.items()}
        optimizer, parameter, settings = self._owner.optimizer, self._due.parameter, self._due.settings
        scale = 1.0 if self._factor is None else float(self._factor)
        numbers = step_in_one_pass(optimizer, settings, parameter, weight, gradients, state, twins, scale)
        if numbers is not None:
            self._numbers = numbers
            return
        gradient, *further = gradients
        if self._narrow is not None:
            gradient = self._owner.scratch.like(gradient, weight.dtype).copy_(gradient)
            for part in further:
                gradient.add_(part)
        if self._factor is not None:
            gradient.mul_(self._factor)
            self._has_scaled = self._narrow is None
        self._numbers = step_on_host(optimizer, settings, parameter, weight, gradient, state, _CALL)
        for twin in twins:
            twin.copy_(weight)


class Scratch:
    """Host memory for one gradient at a time.

    Memory that is mapped for each gradient costs as much time as its update, for the system fills it with zeros.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of another dtype with the layout of ``tensor``, valid until the next call."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        size_bytes = (1 + last) * dtype.itemsize
        if len(self._memory) < size_bytes:
            self._memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        return self._memory[:size_bytes].view(dtype).as_strided(tensor.size(), tensor.stride())


def _handle(page: Page) -> Handle:
    assert page.handle is not None
    return page.handle


def _is_plain(state: State, pages: Sequence[Page | None], groups: Sequence[dict[str, Any]]) -> bool:
    """Whether each tensor of the state is a page, and everything else is a number in main memory."""
    large = [value for value in state.values() if is_large(value)]
    others = [value for value in state.values() if not is_large(value)]
    settings = [setting for group in groups for key, setting in group.items() if key != "params"]
    return len(large) == len(pages) - 2 and all(map(is_number, others)) and all(map(is_here, settings))


def merge(live: State, before: State, after: State) -> None:
    """Put the entries that an update has changed into a state, unless somebody has replaced them since."""
    for field, value in after.items():
        if field not in before or live.get(field) is before[field]:
            live[field] = value
