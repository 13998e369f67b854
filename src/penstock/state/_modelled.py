"""The record of a step on a machine that is not available: tensors without bytes, and operators timed by a model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.machines import Machine, counted_flops
from penstock.state._effects import effect_of
from penstock.state._record import NOBODY, RecordedStorage, StepRecord
from penstock.storages import id_of, is_gone

_CAST = torch.ops.aten._to_copy.default
_FREE = {torch.ops.aten.empty, torch.ops.aten.empty_like}
"""Operators that, like views, take no time on a device."""
_EVERY_PASSES = {"forward": 4, "backward": 10}
"""Floating-point operations of attention for each pair of positions and number of a head; a causal mask halves them."""


def modelled_record(
    make: Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]],
    machine: Machine,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
) -> StepRecord:
    """Return the record of one micro-batch's forward and backward on ``machine``.

    ``make`` returns the model and a function that returns its loss, a scalar. Both run on tensors without bytes, so
    that a model of any size takes seconds. ``dtype`` is that of autocast, ``None`` for none. Raises whatever PyTorch
    raises if the step looks at numbers.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # half a second, which few need

    with FakeTensorMode():
        model, loss = make()
        recorder = _Recorder(machine, model)
        handles = [
            parameter.register_post_accumulate_grad_hook(recorder.has_gradient)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        with recorder:
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                result = loss()
            recorder.backward = len(recorder.seconds)
            result.backward()  # type: ignore[no-untyped-call]
            del result
        for handle in handles:
            handle.remove()
        return recorder.record()


@dataclass(slots=True)
class _Seen:
    name: str
    size_bytes: int
    born: int
    weak: StorageWeakRef
    dtype: torch.dtype
    dies: int = NOBODY
    uses: dict[int, bool] = field(default_factory=dict)
    is_parameter: bool = False
    cast_of: int = NOBODY
    gradient_of: int = NOBODY
    source_bytes: int = 0


class _Recorder(TorchDispatchMode):
    """A mode that notes each operator's time, and which storages it makes, reads and writes."""

    def __init__(self, machine: Machine, model: nn.Module):
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.seconds: list[float] = []
        self.backward = 0
        self._machine = machine
        self._seen: list[_Seen] = []
        self._living: dict[int, int] = {}
        self._parameters: dict[int, int] = {}
        for name, parameter in model.named_parameters():
            index = self._index_of(parameter, name)
            self._seen[index].is_parameter = True
            self._parameters[id(parameter)] = index
        for name, buffer in model.named_buffers():
            self._index_of(buffer, name)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        effect = effect_of(function)
        if function.namespace == "prim" or effect.is_view or effect.is_alias:
            result = function(*args, **kwargs)
            for tensor in _tensors(result):
                self._index_of(tensor, str(function))
            return result
        self._sweep()
        position = len(self.seconds)
        used: dict[int, bool] = {}
        for place, value in (*enumerate(args), *kwargs.items()):
            for tensor in _tensors(value):
                index = self._index_of(tensor, "an input")
                used[index] = used.get(index, False) or place in effect.writes
        result = function(*args, **kwargs)
        self.names.append(str(function))
        self.seconds.append(self._seconds_of(function, args, kwargs, result))
        for tensor in _tensors(result):
            is_new = id_of(tensor.untyped_storage()) not in self._living
            index = self._index_of(tensor, str(function), born=position)
            if is_new:
                used[index] = True
                if function is _CAST:
                    self._note_cast(self._seen[index], args[0])
        for index, is_written in used.items():
            self._seen[index].uses[position] = is_written
        return result

    def has_gradient(self, parameter: torch.Tensor) -> None:
        """Note which storage is the gradient of a parameter."""
        assert parameter.grad is not None
        self._seen[self._index_of(parameter.grad, "a gradient")].gradient_of = self._parameters[id(parameter)]

    def record(self) -> StepRecord:
        """Return what was seen."""
        self._sweep()
        end = len(self.seconds)
        storages = tuple(
            [
                RecordedStorage(
                    name=seen.name,
                    size_bytes=seen.size_bytes,
                    born=seen.born,
                    dies=end if seen.dies == NOBODY else max(seen.dies, *seen.uses, seen.born),
                    uses=tuple(sorted(seen.uses)),
                    writes=tuple([seen.uses[position] for position in sorted(seen.uses)]),
                    is_parameter=seen.is_parameter,
                    cast_of=seen.cast_of,
                    gradient_of=seen.gradient_of,
                    source_bytes=seen.source_bytes,
                )
                for seen in self._seen
            ]
        )
        return StepRecord(
            names=tuple(self.names), seconds=tuple(self.seconds), storages=storages, backward=self.backward
        )

    def _index_of(self, tensor: torch.Tensor, name: str, *, born: int = NOBODY) -> int:
        storage = tensor.untyped_storage()
        index = self._living.get(id_of(storage))
        if index is None:
            index = self._living[id_of(storage)] = len(self._seen)
            self._seen.append(_Seen(name, storage.nbytes(), born, StorageWeakRef(storage), tensor.dtype))
        return index

    def _note_cast(self, cast: _Seen, source: torch.Tensor) -> None:
        """A cast of a parameter is autocast's; one to a wider dtype may be of a gradient."""
        origin = self._index_of(source, "an input")
        if self._seen[origin].is_parameter:
            cast.cast_of = origin
        if source.dtype.itemsize < cast.dtype.itemsize:
            cast.source_bytes = self._seen[origin].size_bytes

    def _sweep(self) -> None:
        """Note which storages have gone since the last operator."""
        for key, index in [*self._living.items()]:
            if is_gone(self._seen[index].weak):
                del self._living[key]
                self._seen[index].dies = len(self.seconds) - 1

    def _seconds_of(self, function: Any, args: Any, kwargs: Any, result: Any) -> float:
        if function.overloadpacket in _FREE:
            return 0.0
        tensors = [*_tensors((args, kwargs)), *_tensors(result)]
        flops = counted_flops(function, args, kwargs, result) or _flops_of_attention(str(function), tensors)
        floating = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        return self._machine.operator_s(flops=flops, size_bytes=size_bytes, dtype=floating)


def _flops_of_attention(name: str, tensors: list[torch.Tensor]) -> float:
    """The operations of the attention that PyTorch's own counter leaves out: that of CPUs, taken as causal."""
    if "flash_attention_for_cpu" not in name:
        return 0.0
    direction = "backward" if "backward" in name else "forward"
    query, key = [tensor for tensor in tensors if tensor.dim() == 4][direction == "backward" :][:2]
    batch, heads, length, width = query.shape
    return _EVERY_PASSES[direction] * batch * heads * length * width * key.shape[2] / 2


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
