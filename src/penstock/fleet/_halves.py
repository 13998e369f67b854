"""Half-precision casts of weights, which travel under autocast in place of the weights.

A weight that the host updates is needed on the device only as the operand of operators, and under autocast most
operators take it in half precision. Its group then has a twin in host memory: the casts of such weights, and copies of
the others. The host writes the twin when it has updated the weights.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.fleet._groups import Group, GroupTwin, packed_layouts, span_bytes
from penstock.fleet._memory import DeviceMemory, Item
from penstock.storages import storage_id

_CAST = torch.ops.aten._to_copy.default


class CastWatch(TorchDispatchMode):
    """A mode that finds the tensors that an autocast forward uses only by casting them to ``dtype``."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype):
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors, self._dtype = tensors, dtype
        self._by_storage: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            self._by_storage.setdefault(storage_id(tensor), []).append(name)
        self._cast: set[str] = set()
        self._other: set[str] = set()

    @property
    def found(self) -> frozenset[str]:
        """The names of these tensors."""
        return frozenset(self._cast - self._other)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # any: PyTorch's
        options = kwargs or {}
        is_cast = func is _CAST and options.get("dtype") is self._dtype
        for argument in tree_leaves((args, options)):
            if isinstance(argument, torch.Tensor) and argument.layout is torch.strided:
                for name in self._by_storage.get(storage_id(argument), ()):
                    tensor = self._tensors[name]
                    if is_cast and _is_same(argument, tensor) and argument.dtype is torch.float32:
                        self._cast.add(name)
                    elif _overlap(argument, tensor):
                        self._other.add(name)
        return func(*args, **options)


def make_twin(memory: DeviceMemory, job: str, group: Group, casts: Collection[str], dtype: torch.dtype) -> None:
    """Give a group a twin, if host memory has room, in which ``casts`` have type ``dtype``. It has no values yet."""
    shapes = {
        name: torch.empty_strided(
            layout.shape, layout.stride, dtype=dtype if name in casts else layout.dtype, device="meta"
        )
        for name, layout in group.layouts.items()
    }
    layouts, size_bytes = packed_layouts(shapes)
    handle = memory.waterfall.reserve(size_bytes, f"{job}: weights of shard {group.owner} in half precision")
    if handle is not None:
        group.twin = GroupTwin(Item.below(handle), layouts)


def drop_twin(memory: DeviceMemory, group: Group) -> None:
    """Free the twin of a group, which no longer stands for its weights."""
    if group.twin is not None:
        if group.twin.item.pending is not None:
            group.twin.item.pending.finish()  # the weights are still needed
        memory.discard(group.twin.item)
        group.twin = None


def _is_same(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (view.data_ptr(), view.shape, view.stride()) == (tensor.data_ptr(), tensor.shape, tensor.stride())


def _overlap(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    start, end = view.data_ptr(), view.data_ptr() + span_bytes(view)
    return start < tensor.data_ptr() + span_bytes(tensor) and tensor.data_ptr() < end
