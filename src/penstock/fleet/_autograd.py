"""Forward and backward of one shard, with the gradients of an uncut model.

Values enter a shard through `_Enter`, which ends the graph there and hands out the gradient that arrives. If later
shards used a value as well, it has a gradient already. That gradient becomes a root of this shard's backward, so that
autograd adds the uses in the same order as in the whole graph: the sums are bit-identical. Gradients of tied parameters
travel the same way, from the last shard that uses a parameter to the one that owns it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from penstock.fleet._groups import bundled
from penstock.fleet._memory import SMALL_BYTES, Item
from penstock.fleet._program import Shard
from penstock.fleet._writes import run_watched
from penstock.storages import id_of
from penstock.tiers import ViewLayout

TIED = "@"
"""Prefix of the names under which the gradients of tied parameters travel."""


Place = tuple[Item, int, int]
"""An item, the index of one of its storages, and an offset in it, in bytes."""


@dataclass(slots=True, eq=False)
class CrossValue:
    """A tensor that passes between shards: where its bytes are, and how to read them."""

    item: Item
    """An item that contains only this tensor's storage."""
    layout: ViewLayout
    """Shape, strides, dtype and offset of the tensor over that storage."""
    needs_gradient: bool
    """Whether backward goes through it."""


@dataclass(slots=True, eq=False)
class ShardGraph:
    """The autograd graph that forward of a shard leaves behind for its backward."""

    entered: dict[str, tuple[GradientEdge, list[torch.Tensor]]] = field(default_factory=dict)
    """Per input that needs a gradient: its edge in the graph, and the list that receives its gradient."""
    left: dict[str, GradientEdge] = field(default_factory=dict)
    """Per output that needs a gradient: its edge in the graph."""
    saved: "Saved | None" = None
    """The tensors that autograd saved, if backward runs in another unit."""


class Saved:
    """The tensors that autograd saved in one forward, by storage.

    Small storages share one storage. Storages that belong to other items stay there. Saved tensors that are not on
    ``device`` stay in the graph, as do storages without bytes.
    """

    def __init__(self, homes: Mapping[int, Item], device: torch.device):
        self.item: Item | None = None
        """The storages that belong to no other item; set when forward has ended."""
        self.fetched: Callable[[Item], list[torch.UntypedStorage]]
        """A function that returns an item's storages; set before backward."""
        self.homes: dict[Item, None] = {}
        """Other owners' items that backward reads."""
        self._device = device
        self._known = dict(homes)
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._places: dict[int, Place] = {}

    def hooks(self) -> AbstractContextManager[Any]:
        """Return the context manager that applies to autograd's saved tensors while forward runs."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def add_home(self, storage: torch.UntypedStorage, item: Item) -> None:
        """Register another item that outlives the unit, and its storage."""
        self._known[id_of(storage)] = item

    def add_place(self, key: int, place: Place) -> None:
        """Register where the bytes of a storage already are, in an item of another unit or value."""
        self.homes[place[0]] = None
        self._places[key] = place

    def place(self, key: int) -> Place | None:
        """Return where the bytes of a storage are; ``None`` while it is not in an item."""
        return self._places.get(key)

    @property
    def storages(self) -> Mapping[int, torch.UntypedStorage]:
        """The storages saved so far that belong to no other item, by identity; empty once forward has ended."""
        return self._storages

    def finish(self, label: str, outputs: Mapping[int, Item]) -> None:
        """Move the saved storages into an item.

        ``outputs`` are the items of values, by the identity of their storage.
        """
        own = {key: storage for key, storage in self._storages.items() if key not in outputs}
        for key, item in outputs.items():
            if key in self._storages:
                self.add_place(key, (item, 0, 0))
        if own:
            large = {key: storage for key, storage in own.items() if is_large(storage)}
            small = {key: storage for key, storage in own.items() if key not in large}
            storages = list(large.values())
            starts: list[int] = []
            if small:
                bundle, starts = bundled(small.values(), self._device)
                storages.append(bundle)
            self.item = Item(label, storages)
            self._places |= {key: (self.item, index, 0) for index, key in enumerate(large)}
            self._places |= {key: (self.item, len(large), start) for key, start in zip(small, starts, strict=True)}
        self._storages = {}
        self._known = {}

    def pack(self, tensor: torch.Tensor) -> Any:  # any: a tensor, or where its bytes will be
        """Return what autograd keeps instead of ``tensor``."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        key = id_of(storage)
        if key in self._known:
            self.add_place(key, (self._known[key], 0, 0))
        elif key in self._places:
            pass
        elif not storage.nbytes() or tensor.device != self._device:
            return tensor
        else:
            self._storages[key] = storage  # alive until `finish`, so that no other storage gets its identity
        return key, ViewLayout.of(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:  # any: as `pack` returned it
        """Return the tensor that `pack` was given."""
        if isinstance(packed, torch.Tensor):
            return packed
        key, layout = packed
        if key in self._storages:  # forward has not ended
            storage = self._storages[key]
        else:
            item, index, start_bytes = self._places[key]
            storage = self.fetched(item)[index]
            if start_bytes:
                layout = replace(layout, storage_offset=layout.storage_offset + start_bytes // layout.dtype.itemsize)
        tensor: torch.Tensor = layout.rebuild(storage)
        return tensor


def is_large(storage: torch.UntypedStorage) -> bool:
    """Whether a saved storage is large enough for a copy of its own."""
    return storage.nbytes() >= SMALL_BYTES


def dropping() -> AbstractContextManager[Any]:
    """Return hooks that let autograd save nothing: the same kernels run, and backward runs forward again."""
    # Not torch.no_grad(), since some kernels give other results without autograd.
    return saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0))


class _Enter(torch.autograd.Function):
    """An operator that lets in a tensor made elsewhere. Its gradient goes into ``slot``."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, slot: list[torch.Tensor], value: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # any: PyTorch's
        ctx.slot = slot
        return value.data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:  # any: PyTorch's
        ctx.slot.append(gradients[0])
        return None, None, None


def forward(
    shard: Shard,
    tensors: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    travelling: Sequence[str] = (),
    needing: Sequence[bool],
    device: torch.device,
    buffers: frozenset[str] = frozenset(),
) -> tuple[ShardGraph, Sequence[torch.Tensor]]:
    """Run a shard on ``device`` with a graph of its own.

    ``travelling`` names those of its tensors that another shard owns. It may write to ``buffers``. Raises
    ``CaptureError`` if it writes to any other tensor that it is given.
    """
    graph = ShardGraph()

    def entered(name: str, tensor: torch.Tensor) -> torch.Tensor:
        slot: list[torch.Tensor] = []
        anchor = torch.zeros((), requires_grad=True, device=tensor.device)
        inside: torch.Tensor = _Enter.apply(anchor, slot, tensor)  # type: ignore[no-untyped-call]
        graph.entered[name] = (get_gradient_edge(inside), slot)
        return inside

    own = [
        entered(TIED + name, tensor) if name in travelling else tensor
        for name, tensor in zip(shard.tensors, tensors, strict=True)
    ]
    values = [
        entered(name, tensor) if needs else tensor
        for name, tensor, needs in zip(shard.inputs, inputs, needing, strict=True)
    ]
    outputs = run_watched(shard, own, values, buffers, device)
    for name, tensor in zip(shard.outputs, outputs, strict=True):
        if tensor.requires_grad:
            graph.left[name] = get_gradient_edge(tensor)
    return graph, outputs


def backward(graph: ShardGraph, gradients: dict[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    """Run a shard's backward from ``gradients``, which then hold the gradients of the inputs instead of the outputs.

    ``parameters`` are the shard's own parameters that other shards use as well. Their gradients so far are taken out of
    ``gradients``.
    """
    edges: list[GradientEdge] = []
    arriving: list[torch.Tensor] = []
    for name, edge in graph.left.items():
        if name in gradients:
            edges.append(edge)
            arriving.append(gradients.pop(name))
    for name, (edge, _) in graph.entered.items():
        if name in gradients:
            edges.append(edge)
            arriving.append(gradients.pop(name))
    for name, parameter in parameters.items():
        if TIED + name in gradients:
            edges.append(get_gradient_edge(parameter))
            arriving.append(gradients.pop(TIED + name))
    if edges:
        torch.autograd.backward(edges, arriving)
    for name, (_, slot) in graph.entered.items():
        if slot:
            gradients[name] = slot.pop()
