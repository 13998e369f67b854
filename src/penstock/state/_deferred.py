"""An update of one parameter that is put off until somebody uses the parameter, its gradient or its state."""

from collections.abc import Callable
from typing import Any

import torch

from penstock.state._operators import SMALL_BYTES
from penstock.state._page import Page
from penstock.state._past import do_pending
from penstock.stepping import State
from penstock.storages import id_or_zero
from penstock.tiers import HostWork


class DueState(dict[str, Any]):  # any: see `State`
    """The entry of an optimizer's state while the update that fills it is due: whoever looks into it has it done."""

    due: Callable[[], None] | None = None
    """The update; ``None`` before it is known and once it is done or dropped."""

    def __reduce__(self) -> tuple[type, tuple[State]]:
        return dict, (dict(self.items()),)


def _filled_first(name: str) -> Callable[..., Any]:
    own = getattr(dict, name)

    def method(self: DueState, *args: Any) -> Any:
        due, self.due = self.due, None
        if due is not None:
            due()
        return own(self, *args)

    return method


for _name in (
    *("__getitem__", "__contains__", "__iter__", "__len__", "__eq__", "__repr__", "__or__", "__ror__"),
    *("get", "setdefault", "pop", "popitem", "keys", "values", "items", "copy"),
):
    setattr(DueState, _name, _filled_first(_name))


class Deferred:
    """An update that is due, and is done when somebody uses one of its tensors.

    It does not refer to itself, so that no reference cycle keeps its gradient alive. It is wide because it keeps
    all that has to be as it was when the step was due.
    """

    host_work: HostWork | None = None

    def __init__(
        self,
        update: Callable[[torch.Tensor, State, State, list[dict[str, Any]]], None],
        broken: Callable[[], None],
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        settings: list[dict[str, Any]],
        pages: list[Page],
        due: dict[int, Callable[[], None]],
        allow: Callable[[Page], None],
    ):
        self._update, self._broken, self._due, self._allow = update, broken, due, allow
        self.parameter, self.gradient, self.pages = parameter, gradient, pages
        self._data, self.settings = parameter.data, settings
        self.live, self.state = state, dict(state)
        """The optimizer's entry, and a copy of it as it is now, in case the entry changes before the update is done."""
        self._small = [
            id_or_zero(value)
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.nbytes < SMALL_BYTES
        ]
        """Storages of small states, such as ``step``, which somebody may look at too."""

    def put_off(self) -> None:
        """Let the update be done before anybody works on one of its tensors."""
        for page in self.pages:
            page.pending = self
        self.put_off_small(self.do)
        if isinstance(self.live, DueState):
            self.live.due = self.do

    def put_off_small(self, do: Callable[[], None]) -> None:
        """Call a function before anybody looks at the small states, which are no pages."""
        self._due.update(dict.fromkeys(self._small, do))

    def drop_small(self) -> None:
        """Do not call it any more."""
        for identity in self._small:
            self._due.pop(identity, None)

    def do(self) -> None:
        """Do the update, if it is still due, within the handling of another operator, too."""
        do_pending(self.pages)

    def forget(self) -> None:
        """Do not wait for anybody any more."""
        for page in self.pages:
            page.pending = None
        self.drop_small()
        if isinstance(self.live, DueState):
            self.live.due = None

    def __call__(self) -> None:
        parameter = self.parameter
        self.forget()
        for page in self.pages:
            self._allow(page)
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
                    self.put_off()
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
