"""Forward and backward of one shard, so that gradients come out as if the model had never been cut.

Values enter a shard through `_Enter`, which ends the graph there and hands out the gradient that arrives. A value that
shards after this one used as well has a gradient already; it is put in as a root of this shard's backward, so that
autograd adds the uses up in the order in which it would have met them in the whole graph: the sums are equal to the
bit. Tied parameters travel the same way, from the last shard that uses them to the one that owns them.
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
from penstock.tiers import ViewLayout

TIED = "@"
"""Prefix of the names under which gradients of tied parameters travel."""


Place = tuple[Item, int, int]
"""An item, which of its storages, and where in it, in bytes."""


@dataclass(slots=True, eq=False)
class Value:
    """A tensor between shards: where its bytes are, and how they are read."""

    item: Item
    """Its storage, alone."""
    layout: ViewLayout
    """Over that storage."""
    needs_gradient: bool
    """Whether backward goes through it."""


@dataclass(slots=True, eq=False)
class Graph:
    """What forward of a shard left behind for its backward."""

    entered: dict[str, tuple[GradientEdge, list[torch.Tensor]]] = field(default_factory=dict)
    """Per input that needs a gradient: where it entered, and where its gradient will be put."""
    left: dict[str, GradientEdge] = field(default_factory=dict)
    """Per output that needs a gradient."""
    saved: "Saved | None" = None
    """What autograd saved, if backward comes in another unit."""


class Saved:
    """What autograd saved in one forward, by storage. Small ones share one of their own, others' stay in their items.

    Saved tensors that are not on ``device`` stay in the graph, as do storages without bytes.
    """

    def __init__(self, homes: Mapping[int, Item], device: torch.device):
        self.item: Item | None = None
        """The storages that nobody else has; set when forward has ended."""
        self.fetched: Callable[[Item], list[torch.UntypedStorage]]
        """Gives an item's storages; set before backward."""
        self.homes: dict[Item, None] = {}
        """Items of others that backward reads."""
        self._device = device
        self._known = dict(homes)
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._places: dict[int, Place] = {}

    def hooks(self) -> AbstractContextManager[Any]:
        """While forward runs."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def add_home(self, storage: torch.UntypedStorage, item: Item) -> None:
        """Another item that outlives the unit, and its storage."""
        self._known[storage._cdata] = item

    def add_place(self, key: int, place: Place) -> None:
        """Where the bytes of a storage are already, in an item of another unit or value."""
        self.homes[place[0]] = None
        self._places[key] = place

    def place(self, key: int) -> Place | None:
        """Where the bytes of a storage are; ``None`` as long as it is not in an item."""
        return self._places.get(key)

    @property
    def storages(self) -> Mapping[int, torch.UntypedStorage]:
        """What was saved so far and nobody else has, by identity; nothing once forward has ended."""
        return self._storages

    def finish(self, label: str, outputs: Mapping[int, Item]) -> None:
        """Forward has ended; ``outputs`` are items of values, by the identity of their storage."""
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
        """What autograd keeps instead of ``tensor``."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            self.add_place(key, (self._known[key], 0, 0))
        elif key in self._places:
            pass
        elif not storage.nbytes() or tensor.device != self._device:
            return tensor
        else:
            self._storages[key] = storage  # alive until `finish`, so that no other gets its identity
        return key, ViewLayout.of(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:  # any: as `pack` returned it
        """The tensor that `pack` was given."""
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
    """Whether what autograd saved of it is worth a copy of its own."""
    return storage.nbytes() >= SMALL_BYTES


def dropping() -> AbstractContextManager[Any]:
    """Lets autograd save nothing: the same kernels run, and backward will run forward again."""
    return saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0))


class _Enter(torch.autograd.Function):
    """A tensor that was made elsewhere; its gradient goes into ``slot``."""

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
) -> tuple[Graph, Sequence[torch.Tensor]]:
    """Runs a shard on ``device`` with a graph of its own.

    ``travelling`` names those of its tensors that another shard owns.

    It may write to ``buffers``; raises ``CaptureError`` if it writes to anything else that it is given.
    """
    graph = Graph()

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
    given = [
        entered(name, tensor) if needs else tensor
        for name, tensor, needs in zip(shard.inputs, inputs, needing, strict=True)
    ]
    outputs = run_watched(shard, own, given, buffers, device)
    for name, tensor in zip(shard.outputs, outputs, strict=True):
        if tensor.requires_grad:
            graph.left[name] = get_gradient_edge(tensor)
    return graph, outputs


def backward(graph: Graph, gradients: dict[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    """Runs a shard's backward from ``gradients``, which then hold those of what entered instead of what left.

    ``parameters`` are the shard's own that others use as well; their gradients so far are taken out of ``gradients``.
    """
    edges: list[GradientEdge] = []
    given: list[torch.Tensor] = []
    for name, edge in graph.left.items():
        if name in gradients:
            edges.append(edge)
            given.append(gradients.pop(name))
    for name, (edge, _) in graph.entered.items():
        if name in gradients:
            edges.append(edge)
            given.append(gradients.pop(name))
    for name, parameter in parameters.items():
        if TIED + name in gradients:
            edges.append(get_gradient_edge(parameter))
            given.append(gradients.pop(TIED + name))
    if edges:
        torch.autograd.backward(edges, given)
    for name, (_, slot) in graph.entered.items():
        if slot:
            gradients[name] = slot.pop()
