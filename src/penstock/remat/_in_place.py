"""Sums of backward that overwrite one of their terms, as those of eager autograd do if nothing else holds the term.

A captured graph is functional: where gradients meet, each sum is a new tensor in addition to its terms. At the peak
that costs the bytes of a gradient, and on a CPU fresh pages for each sum. A weight that a loop uses 64 times has 63
sums.
"""

from collections.abc import Iterable

import torch
from torch import fx

from penstock.remat._capture import accumulate, is_backward, is_collective, tensors_of
from penstock.storages import storage_id

_aten = torch.ops.aten
_MAKERS = {
    _aten.add.Tensor, _aten.addmm.default, _aten.baddbmm.default, _aten.bmm.default, _aten.convolution_backward.default,
    _aten.div.Tensor, _aten.embedding_dense_backward.default, _aten.mm.default, _aten.mul.Tensor,
    _aten.native_layer_norm_backward.default, _aten.sum.dim_IntList,
}  # fmt: skip
"""Operators whose results are always memory of their own.

With other operators, fake results might hide that they are not.
"""


def add_in_place(graph: fx.Graph) -> None:
    """Rewrite those sums of a joint graph's backward whose first or second term is not read later."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    on_storage: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for key in {storage_id(tensor) for tensor in tensors_of(node)}:
            on_storage.setdefault(key, []).append(node)
    for node in graph.nodes:
        if node.target is not _aten.add.Tensor or not is_backward(node) or len(node.args) != 2 or node.kwargs:
            continue
        for term, other in (node.args, node.args[::-1]):
            if not _fit(node, term, other):
                continue
            term_key, sum_key = storage_id(term.meta["val"]), storage_id(node.meta["val"])
            if _dies_with(node, on_storage[term_key], position) and _have_dtype_of_sum(on_storage[sum_key], node):
                node.target, node.args = _aten.add_.Tensor, (term, other)
                holders = on_storage.pop(sum_key)
                _move(holders, term)
                on_storage[term_key] += holders
                break


def _fit(node: fx.Node, term: object, other: object) -> bool:
    """Whether ``term`` fills a storage exactly like the sum's, so that the sum may be written into it."""
    if not isinstance(term, fx.Node) or not isinstance(other, fx.Node):
        return False
    total, first, second = (summand.meta.get("val") for summand in (node, term, other))
    return (
        isinstance(total, torch.Tensor)
        and isinstance(first, torch.Tensor)
        and isinstance(second, torch.Tensor)
        and total.is_floating_point()
        and _layout(total) == _layout(first)
        and (total.shape, total.dtype, total.device) == (second.shape, second.dtype, second.device)
        and first.untyped_storage().nbytes() == total.untyped_storage().nbytes() == total.nbytes
        and storage_id(first) != storage_id(second)
    )


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


def _dies_with(node: fx.Node, holders: list[fx.Node], position: dict[fx.Node, int]) -> bool:
    """Whether backward made the storage that ``holders`` share, and nothing reads it after ``node``.

    A graph's output comes last. A gradient that is accumulated may become a leaf's gradient as it is.
    """
    maker = holders[0]
    if maker.target not in _MAKERS or not is_backward(maker):
        return False
    readers = {reader for holder in holders for reader in holder.users}
    if any(reader.target is accumulate or is_collective(reader) for reader in readers):
        return False
    return all(position[reader] <= position[node] for reader in readers)


def _have_dtype_of_sum(holders: list[fx.Node], node: fx.Node) -> bool:
    """Whether all values on a sum's storage have its dtype, so that strides alone define how they view it."""
    return all(tensor.dtype == node.meta["val"].dtype for holder in holders for tensor in tensors_of(holder))


def _move(holders: Iterable[fx.Node], term: fx.Node) -> None:
    """Let the fake values of a sum and of its views share the storage of the term that it is written into."""
    value = term.meta["val"]
    for node in holders:
        old = node.meta["val"]
        if isinstance(old, torch.Tensor):
            node.meta["val"] = _view_like(value, old)
        else:
            node.meta["val"] = type(old)(_view_like(value, part) for part in old)


def _view_like(value: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return value.as_strided(old.shape, old.stride(), old.storage_offset())
