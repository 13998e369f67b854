"""An update of one parameter that is put off until somebody uses the parameter, its gradient or its state."""

from collections.abc import Callable
from typing import Any

import torch

from penstock.offload._operators import SMALL_BYTES, id_or_zero
from penstock.offload._page import Page
from penstock.stepping import State


class Deferred:
    """An update that is due, and is done when somebody uses one of its tensors.

    It does not refer to itself, so that no reference cycle keeps its gradient alive.
    """

    def __init__(
        self,
        update: Callable[[torch.Tensor, State, State, list[dict[str, Any]]], None],
        broken: Callable[[], None],
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        settings: list[dict[str, Any]],
        pages: list[Page],
    ):
        self._update, self._broken = update, broken
        self.parameter, self.gradient, self.pages = parameter, gradient, pages
        self._data, self.settings = parameter.data, settings
        self.live, self.state = state, dict(state)
        """The optimizer's entry, and a copy of it as it is now, in case the entry changes before the update is done."""

    def __call__(self) -> None:
        parameter = self.parameter
        for page in self.pages:
            page.pending = None
        calm = torch.inference_mode(False), torch.no_grad(), torch.autocast(parameter.device.type, enabled=False)
        with calm[0], calm[1], calm[2]:
            before = parameter.grad, parameter.data
            is_other = id_or_zero(parameter) != self.pages[0].identity
            if is_other:  # somebody has replaced its data since
                parameter.grad, parameter.data = None, self._data
            parameter.grad = self.gradient
            num_writes, numbers = self._num_writes(), _numbers(self.state)
            try:
                self._update(parameter, self.live, self.state, self.settings)
            except BaseException:
                if self._num_writes() == num_writes:  # the failure came before weight and states were changed
                    _put_back(self.state, numbers)
                    for page in self.pages:
                        page.pending = self
                else:
                    self._broken()
                raise
            finally:
                parameter.grad = None
                if is_other:
                    parameter.data = before[1]
                parameter.grad = before[0]

    def _num_writes(self) -> int:
        return sum(page.num_writes for page in self.pages)


def _numbers(state: State) -> State:
    """Return copies of the state's entries that are not pages, such as ``step``."""
    return {
        field: value.clone() if isinstance(value, torch.Tensor) else value
        for field, value in state.items()
        if not isinstance(value, torch.Tensor) or value.nbytes < SMALL_BYTES
    }


def _put_back(state: State, numbers: State) -> None:
    for field in [field for field in state if field not in numbers and not isinstance(state[field], torch.Tensor)]:
        del state[field]
    for field, value in numbers.items():
        mine = state.get(field)
        if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor):
            mine.copy_(value)
        else:
            state[field] = value
