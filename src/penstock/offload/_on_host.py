"""Optimizer updates on the host, in host memory: the gradient goes there, the weight comes back, the states stay."""

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from penstock.offload._casts import Casts, Twin
from penstock.offload._deferred import Deferred
from penstock.offload._page import Narrow, Page
from penstock.offload._pages import Pages
from penstock.stepping import State, step_part

_POLL_S = 1e-4
_FEWEST_TRIED = 2**16
"""Elements of the parameter on which an update is tried. With fewer, Python overhead dominates."""
_TRIES = 3
_WITH_KERNEL = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose update is a single kernel on a CPU."""


class HostUpdates:
    """A thread that runs the updates of one optimizer, one after the other.

    The next forward needs weights in the order of the model. Backward completes gradients in the opposite order, so of
    the updates that come during backward the last one is done first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pages: Pages, casts: Casts, *, last_first: bool):
        self._optimizer, self._pages, self.casts = optimizer, pages, casts
        self._last_first = last_first
        self._queue: deque[Update] = deque()
        self._condition = threading.Condition()
        """Guards the queue and the request to end the thread."""
        self._is_ending = False
        self._thread: threading.Thread | None = None
        self._waiting: list[Update] = []
        """Updates whose copies out are under way."""
        self.failed = False
        """Whether an update began and did not finish."""
        self.num_updates = 0
        self.busy_s = 0.0
        """Seconds that the thread has computed."""

    def begin(self, due: Deferred, *, is_stateless: bool) -> bool:
        """Let all pages of an update leave (weight, gradient, then states), and do the update when they have left.

        Returns whether it will be done here, for which all pages have to fit into host memory. If a copy fails later,
        ``due`` itself is called. ``is_stateless`` says that an earlier update has left no state; else an empty state
        means that this would be the first update.
        """
        if not (due.state or is_stateless) or not _is_plain(due.state, due.pages, due.settings):
            return False
        twins = self.casts.of(due.pages[0], due.parameter)
        self.casts.forget(due.pages[0], but=twins)
        narrow = due.pages[1].narrow
        weight, gradient, *states = due.pages
        parts = [gradient] if narrow is None else [page for _, page in narrow.parts]
        pages = [weight, *parts, *states, *(one.page for one in twins)]
        if not all(map(self._pages.may_leave, pages)):
            return False
        if any(page.handle is not None and not page.handle.is_in_memory for page in pages):
            return False  # part of it is on a disk, so letting the rest leave would gain nothing
        for page in (*pages, gradient):
            self._pages.let_leave(page)
        if not all(page.handle is not None and page.handle.is_in_memory for page in pages):
            self.casts.forget(due.pages[0])  # there may have been no room for some of them
            return False
        if self._thread is None:
            self._is_ending = False
            self._thread = threading.Thread(target=self._run, name="penstock host updates", daemon=True)
            self._thread.start()
        self._waiting.append(Update(self, due, pages, narrow, twins))
        self._pages.on_poll = self.poll
        self.poll()
        return True

    def is_faster(self) -> bool | None:
        """Return whether updates here take less time than the link would need for updates on the device.

        ``None`` until the link has carried something and the optimizer has states.
        """
        out, back = self._pages.waterfall.rates_bytes_per_s()
        trained = [one for one, state in self._optimizer.state.items() if one.is_floating_point() and state]
        if out is None or back is None or not trained:
            return None
        parameter = min(trained, key=lambda one: (one.numel() < _FEWEST_TRIED, abs(one.numel() - _FEWEST_TRIED)))
        state = self._optimizer.state[parameter]
        large = [one for one in state.values() if _is_large(one)]
        if not _is_plain(state, [None, None, *large], self._optimizer.param_groups):
            return False
        states = sum(one.nbytes for one in state.values() if _is_large(one)) / parameter.numel()
        own = parameter.element_size()
        on_device_s = max((3 * own + states) / back, (2 * own + states) / out)
        try:
            seconds = self._seconds_per_element(parameter, state)
        except Exception:  # an optimizer may raise anything if it does not work here
            return False
        on_host_s = max(2 * own / back, own / out, seconds)
        return bool(on_host_s < on_device_s)

    def _seconds_per_element(self, parameter: torch.Tensor, state: State) -> float:
        """Return the seconds per element of an update here, tried on zeros."""
        zeros = functools.partial(torch.zeros, device="cpu")  # regardless of the default device
        twin = nn.Parameter(zeros(parameter.shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad)
        twin.__dict__.update(parameter.__dict__)
        twin.grad = torch.zeros_like(twin)
        tried = {
            field: zeros(one.shape, dtype=one.dtype) if isinstance(one, torch.Tensor) else one
            for field, one in state.items()
        }
        tensors = [twin, twin.grad, *(one for one in tried.values() if _is_large(one))]
        groups = _groups_with(twin, parameter, _in_one_pass(self._optimizer, self._optimizer.param_groups, tensors))
        best_s = math.inf
        for _ in range(_TRIES):
            start_s = time.perf_counter()
            step_part(self._optimizer, [twin], {twin: tried}, groups=groups, runs_hooks=False)
            best_s = min(best_s, time.perf_counter() - start_s)
        return best_s / parameter.numel()

    def poll(self) -> None:
        """Put updates whose pages have left into the queue, in order."""
        while self._waiting and self._waiting[0].is_ready:
            self._put(self._waiting.pop(0), is_first=self._last_first)
        if not self._waiting:
            self._pages.on_poll = None

    def hand_over(self, update: "Update") -> bool:
        """Wait until all pages of an update have left; return ``False`` if one of them stays on the device."""
        while update in self._waiting:
            self._pages.settle(update.pages)
            self._pages.waterfall.reap()
            if not update.can_leave:
                self._waiting.remove(update)
                return False
            if update.is_ready:
                self._waiting.remove(update)
                self._put(update, is_first=True)
            else:
                time.sleep(_POLL_S)
        self._hurry(update)
        return True

    def _put(self, update: "Update", *, is_first: bool) -> None:
        with self._condition:
            if is_first:
                self._queue.appendleft(update)
            else:
                self._queue.append(update)
            self._condition.notify_all()

    def _hurry(self, update: "Update") -> None:
        """Move an update that somebody waits for to the front of the queue."""
        with self._condition:
            if update in self._queue:
                self._queue.remove(update)
                self._queue.appendleft(update)

    def close(self) -> None:
        """Wait for the updates in the queue, drop the others, and end the thread. A later `begin` starts it again."""
        self._waiting.clear()
        self._pages.on_poll = None
        self.failed = False
        if self._thread is not None:
            with self._condition:
                self._is_ending = True
                self._condition.notify_all()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._is_ending)
                if not self._queue:
                    return
                update = self._queue.popleft()
            start_s = time.perf_counter()
            update.run(self._optimizer)
            self.busy_s += time.perf_counter() - start_s
            self.num_updates += 1
            del update  # frees its gradient


class Update:
    """The update of one parameter in host memory."""

    def __init__(
        self, owner: HostUpdates, due: Deferred, pages: list[Page], narrow: Narrow | None, twins: Sequence[Twin]
    ):
        """Take over the pages of an update: weight, gradient or its parts, states, casts of the weight."""
        self._owner, self._due, self.pages, self._narrow = owner, due, pages, narrow
        self._wide = due.pages[1]
        self._scaling = self._wide.scaling
        self._factor = None if self._scaling is None else self._scaling.factor_on_host()
        self._wide.scaling = None
        gradients = [due.gradient] if narrow is None else [tensor for tensor, _ in narrow.parts]
        tensors = [
            due.parameter,
            *gradients,
            *(one for one in due.state.values() if _is_large(one)),
            *(one.tensor for one in twins),
        ]
        self._num_gradients, self._num_twins = len(gradients), len(twins)
        self._layouts = [
            (page, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
            for page, tensor in zip(pages, tensors, strict=True)
        ]
        self._numbers: State = {}
        """Entries of the state that are not pages and that the update changes."""
        self._done = threading.Event()
        self._error: BaseException | None = None
        for page in self._involved():
            page.pending, page.on_host = self.finish, self

    def _involved(self) -> Iterable[Page]:
        return dict.fromkeys([*self.pages, self._wide])

    @property
    def is_done(self) -> bool:
        """Whether the update has ended, so that host memory holds the new bytes."""
        return self._done.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether no copy reads or writes any of its bytes in host memory."""
        return all(not page.held_bytes() and page.handle is not None and page.handle.is_settled for page in self.pages)

    @property
    def can_leave(self) -> bool:
        """Whether each of its pages is in host memory or on its way there."""
        return all(page.handle is not None and page.handle.is_in_memory for page in self.pages)

    def finish(self) -> None:
        """Complete the update now, because somebody needs one of its pages."""
        is_there = self._owner.hand_over(self)
        start_s = time.perf_counter()
        if is_there:
            self._done.wait()
            self._owner._pages.stall_s += time.perf_counter() - start_s
        for page in self._involved():
            page.pending = page.on_host = None
        if self._error is not None:
            self._owner.failed = True
            raise self._error
        if self._narrow is not None or not is_there:  # otherwise the host has scaled it
            self._wide.scaling = self._scaling
        if is_there:
            merge(self._due.live, self._due.state, self._numbers)
        else:
            self._due()

    def run(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the update; the thread calls this, and it touches host memory only."""
        try:
            with torch.no_grad():
                self._update(optimizer)
        except BaseException as error:  # raised for whoever needs the weight
            self._error = error
        finally:
            self._done.set()

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        weight, *values = [_view(*layout) for layout in self._layouts]
        twins = [values.pop() for _ in range(self._num_twins)]
        gradient, *rest = (values.pop(0) for _ in range(self._num_gradients))
        if self._narrow is not None:
            gradient = gradient.to(weight.dtype)
            for one in rest:
                gradient.add_(one)
        if self._factor is not None:
            gradient.mul_(self._factor)
        twin = nn.Parameter(weight, requires_grad=self._due.parameter.requires_grad)
        twin.__dict__.update(self._due.parameter.__dict__)  # attributes that an optimizer may look at
        twin.grad = gradient
        large = iter(values)
        state = {field: next(large) if _is_large(value) else value for field, value in self._due.state.items()}
        settings = _in_one_pass(optimizer, self._due.settings, [weight, gradient, *values])
        groups = _groups_with(twin, self._due.parameter, settings)
        (after,) = step_part(optimizer, [twin], {twin: dict(state)}, groups=groups, runs_hooks=False).values()
        for field, value in after.items():
            mine = state.get(field)
            if value is mine:
                continue
            if not _is_large(mine) and not _is_large(value):
                self._numbers[field] = value
            elif isinstance(mine, torch.Tensor) and mine.shape == value.shape:
                mine.copy_(value)
            else:
                raise TypeError(
                    f"{type(optimizer).__name__} changed the tensors of its state ({field}), which is supported "
                    "only for updates on the device: training(..., update='device')"
                )
        for one in twins:
            one.copy_(weight)


def _groups_with(twin: torch.Tensor, parameter: torch.Tensor, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the optimizer's groups with ``twin`` in place of ``parameter`` and without all other parameters."""
    return [{**one, "params": [twin] if any(own is parameter for own in one["params"]) else []} for one in groups]


def _in_one_pass(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], tensors: Sequence[torch.Tensor]
) -> Sequence[dict[str, Any]]:
    """Return the groups with one fused kernel chosen, where PyTorch has one, so that memory is read and written once.

    Single operators would read and write it a dozen times. The last bits differ, as they differ from the device's
    anyway.
    """
    first = tensors[0]
    is_possible = type(optimizer) in _WITH_KERNEL and all(
        one.dtype is first.dtype and one.stride() == first.stride() and one.is_contiguous() for one in tensors
    )
    if not is_possible or not first.is_floating_point() or any(one.get("differentiable") for one in groups):
        return groups
    return [{**one, "fused": True, "foreach": False} for one in groups]


def _view(page: Page, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: Any) -> torch.Tensor:
    """Return the bytes of a page in host memory as the tensor that it holds."""
    assert page.handle is not None
    memory = page.handle.host_tensor().view(dtype)
    return memory.as_strided(size, stride, memory.storage_offset() + offset)


def _is_large(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _is_plain(state: State, pages: Sequence[Page | None], groups: Sequence[dict[str, Any]]) -> bool:
    """Whether each tensor of the state is a page, and everything else is a number in main memory."""
    large = [one for one in state.values() if _is_large(one)]
    others = [one for one in state.values() if not _is_large(one)]
    settings = [one for group in groups for key, one in group.items() if key != "params"]
    has_pages = len(large) == len(pages) - 2
    return has_pages and all(map(_is_number, others)) and all(map(_is_here, settings))


def _is_number(one: object) -> bool:
    """Whether it is a number, a text or a small tensor in main memory, or ``None``."""
    return _is_here(one) and (one is None or isinstance(one, torch.Tensor | int | float | str))


def _is_here(one: object) -> bool:
    return not isinstance(one, torch.Tensor) or one.device.type == "cpu"


def merge(live: State, before: State, after: State) -> None:
    """Put the entries that an update has changed into a state, unless somebody has replaced them since."""
    for field, value in after.items():
        if field not in before or live.get(field) is before[field]:
            live[field] = value
