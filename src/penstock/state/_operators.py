"""The effect of an operator on storages, derived from its schema."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.state._effects import Effect, effect_of
from penstock.state._page import Page
from penstock.storages import id_or_zero

SMALL_BYTES = 16 * 1024
"""Smaller tensors stay on the device. They are norms and biases, and copying them costs more than keeping them."""
PLAIN = (torch.Tensor, nn.Parameter)
"""PyTorch's own classes of tensors."""
Find = Callable[[int], Page | None]


@dataclass(slots=True)  # one is made for every operator, and a frozen one takes three times as long
class Touched:
    """The pages that one call of an operator works on."""

    pages: Sequence[Page]
    """Its pages, each once."""
    written: Sequence[Page]
    """The ``pages`` whose bytes the operator changes."""
    is_overwritten: bool
    """Whether it overwrites ``written`` without reading it."""
    is_of_lists: bool
    """Whether it does the same to each tensor of a list."""
    is_view: bool
    """Whether it reads no bytes and makes none."""


_NOTHING = Touched((), (), False, False, False)


def new_storages(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of 16 KiB and more in an operator's result whose storages it has made."""
    if not effect_of(func).makes_new:
        return ()
    results = (result,) if isinstance(result, torch.Tensor) else _tensors(result)
    large = [
        tensor
        for tensor in results
        if type(tensor) in PLAIN and tensor.layout is torch.strided and tensor.nbytes >= SMALL_BYTES
    ]
    if not large:
        return ()
    read = {id_or_zero(tensor) for value in (*args, *kwargs.values()) for tensor in _tensors(value)}
    return [tensor for tensor in large if id_or_zero(tensor) not in read]


def parts_of_sparse(result: Any) -> Sequence[torch.Tensor]:  # any: what an operator returns
    """Return the tensors that the sparse tensors in an operator's result are made of."""
    return [part for tensor in _tensors(result) if tensor.layout is not torch.strided for part in _parts(tensor)]


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def touches(effect: Effect, args: Sequence[Any], kwargs: Mapping[str, Any], find: Find) -> Touched:
    """Return the pages of an operator's arguments, each once, in their order."""
    if effect.is_alias:
        return _NOTHING
    pages: dict[Page, None] = {}
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            page = find(id_or_zero(value))
            if page is not None:
                pages[page] = None
        elif isinstance(value, list | tuple | dict):
            for tensor in _tensors(value):
                page = find(id_or_zero(tensor))
                if page is not None:
                    pages[page] = None
    if not pages:
        return _NOTHING
    if not effect.writes:  # as most operators
        return Touched(tuple(pages), (), False, effect.is_of_lists, effect.is_view)
    written, is_whole = _written(effect, args, kwargs, find)
    return Touched(tuple(pages), written, is_whole, effect.is_of_lists, effect.is_view)


def _written(
    effect: Effect, args: Sequence[Any], kwargs: Mapping[str, Any], find: Find
) -> tuple[tuple[Page, ...], bool]:
    """Return the pages that an operator writes to, and whether it overwrites them without reading any."""
    written: dict[Page, None] = {}
    read: set[Page] = set()
    is_whole = effect.overwrites
    for place, value in (*enumerate(args), *kwargs.items()):
        for tensor in _tensors(value):
            page = find(id_or_zero(tensor))
            if page is None:
                continue
            if place not in effect.writes:
                read.add(page)
                continue
            is_whole = is_whole and page not in written
            written[page] = None
            is_whole = is_whole and tensor.nbytes == page.size_bytes and tensor.is_contiguous()
    return tuple(written), is_whole and read.isdisjoint(written)


def in_parts(
    args: Sequence[Any], kwargs: Mapping[str, Any], find: Find, part_bytes: int
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Yield the arguments of an operator on lists for some entries at a time, with about ``part_bytes`` of pages."""
    values = [*args, *kwargs.values()]
    length = max((len(value) for value in values if isinstance(value, list | tuple)), default=0)

    def cut(value: Any, start: int, end: int) -> Any:
        is_list = isinstance(value, list | tuple) and len(value) == length
        return list(value[start:end]) if is_list else value

    start, size_bytes = 0, 0
    for index in range(length):
        size_bytes += sum(
            page.size_bytes
            for value in values
            if isinstance(value, list | tuple) and len(value) == length
            for page in [_page(value[index], find)]
            if page is not None
        )
        if size_bytes >= part_bytes or index == length - 1:
            yield (
                [cut(argument, start, index + 1) for argument in args],
                {name: cut(argument, start, index + 1) for name, argument in kwargs.items()},
            )
            start, size_bytes = index + 1, 0


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    """Return the tensors in an argument or a result, in their order."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return [tensor for entry in value for tensor in _tensors(entry)]
    if isinstance(value, dict):
        return [tensor for entry in value.values() for tensor in _tensors(entry)]
    return ()


def _page(value: Any, find: Find) -> Page | None:
    return find(id_or_zero(value)) if isinstance(value, torch.Tensor) else None
