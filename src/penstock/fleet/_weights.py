"""The tensors of a job's model.

They have bytes on a device while a unit runs, and are shapes without bytes otherwise.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from penstock.errors import CaptureError
from penstock.storages import storage_id


class Weights:
    """Parameters, buffers and constants of ``model``. Raises ``ValueError`` for tensors that a fleet cannot move.

    ``handed`` contains the storages of the module that the factory returned, by identity.
    """

    def __init__(self, model: nn.Module, job: str, handed: frozenset[int]):
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.tensors: dict[str, torch.Tensor] = {**self.parameters, **dict(model.named_buffers())}
        self._job, self._handed = job, handed
        self._refuse_what_is_not_there()
        self.originals = {name: tensor.data for name, tensor in self.tensors.items()}
        """Tensors that are in no group yet, as the factory made them."""
        self.names = {id(tensor): name for name, tensor in self.tensors.items()}
        """Names by identity of the tensor."""
        self.casts: dict[str, bool] = {}
        """Per tensor, whether every forward so far has used it only by casting it to half precision."""
        self._halves: dict[str, torch.Tensor] = {}
        """Leaves in half precision, which graphs refer to."""
        self._stands_for: set[str] = set()
        """Parameters for which such a leaf stands at the moment."""
        self._hollow: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._device: torch.device | None = None
        """The device on which all of them are hollow, if they are."""

    def learn(self, constants: Mapping[str, torch.Tensor]) -> None:
        """Add constants of a graph as buffers, which the model does not know.

        Raises ``CaptureError`` if one belongs to the module that the factory returned and that was copied.
        """
        for name, tensor in constants.items():
            if storage_id(tensor) in self._handed:
                raise CaptureError(
                    f"job {self._job!r}: forward reads a tensor of the module that model() returned, not of the copy "
                    "that the fleet trains (a hook or a closure refers to it); model() must create a new module"
                )
            if name not in self.tensors:
                self.tensors[name] = tensor.detach()
                self.originals[name] = tensor.detach().data

    def put(self, name: str, numbers: torch.Tensor) -> None:
        """Give a tensor of a newly built model other values, in new memory.

        The user may still hold the original tensor.
        """
        old = self.originals[name]
        own = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype).copy_(numbers)
        self.tensors[name].data = self.originals[name] = own

    def let_originals_go(self) -> None:
        """Release the bytes of the model's tensors, which are now in the groups. The model keeps the shapes."""
        for name, tensor in self.originals.items():
            self.tensors[name].data = self._hollow_of(name, tensor.device)
        self.originals = {}

    def put_back(self) -> None:
        """Give the model the tensors of its factory again, because it will not be cut after all."""
        for name, tensor in self.originals.items():
            self.tensors[name].data = tensor
        self._hollow, self._device = {}, None

    def bind(self, members: Mapping[str, torch.Tensor]) -> None:
        """Bind tensors of the model to these bytes. Those of another dtype stand for their parameters."""
        for name, tensor in members.items():
            parameter = self.tensors[name]
            if tensor.dtype is parameter.dtype:
                parameter.data = tensor
                continue
            self._stands_for.add(name)
            if name in self._halves:
                self._halves[name].data = tensor
            else:
                self._halves[name] = tensor.requires_grad_(parameter.requires_grad)

    def current(self, name: str) -> torch.Tensor:
        """Return the tensor that forward uses, which autograd gives its gradient."""
        return self._halves[name] if name in self._stands_for else self.tensors[name]

    def unbind(self, names: Iterable[str]) -> None:
        """Make these tensors hollow, and drop their gradients."""
        for name in names:
            tensor = self.tensors[name]
            if name in self._stands_for:
                self._stands_for.remove(name)
                half = self._halves[name]
                half.data, half.grad = half.data.new_empty(0), None
            tensor.grad = None
            tensor.data = self._hollow_of(name, tensor.device)

    def hollow_on(self, device: torch.device) -> dict[int, str]:
        """Make all tensors hollow on ``device``, and return their names by storage."""
        for name, tensor in self.tensors.items():
            tensor.data = self._hollow_of(name, device)
        self._device = device
        return {storage_id(tensor): name for name, tensor in self.tensors.items()}

    def unbind_there(self, names: Iterable[str]) -> None:
        """Make these tensors hollow again on the device of `hollow_on`, and keep their gradients."""
        assert self._device is not None
        for name in names:
            self.tensors[name].data = self._hollow_of(name, self._device)

    @contextmanager
    def in_main_memory(self) -> Iterator[None]:
        """Make hollow tensors hollow in main memory inside this context, since tracing looks at devices."""
        away = {name: tensor.data for name, tensor in self.tensors.items() if tensor.device.type != "cpu"}
        for name in away:
            self.tensors[name].data = self._hollow_of(name, torch.device("cpu"))
        try:
            yield
        finally:
            for name, data in away.items():
                self.tensors[name].data = data

    def make_hollow_on(self, device: torch.device) -> None:
        """Make the hollow tensors that `unbind` needs on ``device``, before anything is measured."""
        for name in self.tensors:
            self._hollow_of(name, device)

    def _hollow_of(self, name: str, device: torch.device) -> torch.Tensor:
        """Return the hollow tensor, made only once: making one takes the tensor's bytes for a moment."""
        if (name, device) not in self._hollow:
            self._hollow[name, device] = hollow(self.tensors[name], device)
        return self._hollow[name, device]

    def _refuse_what_is_not_there(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor.device.type == "meta" or torch.nn.parameter.is_lazy(tensor):
                raise ValueError(
                    f"job {self._job!r}: {name} has no values yet; model() must return a model that is ready to train"
                )
            if type(tensor.data) is not torch.Tensor:
                raise ValueError(
                    f"job {self._job!r}: {name} is not a plain tensor, and a fleet can train only plain tensors"
                )
        if not any(parameter.requires_grad for parameter in self.parameters.values()):
            raise ValueError(
                f"job {self._job!r}: no parameter of its model requires a gradient; `model` must return a module with "
                "at least one that does"
            )


def why_uncut(model: nn.Module) -> str:
    """Return why a model cannot be cut, to stand after "because"; ``""`` if that is not known before it runs."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is not torch.strided:
            return f"{name} is a sparse tensor"
    for name, module in model.named_modules():
        what = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{what} is compiled by TorchScript, whose weights only its own code uses"
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"{what} makes sparse gradients"
    return ""


def hollow(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor of the same shape and strides that takes no memory."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    empty.untyped_storage().resize_(0)
    return empty
