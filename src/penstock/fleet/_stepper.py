"""A step of the optimizer on one group of parameters, and the state that it leaves."""

from typing import Any

import torch
from torch import nn

from penstock.fleet._groups import Group
from penstock.fleet._memory import DeviceMemory
from penstock.fleet._packed import Packed
from penstock.fleet._training import Training

_OF = "//"
"""Separator between the name of a parameter and the field of its state."""


class Stepper:
    """The optimizer's steps on a job's groups, on one device."""

    def __init__(self, training: Training, memory: DeviceMemory):
        self._training, self._memory = training, memory

    def measure(self, gradients: dict[str, torch.Tensor]) -> None:
        """Divide gradients by the loss scale, and note their norms and whether all are finite."""
        training = self._training
        if training.scale is not None:
            inverse = torch.tensor(training.scale.value, dtype=torch.float64).reciprocal().float().item()
            for gradient in gradients.values():
                gradient.mul_(inverse)
            finite = [gradient.isfinite().all() for gradient in gradients.values()]
            if finite and not torch.stack(finite).all():  # the host asks the device only once
                training.is_finite = False
        if training.job.clip_norm is not None and gradients:
            norms = torch.stack([torch.linalg.vector_norm(one, 2.0) for one in gradients.values()])
            training.norms |= zip(gradients, norms.unbind(), strict=True)

    def clip(self, gradients: dict[str, torch.Tensor]) -> None:
        """Clip by the norm of all gradients of the step. All of them must have been measured."""
        training = self._training
        assert training.job.clip_norm is not None
        device = self._memory.device
        norms = [training.norms[name].to(device) for name in training.weights.parameters if name in training.norms]
        total = torch.linalg.vector_norm(torch.stack(norms), 2.0)
        nn.utils.clip_grads_with_norm_(
            [training.weights.tensors[name] for name in gradients], training.job.clip_norm, total
        )

    def step(self, one: Group, gradients: dict[str, torch.Tensor]) -> None:
        """Step the optimizer. The parameters have these gradients, and everything is on the device."""
        training, memory = self._training, self._memory
        parameters = {name: training.weights.parameters[name] for name in gradients}
        before = training.states.get(one)
        moved = {} if before is None else before.views(memory.get(before.item))
        states = {name: self._on_device(training.numbers.get(name, {})) for name in one.layouts}
        for key, tensor in moved.items():
            name, _, field = key.rpartition(_OF)
            states[name][field] = tensor
        after = training.optimizer.step(parameters, {name: states[name] for name in parameters})
        self._keep_states(one, {**states, **after}, before, moved)
        assert one.item is not None
        memory.changed(one.item)
        self._take_back_moved_parameters(one)
        if one in training.gradients:
            memory.discard(training.gradients.pop(one).item)

    def _on_device(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with its tensors on this device, if they were on another device of the same type."""
        device = self._memory.device
        return {
            key: value.to(device) if isinstance(value, torch.Tensor) and value.device.type == device.type else value
            for key, value in state.items()
        }

    def _keep_states(
        self, one: Group, states: dict[str, dict[str, Any]], before: Packed | None, moved: dict[str, torch.Tensor]
    ) -> None:
        training, memory = self._training, self._memory
        worth: dict[str, torch.Tensor] = {}
        for name, state in states.items():
            training.numbers[name] = {}
            for field, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1 and value.device.type == memory.device.type:
                    worth[f"{name}{_OF}{field}"] = value
                else:
                    training.numbers[name][field] = value
        stays = before is not None and worth.keys() == moved.keys()
        if stays and all(tensor.data_ptr() == moved[key].data_ptr() for key, tensor in worth.items()):
            assert before is not None
            memory.changed(before.item)
            return
        if before is not None:
            memory.discard(training.states.pop(one).item)
        if worth:
            training.states[one] = Packed.of(f"{training.job.name}: optimizer state of shard {one.owner}", worth)
            memory.add(training.states[one].item)

    def _take_back_moved_parameters(self, one: Group) -> None:
        """Copy parameters back into the group's storage, since an optimizer may give a parameter new bytes."""
        assert one.item is not None
        (storage,) = self._memory.get(one.item)
        for name, view in one.views(storage).items():
            tensor = self._training.weights.tensors[name].data
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)
