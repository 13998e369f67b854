"""Gradients or optimizer states of a group, in one item."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock.fleet._groups import pack, packed_layouts, span_bytes
from penstock.fleet._memory import SMALL_BYTES, Item, counted_bytes
from penstock.tiers import ViewLayout


@dataclass(slots=True, eq=False)
class Packed:
    """Tensors in one item: large ones as they were made, small ones in a bundle."""

    item: Item
    places: dict[str, tuple[int, ViewLayout]]
    """Per tensor, the index of its storage in the item, and its place there."""

    @staticmethod
    def of(label: str, tensors: Mapping[str, torch.Tensor]) -> "Packed":
        """Take over the tensors. Nobody else may hold them."""
        storages: list[torch.UntypedStorage] = []
        places: dict[str, tuple[int, ViewLayout]] = {}
        small: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if _is_small(tensor):
                small[name] = tensor
            else:
                places[name] = (len(storages), ViewLayout.of(tensor))
                storages.append(tensor.untyped_storage())
        if small:
            layouts, size_bytes = packed_layouts(small)
            places |= {name: (len(storages), layout) for name, layout in layouts.items()}
            storages.append(pack(small, layouts, size_bytes, next(iter(small.values())).device))
        return Packed(Item(label, storages), places)

    @staticmethod
    def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
        """Return the bytes of the item that `of` would make of ``tensors``."""
        small = {name: tensor for name, tensor in tensors.items() if _is_small(tensor)}
        sizes = [tensor.untyped_storage().nbytes() for name, tensor in tensors.items() if name not in small]
        return counted_bytes([*sizes, packed_layouts(small)[1]] if small else sizes)

    def views(self, storages: list[torch.UntypedStorage]) -> dict[str, torch.Tensor]:
        """Return the tensors over the item's storages."""
        return {name: layout.rebuild(storages[index]) for name, (index, layout) in self.places.items()}


def _is_small(tensor: torch.Tensor) -> bool:
    size_bytes = tensor.untyped_storage().nbytes()
    return size_bytes < SMALL_BYTES or size_bytes > span_bytes(tensor)
