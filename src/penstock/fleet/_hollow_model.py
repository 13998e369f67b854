"""The tensors of a model that is run whole: hollow, or bound to bytes on the device for the time of a unit."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from penstock.errors import CaptureError
from penstock.fleet._accesses import HollowWatch, writes_to
from penstock.fleet._autograd import Saved
from penstock.fleet._groups import Group
from penstock.fleet._work import Work
from penstock.storages import id_of, storage_id


class HollowModel:
    """The model's tensors during one mini-batch.

    ``bring(names)`` begins the unit of a shard whose tensors are about to be used, and ``fill(names)`` adds tensors to
    the current unit.
    """

    watch: HollowWatch
    """A mode that detects uses of hollow tensors; set by `hooked`."""

    def __init__(self, work: Work, bring: Callable[[list[str]], None], fill: Callable[[list[str]], None]):
        self._work, self._bring, self._fill = work, bring, fill
        self.refuses_writes = True
        """Whether operators must not write to parameters, as in forward."""
        self._bound: dict[Group, int] = {}
        """Groups whose tensors have their bytes on the device, with the identity of the storage."""

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Make the tensors hollow on this device, and let modules announce theirs inside this context."""
        weights = self._work.training.weights
        hollow = weights.hollow_on(self._work.memory.device)
        self.watch = HollowWatch(hollow, weights.tensors, self._bring, self._fill, self._refuse_writes)
        # Hooks bring all tensors of a module at once. They alone would miss weights that a parent reads, as
        # nn.MultiheadAttention does with its out_proj, so the watch looks at every operator as well.
        with ExitStack() as stack:
            for module in weights.model.modules():
                own = [
                    tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None
                ]
                if own:
                    stack.callback(module.register_forward_pre_hook(_announces(self.watch, own), prepend=True).remove)
            yield

    def is_bound(self, group: Group) -> bool:
        """Whether the group's tensors have their bytes on the device."""
        return group in self._bound

    def bind(self, group: Group, saved: Saved) -> None:
        """Give the group's tensors their bytes. ``saved`` is what the current unit saves for backward."""
        if group in self._bound:
            return
        assert group.item is not None
        (storage,) = self._work.memory.get(group.item)
        views = group.views(storage)
        if group.kind != "buffer":
            saved.add_home(storage, group.item)
        elif self._work.behaviour.is_pilot:
            views = {name: view.clone() for name, view in views.items()}
        self._work.training.weights.bind(views)
        self._bound[group] = id_of(storage)

    def unbind(self) -> None:
        """Make all tensors hollow. Raise ``CaptureError`` if a parameter was given other bytes."""
        weights = self._work.training.weights
        for group, key in self._bound.items():
            if group.kind == "buffer":
                if group.item is not None and not self._work.behaviour.is_pilot:
                    self._work.memory.changed(group.item)
                continue
            for name in group.layouts:
                if storage_id(weights.tensors[name]) != key:
                    raise writes_to(name)
        weights.unbind_there(name for group in self._bound for name in group.layouts)
        self._bound = {}

    def filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor with its bytes. Another unit may have to begin for it."""
        return self.watch.filled(tensor) if self.watch.need([tensor]) else tensor

    def adopt_buffers(self) -> None:
        """Copy the values of a tensor with which forward replaced a buffer into the buffer."""
        weights = self._work.training.weights
        for prefix, module in weights.model.named_modules():
            for key, tensor in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                old = weights.tensors.get(name)
                if old is None or tensor is old:
                    continue
                if tensor is None or (tensor.shape, tensor.dtype) != (old.shape, old.dtype):
                    raise CaptureError(
                        f"forward replaces the buffer {name} by something of another shape or dtype, which a fleet "
                        "does not support; write into the buffer: self.buffer.copy_(new)"
                    )
                module._buffers[key] = old
                if not self._work.behaviour.is_pilot:
                    self.watch.need([old])
                    with torch.no_grad():
                        old.copy_(tensor)

    def _refuse_writes(self, tensors: list[torch.Tensor]) -> None:
        """Raise ``CaptureError`` if an operator is about to write to parameters."""
        if not self.refuses_writes:
            return
        written = {storage_id(tensor) for tensor in tensors}
        for group, key in self._bound.items():
            if group.kind != "buffer" and key in written:
                raise writes_to(next(iter(group.layouts)))


def _announces(watch: HollowWatch, own: list[torch.Tensor]) -> Callable[..., None]:
    def announce(*_: object) -> None:
        watch.need(own)

    return announce
