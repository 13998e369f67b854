"""A job's tensors packed into groups. Tensors that the same shards use and that change together move together.

Trained parameters, frozen parameters and buffers are kept apart: backward and the optimizer change the first, nothing
changes the second, and forward changes the third. Jobs with the same frozen parameters therefore share them.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from penstock.fleet._memory import Item
from penstock.tiers import ViewLayout

_ALIGNMENT_BYTES = 64
"""Alignment of tensors inside a group: that of PyTorch's own allocations, so that kernels take the same path."""
_WIDE_ALIGNMENT_BYTES = 256
"""Alignment of saved tensors inside a bundle: the largest that any kernel library checks for."""

Kind = Literal["trained", "frozen", "buffer"]


@dataclass(slots=True, eq=False)
class GroupTwin:
    """Copies of a group's tensors, some in half precision, that travel in place of the tensors."""

    item: Item
    """Where the bytes are."""
    layouts: dict[str, ViewLayout]
    """Per tensor, its place in the one storage of the item."""


@dataclass(slots=True, eq=False, kw_only=True)
class Group:
    """Tensors that move together."""

    kind: Kind
    """Whether the optimizer changes them, nothing does, or forward may."""
    shards: tuple[int, ...]
    """The shards that use them; the first owns them."""
    layouts: dict[str, ViewLayout]
    """Per tensor, its place in the group's one storage."""
    size_bytes: int
    """Size of that storage."""
    item: Item | None = field(default=None, repr=False)
    """Where the bytes are; ``None`` until they were put anywhere."""
    twin: GroupTwin | None = field(default=None, repr=False)
    """Copies that travel in training, in place of ``item``."""

    @property
    def travelling(self) -> Item | None:
        """The item that training uses: the twin, if there is one."""
        return self.item if self.twin is None else self.twin.item

    @property
    def owner(self) -> int:
        """The shard that steps them; -1 for tensors that no shard uses."""
        return min(self.shards, default=-1)

    def views(self, storage: torch.UntypedStorage) -> dict[str, torch.Tensor]:
        """Return the tensors over ``storage``."""
        return {name: layout.rebuild(storage) for name, layout in self.layouts.items()}


class JobGroups:
    """The groups of a job's tensors. Each tensor is in one of them."""

    def __init__(self, groups: Iterable[Group] = ()):
        self._groups: list[Group] = []
        self.by_name: dict[str, Group] = {}
        """Groups by the name of a tensor."""
        for group in groups:
            self.add(group)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def add(self, group: Group) -> None:
        """Add a group of tensors that are in no group yet."""
        self._groups.append(group)
        self.by_name |= dict.fromkeys(group.layouts, group)


def packed_layouts(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, ViewLayout], int]:
    """Return the place of each tensor in one storage, with unchanged strides, and the bytes of that storage."""
    layouts, end = {}, 0
    for name, tensor in tensors.items():
        start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        layouts[name] = ViewLayout(
            tensor.dtype, tuple(tensor.shape), tensor.stride(), start // tensor.element_size(), False, False
        )
        end = start + span_bytes(tensor)
    return layouts, end


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def pack(
    tensors: Mapping[str, torch.Tensor], layouts: Mapping[str, ViewLayout], size_bytes: int, device: torch.device
) -> torch.UntypedStorage:
    """Return a new storage on ``device`` that holds the tensors' values."""
    storage = torch.zeros(size_bytes, dtype=torch.uint8, device=device).untyped_storage()
    with torch.no_grad():
        for name, layout in layouts.items():
            layout.rebuild(storage).copy_(tensors[name])
    return storage


def bundled(storages: Iterable[torch.UntypedStorage], device: torch.device) -> tuple[torch.UntypedStorage, list[int]]:
    """Return a new storage on ``device`` with the bytes of all ``storages``, and where each begins."""
    padding = torch.zeros(_WIDE_ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    parts, starts, end = [], [], 0
    with torch.no_grad():
        for storage in storages:
            gap_bytes = -storage.nbytes() % _WIDE_ALIGNMENT_BYTES
            parts += [torch.empty(0, dtype=torch.uint8, device=device).set_(storage), padding[:gap_bytes]]
            starts.append(end)
            end += storage.nbytes() + gap_bytes
        return torch.cat(parts).untyped_storage(), starts


def group_tensors(
    tensors: Mapping[str, torch.Tensor],
    trained: Iterable[str],
    buffers: Iterable[str],
    uses: Mapping[str, Iterable[int]],
) -> list[Group]:
    """Group ``tensors`` by kind and by the shards that use them."""
    trained, buffers = set(trained), set(buffers)
    members: dict[tuple[Kind, tuple[int, ...], str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind: Kind = "trained" if name in trained else "buffer" if name in buffers else "frozen"
        shards = tuple(sorted(set(uses.get(name, ()))))
        apart = name if kind == "trained" and not shards else ""  # another shape of batch may use it, in some shard
        members.setdefault((kind, shards, apart), {})[name] = tensor
    groups = []
    for (kind, shards, _), together in members.items():
        layouts, size_bytes = packed_layouts(together)
        groups.append(Group(kind=kind, shards=shards, layouts=layouts, size_bytes=size_bytes))
    return groups


def content_key(tensors: Mapping[str, torch.Tensor], layouts: Mapping[str, ViewLayout]) -> str:
    """Return a key that is equal for groups with equal bytes in equal places."""
    digest = hashlib.sha256(
        repr([(layout.shape, layout.stride, str(layout.dtype)) for layout in layouts.values()]).encode()
    )
    for name in layouts:
        tensor = tensors[name].detach().contiguous().cpu().reshape(-1)
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()
