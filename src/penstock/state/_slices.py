"""Updates on the device in slices, from and to host memory: those that would take most of the budget or more.

An update takes weight, gradient, states and a result or two of the weight's size at once. For an embedding with a large
vocabulary that is often more than anything else of a step. PyTorch's elementwise optimizers give the same bits slice by
slice.
"""

from collections.abc import Sequence

import torch
from torch import nn

from penstock.host_stepping import Groups, groups_with, host_view, is_large
from penstock.state._casts import Casts
from penstock.state._operators import PLAIN
from penstock.state._page import Page
from penstock.state._pages import Pages
from penstock.state._past import do_pending
from penstock.state._taken import Taken
from penstock.stepping import ELEMENTWISE, State, own_class, step_part
from penstock.storages import id_or_zero

_SLICE_ELEMENTS = 2**22
"""The most elements of a slice: 16 MiB in float32, so that what is made of it takes less than most layers' results."""
_FEWEST_SLICES = 8
_ALIGNED_ELEMENTS = 2**12
"""Slices begin at multiples of this, so that vector units treat each element as in the whole."""
_NUM_RESULTS = 2
"""Results of the weight's size that an update makes on the way."""
_MOST_TENSORS = 16
"""More tensors of the weight's size than any update takes."""
_STEPS_REFUSED = 32
"""Steps for which an update is whole after host memory had no room for all of its tensors."""
_LARGE_SHARE = 0.75
"""Part of the memory for pages from which an update is done in slices. Link and device take turns then, so that what
fits is faster whole.
"""


class SlicedUpdates:
    """The updates of one optimizer that are done in slices."""

    def __init__(self, optimizer: torch.optim.Optimizer, pages: Pages, taken: Taken, casts: Casts):
        self._optimizer, self._pages, self._taken, self._casts = optimizer, pages, taken, casts
        has_host = any(tier.is_memory for tier in pages.copies.waterfall.tiers)
        self._is_possible = has_host and own_class(optimizer) in ELEMENTWISE
        self._refused: dict[int, int] = {}
        """Parameters of which some tensor did not get into host memory, and the step from which that is tried again."""
        self._num_steps = 0
        self.is_broken = False
        """Whether an update began and did not finish."""
        self.num_updates = 0

    def begin_step(self) -> None:
        """Begin a step."""
        self._num_steps += 1

    def wants(self, parameter: torch.Tensor, state: State, groups: Groups) -> bool:
        """Whether an update with this state, or with none yet, takes so much memory that slices are better."""
        course = self._pages.course
        most_bytes = (course.even_bytes - course.others_bytes) * _LARGE_SHARE
        is_small = _MOST_TENSORS * parameter.nbytes < most_bytes
        if is_small or not self._is_possible or self._refused.get(id(parameter), 0) > self._num_steps:
            return False
        if any(getattr(self._optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            return False  # a gradient scaler's numbers belong to one fused kernel for all of a gradient
        entries = (state or self._example(parameter, groups)).values()
        itemsizes = [value.element_size() for value in entries if is_large(value)]
        size_bytes = parameter.nbytes * (2 + _NUM_RESULTS) + parameter.numel() * sum(itemsizes)
        return bool(size_bytes > most_bytes)

    def update(self, parameter: torch.Tensor, state: State, groups: Groups) -> State | None:
        """Do the update of a parameter that has a gradient, with the settings of these groups; return its new state.

        Returns ``None`` if it cannot be done in slices, and was not begun. Large tensors of ``state`` are changed.
        """
        before, example = dict(state), self._example(parameter, groups)
        if state and any(is_large(value) and not is_large(state.get(field)) for field, value in example.items()):
            return None  # a setting has changed, and this step makes one more
        if not state:
            state = self._first(parameter, example)
        self._taken.gradient(parameter)
        fields = [field for field, value in state.items() if is_large(value)]
        tensors = [parameter, parameter.grad, *(state[field] for field in fields)]
        in_memory = self._in_host_memory(tensors)
        if in_memory is None:
            return None
        views, pages = in_memory
        weight, gradient, *_ = pages
        torch.autograd.graph.increment_version(parameter)
        num_elements = max(1, min(_SLICE_ELEMENTS, parameter.numel() // _FEWEST_SLICES) // _ALIGNED_ELEMENTS)
        num_elements *= _ALIGNED_ELEMENTS
        made_bytes = sum(num_elements * view.element_size() for view in (*views, *views[:1] * _NUM_RESULTS))
        numbers: State = {}
        self._pages.course.updated_on_host([gradient.key], [weight.key], 2 * sum(view.nbytes for view in views))
        # It has no place in the order: the weight's next copy in might begin there, before there is anything to copy.
        with self._pages.quietly((), (), are_plain=True, is_noted=False, made_bytes=made_bytes):
            for start in range(0, parameter.numel(), num_elements):
                own = [view[start : start + num_elements] for view in views]
                results, numbers = self._step(parameter, own, fields, before, groups)
                if not start:  # until here nothing has changed
                    self.is_broken = True
                    for page in (weight, *pages[2:]):
                        page.num_writes += 1
                for view, result in zip(own, results, strict=True):
                    if result is not None:
                        view.copy_(result)
        self.is_broken = False
        self.num_updates += 1
        for field, value in numbers.items():
            mine = before.get(field)
            if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor) and mine.shape == value.shape:
                mine.copy_(value)  # somebody may hold it
            else:
                state[field] = value
        return state

    def _step(
        self,
        parameter: torch.Tensor,
        views: Sequence[torch.Tensor],
        fields: Sequence[str],
        before: State,
        groups: Groups,
    ) -> tuple[list[torch.Tensor | None], State]:
        """Step one slice on the device; return its changed tensors, and the entries of its state that are no slices."""
        weight, gradient, *states = (view.to(parameter.device) for view in views)
        twin = nn.Parameter(weight, requires_grad=parameter.requires_grad)
        twin.__dict__.update(parameter.__dict__)  # attributes that an optimizer may look at
        twin.grad, version = gradient, gradient._version
        own = {
            field: value.clone() if isinstance(value, torch.Tensor) else value
            for field, value in before.items()
            if field not in fields
        }
        if before:
            own |= dict(zip(fields, states, strict=True))
        (after,) = step_part(self._optimizer, [twin], {twin: own}, groups=groups_with(twin, parameter, groups)).values()
        results = [weight, gradient if gradient._version != version else None, *(after[field] for field in fields)]
        return results, {field: value for field, value in after.items() if field not in fields}

    def _example(self, parameter: torch.Tensor, groups: Groups) -> State:
        """Return what a first step with these settings makes for a parameter of this precision, of few elements."""
        stand_in = nn.Parameter(torch.zeros(2, dtype=parameter.dtype, device="cpu"))
        stand_in.grad = torch.zeros_like(stand_in)
        with_device = {"fused": None, "capturable": False}
        own = [
            {**group, **{key: value for key, value in with_device.items() if key in group}}
            for group in groups_with(stand_in, parameter, groups)
        ]
        (example,) = step_part(self._optimizer, [stand_in], {}, groups=own).values()
        return example

    def _first(self, parameter: torch.Tensor, example: State) -> State:
        """Return the large tensors of a first state, one after the other, as pages without values in host memory."""
        state: State = {}
        for field, value in example.items():
            if is_large(value):
                state[field] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                self._taken.state(parameter, state)
                page = self._pages.find(id_or_zero(state[field]))
                self._pages.leave_now([] if page is None else [page])
        return state

    def _in_host_memory(self, tensors: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor], list[Page]] | None:
        """Let tensors leave, and return them in host memory, in one dimension, with their pages.

        Returns ``None`` if that is not possible.
        """
        pages: list[Page] = []
        whole = [tensor for tensor in tensors if tensor is not None]
        for tensor in whole:
            page = self._pages.find(id_or_zero(tensor))
            if page is None or page in pages or page.size_bytes != tensor.nbytes or not tensor.is_contiguous():
                return None
            if type(tensor) not in PLAIN or tensor.numel() != whole[0].numel():
                return None
            pages.append(page)
        if not all(map(self._pages.course.may_leave, pages)):
            return None
        do_pending(pages)
        self._casts.forget(pages[0])
        self._pages.keep_what_is_made_of(pages[0])
        if pages[1].narrow is not None:  # a sum of gradients in half precision, which has no bytes of its own
            self._pages.need([pages[1]], [pages[1]], is_noted=False)
        self._pages.leave_now(pages)
        views = []
        for page, tensor in zip(pages, whole, strict=True):
            if page.is_here or page.handle is None or not page.handle.is_in_memory:
                self._refused[id(whole[0])] = self._num_steps + _STEPS_REFUSED
                return None
            page.handle.settling().wait()
            views.append(host_view(page.handle, tensor.dtype, tensor.size(), tensor.stride(), 0).flatten())
        return views, pages
