"""The tensors that a training moves: a model's parameters, their gradients, and the optimizer's states."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.state._operators import SMALL_BYTES
from penstock.state._page import PageKind
from penstock.state._pages import Pages
from penstock.stepping import tensors_in
from penstock.storages import id_of, id_or_zero


class Taken:
    """Parameters, gradients and states as pages. New ones are made pages whenever they appear."""

    def __init__(self, pages: Pages, model: nn.Module, device: torch.device):
        self._pages, self._model, self._device = pages, model, device
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._hooked: set[int] = set()
        self._hooks: list[Any] = []  # any: of PyTorch's handles
        self.on_gradient: Callable[[torch.Tensor], None]
        """A function that is called with a parameter whose gradient has just been added to."""

    def end(self) -> None:
        """Remove the gradient hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def parameters(self) -> None:
        """Make pages of the parameters that are none yet, and note when their gradients are complete."""
        for parameter in self._model.parameters():
            if is_lazy(parameter):
                continue  # its first forward gives it bytes, and the next step finds them
            self._take_over_parts(parameter, self.name(parameter))
            page = self._pages.find(id_or_zero(parameter))
            if page is None:
                self._take_over(parameter)
                self._pages.trim()
            elif page.kind is not PageKind.PARAMETER:
                self._pages.course.call(page, self.name(parameter), PageKind.PARAMETER)
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self.on_gradient))
                if parameter.grad is not None:
                    self.gradient(parameter)

    def _take_over_parts(self, tensor: torch.Tensor, name: str) -> None:
        """Make pages of the tensors that a wrapper tensor, such as a quantized one, is made of."""
        for field, part in parts_of(tensor).items():
            label = f"{field} of {name}"
            if _is_wrapper(part):
                self._take_over_parts(part, label)
            elif self._may_move(part) and self._pages.find(id_or_zero(part)) is None:
                if not part.untyped_storage().resizable():  # memory of a file or of NumPy
                    part = part.clone()
                    setattr(tensor, field, part)
                self._adopt(part, PageKind.PARAMETER, label)

    def _take_over(self, parameter: nn.Parameter) -> None:
        """Make a parameter's storage a page; give it a new storage first if it cannot be resized, shared as before."""
        self._pages.claim(id_or_zero(parameter))
        if not self._may_move(parameter):
            return
        storage = parameter.untyped_storage()
        if self._pages.register.is_left_alone(storage):
            return
        if not storage.resizable():  # memory of NumPy or of a file
            sharing = [tied for tied in self._model.parameters() if id_or_zero(tied) == id_of(storage)]
            own = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
            own.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))  # type: ignore[call-overload]
            for tied in sharing:
                view = torch.empty(0, dtype=tied.dtype, device=storage.device)
                view.set_(own.untyped_storage(), tied.storage_offset(), tied.size(), tied.stride())  # type: ignore[call-overload]
                tied.data = view
            storage = own.untyped_storage()
        self._pages.begin(storage, PageKind.PARAMETER, self.name(parameter))

    def gradient(self, parameter: torch.Tensor) -> None:
        """Make a page of a parameter's gradient, unless it is one."""
        gradient = parameter.grad
        if gradient is not None:
            self._adopt(gradient, PageKind.GRADIENT, f"gradient of {self.name(parameter)}")

    def states(self, optimizer: torch.optim.Optimizer) -> None:
        """Make pages of an optimizer's states that are none yet."""
        for parameter, state in list(optimizer.state.items()):
            self.state(parameter, state)
            self._pages.trim()

    def state(self, parameter: Any, state: Any) -> None:  # any: optimizers of others keep what they like
        """Make pages of the tensors in a state, also of those in lists, mappings and objects."""
        name = self.name(parameter) if isinstance(parameter, torch.Tensor) else str(parameter)
        if isinstance(state, dict):
            for field, value in list(state.items()):
                is_large = isinstance(value, torch.Tensor) and self._may_move(value)
                if is_large and not value.untyped_storage().resizable():  # memory of a file or of NumPy
                    state[field] = value.clone()
                for tensor in tensors_in(state[field]):
                    self._adopt(tensor, PageKind.STATE, f"{field} of {name}")
        else:
            for tensor in tensors_in(state):
                self._adopt(tensor, PageKind.STATE, f"state of {name}")

    def _adopt(self, tensor: torch.Tensor, kind: PageKind, name: str) -> None:
        page = self._pages.find(id_or_zero(tensor))
        if page is not None:
            if page.kind is PageKind.OTHER:
                self._pages.course.call(page, name, kind)
            return
        self._pages.claim(id_or_zero(tensor))
        if self._may_move(tensor):
            storage = tensor.untyped_storage()
            if storage.nbytes() == tensor.nbytes and storage.resizable():
                self._pages.begin(storage, kind, name)

    def _may_move(self, tensor: torch.Tensor) -> bool:
        """Whether it has bytes of its own here, which no other process uses."""
        return (
            tensor.device == self._device
            and tensor.layout is torch.strided
            and not _is_wrapper(tensor)
            and tensor.untyped_storage().nbytes() >= SMALL_BYTES
            and not (tensor.device.type == "cpu" and tensor.untyped_storage().is_shared())
        )

    def name(self, parameter: torch.Tensor) -> str:
        """Return a parameter's name for messages: the model's, or its shape if the model has none."""
        return self._names.setdefault(id(parameter), f"a parameter {tuple(parameter.shape)}")


def parts_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that a wrapper tensor is made of, by name; none for a plain tensor."""
    if not _is_wrapper(tensor):
        return {}
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, or of the tensors that it is made of."""
    if _is_wrapper(tensor):
        return sum(map(nbytes_of, parts_of(tensor).values()))
    return 0 if is_lazy(tensor) or tensor.layout is not torch.strided else tensor.nbytes


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of other tensors and has no bytes of its own."""
    return hasattr(tensor, "__tensor_flatten__")
