"""A step of the optimizer on one group of parameters, and the state that it leaves."""

from typing import Any

import torch
from torch import nn

from penstock.fleet._groups import Group
from penstock.fleet._halves import drop_twin
from penstock.fleet._memory import DeviceMemory
from penstock.fleet._packed import Packed
from penstock.fleet._training import JobTraining

FIELD_OF = "//"
"""Separator between the name of a parameter and the field of its state."""


class Stepper:
    """The optimizer's steps on a job's groups, on one device."""

    def __init__(self, training: JobTraining, memory: DeviceMemory):
        self._training, self._memory = training, memory

    def measure(self, gradients: dict[str, torch.Tensor]) -> None:
        """Divide gradients by the loss scale, and note their norms and whether all are finite."""
        training = self._training
        if training.open_step.scale is not None:
            inverse = torch.tensor(training.open_step.scale.value, dtype=torch.float64).reciprocal().float().item()
            for gradient in gradients.values():
                gradient.mul_(inverse)
            dense = [
                gradient._values() if gradient.is_sparse else gradient  # type: ignore[no-untyped-call]
                for gradient in gradients.values()
            ]
            finite = [gradient.isfinite().all() for gradient in dense]
            if finite and not torch.stack(finite).all():  # the host asks the device only once
                training.open_step.is_finite = False
        if training.job.clip_norm is not None and gradients:
            dtypes = [training.weights.parameters[name].dtype for name in gradients]  # some come in half precision
            norms = [
                torch.linalg.vector_norm(gradient, 2.0, dtype=dtype)
                for gradient, dtype in zip(gradients.values(), dtypes, strict=True)
            ]
            training.open_step.norms |= zip(gradients, torch.stack(norms).unbind(), strict=True)

    def clip(self, gradients: dict[str, torch.Tensor]) -> None:
        """Clip by the norm of all gradients of the step. All of them must have been measured."""
        training = self._training
        assert training.job.clip_norm is not None
        nn.utils.clip_grads_with_norm_(
            [training.weights.tensors[name] for name in gradients], training.job.clip_norm, self._norm()
        )

    def clip_factor(self) -> torch.Tensor | None:
        """Return the factor with which `clip` scales gradients, in main memory; ``None`` if the job does not clip."""
        most = self._training.job.clip_norm
        if most is None:
            return None
        unit = torch.ones((), device=self._memory.device)
        holder = nn.Parameter(torch.empty_like(unit))
        holder.grad = unit
        nn.utils.clip_grads_with_norm_([holder], most, self._norm())
        return unit.cpu()

    def _norm(self) -> torch.Tensor:
        """Return the norm of all gradients of the step."""
        training, device = self._training, self._memory.device
        norms = [
            training.open_step.norms[name].to(device)
            for name in training.weights.parameters
            if name in training.open_step.norms
        ]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), 2.0)
        return total

    def step(self, group: Group, gradients: dict[str, torch.Tensor]) -> None:
        """Step the optimizer. The parameters have these gradients, and everything is on the device."""
        training, memory = self._training, self._memory
        parameters = {name: training.weights.parameters[name] for name in gradients}
        before = training.states.packed.get(group)
        moved = {} if before is None else before.views(memory.get(before.item))
        states = {name: self._on_device(training.states.numbers.get(name, {})) for name in group.layouts}
        for key, tensor in moved.items():
            name, _, field = key.rpartition(FIELD_OF)
            states[name][field] = tensor
        after = training.optimizer.step(parameters, {name: states[name] for name in parameters})
        training.states.stepped.update(parameters)
        self._keep_states(group, {**states, **after}, before, moved)
        assert group.item is not None
        memory.changed(group.item)
        drop_twin(memory, group)
        self._take_back_moved_parameters(group)
        if group in training.open_step.gradients:
            memory.discard(training.open_step.gradients.pop(group).item)

    def _on_device(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with its tensors on this device, if they were on another device of the same type."""
        device = self._memory.device
        return {
            key: value.to(device) if isinstance(value, torch.Tensor) and value.device.type == device.type else value
            for key, value in state.items()
        }

    def _keep_states(
        self, group: Group, states: dict[str, dict[str, Any]], before: Packed | None, moved: dict[str, torch.Tensor]
    ) -> None:
        training, memory = self._training, self._memory
        worth: dict[str, torch.Tensor] = {}
        for name, state in states.items():
            training.states.numbers[name] = {}
            for field, value in state.items():
                if is_worth_moving(value, memory.device):
                    worth[f"{name}{FIELD_OF}{field}"] = value
                else:
                    training.states.numbers[name][field] = value
        stays = before is not None and worth.keys() == moved.keys()
        if stays and all(tensor.data_ptr() == moved[key].data_ptr() for key, tensor in worth.items()):
            assert before is not None
            memory.changed(before.item)
            return
        if before is not None:
            memory.discard(training.states.packed.pop(group).item)
        if worth:
            training.states.packed[group] = Packed.of(
                f"{training.job.name}: optimizer state of shard {group.owner}", worth
            )
            memory.add(training.states.packed[group].item)

    def _take_back_moved_parameters(self, group: Group) -> None:
        """Copy parameters back into the group's storage, since an optimizer may give a parameter new bytes."""
        assert group.item is not None
        (storage,) = self._memory.get(group.item)
        for name, view in group.views(storage).items():
            tensor = self._training.weights.tensors[name].data
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)


def is_worth_moving(value: object, device: torch.device) -> bool:
    """Whether an entry of an optimizer's state moves with the items of ``device``.

    In main memory a tensor of one element is kept as a number. On an accelerator it belongs to the device.
    """
    if not isinstance(value, torch.Tensor) or value.device.type != device.type:
        return False
    return value.numel() > (1 if device.type == "cpu" else 0)
