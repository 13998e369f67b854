"""The tensors of a job's model, which stand for bytes on a device while a unit runs, and for shapes alone between."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from penstock.errors import CaptureError


class Weights:
    """Parameters, buffers and constants of ``model``. Raises ``ValueError`` for tensors that a fleet cannot move.

    ``handed`` are storages of the module that the factory returned, by identity.
    """

    def __init__(self, model: nn.Module, job: str, handed: frozenset[int]):
        self.parameters = dict(model.named_parameters())
        self.tensors: dict[str, torch.Tensor] = {**self.parameters, **dict(model.named_buffers())}
        self._job, self._handed = job, handed
        self._refuse_what_is_not_there()
        self.originals = {name: tensor.data for name, tensor in self.tensors.items()}
        """What is in no group yet, as the factory made it."""
        self.names = {id(tensor): name for name, tensor in self.tensors.items()}
        """By identity of the tensor."""
        self._hollow: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._device: torch.device | None = None
        """On which all of them stand for shapes, if they do."""

    def learn(self, constants: Mapping[str, torch.Tensor]) -> None:
        """Constants of a graph are buffers that the model does not know of.

        Raises ``CaptureError`` if one belongs to the module that the factory returned, of which this is a copy.
        """
        for name, tensor in constants.items():
            if tensor.untyped_storage()._cdata in self._handed:
                raise CaptureError(
                    f"job {self._job!r}: forward reads a tensor of the module that model() returned, not of the "
                    "copy that the fleet trains (a hook or a closure refers to it); let model() make a new module"
                )
            if name not in self.tensors:
                self.tensors[name] = tensor.detach()
                self.originals[name] = tensor.detach().data

    def put(self, name: str, numbers: torch.Tensor) -> None:
        """Gives a tensor of a model that was just built other numbers, in memory of its own: the user may have its."""
        old = self.originals[name]
        own = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype).copy_(numbers)
        self.tensors[name].data = self.originals[name] = own

    def let_originals_go(self) -> None:
        """The model keeps shapes and lets its bytes go; they are in the groups."""
        for name, tensor in self.originals.items():
            self.tensors[name].data = self._hollow_of(name, tensor.device)
        self.originals = {}

    def bind(self, members: Mapping[str, torch.Tensor]) -> None:
        """Tensors of the model stand for these bytes."""
        for name, tensor in members.items():
            self.tensors[name].data = tensor

    def unbind(self, names: Iterable[str]) -> None:
        """They stand for shapes alone."""
        for name in names:
            tensor = self.tensors[name]
            tensor.grad = None
            tensor.data = self._hollow_of(name, tensor.device)

    def hollow_on(self, device: torch.device) -> dict[int, str]:
        """All stand for shapes on ``device``; returns their names by storage."""
        for name, tensor in self.tensors.items():
            tensor.data = self._hollow_of(name, device)
        self._device = device
        return {tensor.untyped_storage()._cdata: name for name, tensor in self.tensors.items()}

    def unbind_there(self, names: Iterable[str]) -> None:
        """These stand for shapes again where `hollow_on` said, and keep their gradients."""
        assert self._device is not None
        for name in names:
            self.tensors[name].data = self._hollow_of(name, self._device)

    def make_hollow_on(self, device: torch.device) -> None:
        """Makes what tensors of shapes alone `unbind` needs there, before anything is measured."""
        for name in self.tensors:
            self._hollow_of(name, device)

    def _hollow_of(self, name: str, device: torch.device) -> torch.Tensor:
        """Made once: making one takes the tensor's bytes for a moment."""
        if (name, device) not in self._hollow:
            self._hollow[name, device] = hollow(self.tensors[name], device)
        return self._hollow[name, device]

    def _refuse_what_is_not_there(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor.device.type == "meta" or torch.nn.parameter.is_lazy(tensor):
                raise ValueError(f"job {self._job!r}: {name} has no values yet; model() returns a model ready to train")
            if tensor.layout is not torch.strided or type(tensor.data) is not torch.Tensor:
                raise ValueError(f"job {self._job!r}: {name} is not a plain tensor, and fleets train those alone")
        if not any(parameter.requires_grad for parameter in self.parameters.values()):
            raise ValueError(
                f"job {self._job!r}: no parameter of its model requires a gradient; give `model` one that trains"
            )


def hollow(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A tensor of the same shape and strides that takes no memory."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    empty.untyped_storage().resize_(0)
    return empty
