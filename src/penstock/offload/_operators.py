"""What an operator does to storages, by its schema."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.offload._page import Page

_OVERWRITE = ("zero_", "fill_", "copy_", "normal_", "uniform_")
"""Operators that read nothing of what they write to."""

SMALL_BYTES = 16 * 1024
"""Tensors below it stay on the device: norms and biases, whose copies would cost more than their room."""
_VIEWS = ("_unsafe_view", "_reshape_alias")
"""Views of which schemas do not tell."""
_PLAIN = (torch.Tensor, nn.Parameter)
_RUNNING = ("running_mean", "running_var")
Find = Callable[[int], Page | None]


@dataclass(frozen=True, slots=True)
class _Kind:
    """By its schema."""

    is_alias: bool
    """Whether its result is the same tensor."""
    is_view: bool
    """Whether it reads no bytes. It wants the storage to have its size all the same, so that it is filled."""
    writes: frozenset[int | str]
    """Arguments that it writes to, by place and by name."""
    overwrites: bool
    is_of_lists: bool
    makes_new: bool
    """Whether it may make storages."""


@dataclass(frozen=True, slots=True)
class Touched:
    """What an operator works on."""

    pages: list[Page]
    """Each once."""
    written: list[Page]
    """Those of them whose bytes it changes."""
    is_overwritten: bool
    """Whether what is written to is not read."""
    is_of_lists: bool
    """Whether it does the same to each tensor of a list."""
    is_view: bool
    """Whether it reads no bytes, and makes none."""


_NOTHING = Touched([], [], False, False, False)


_kinds: dict[int, tuple[Any, _Kind]] = {}
"""By identity, since operators hash slowly, with the operator, which so stays."""


def _kind(func: Any) -> _Kind:
    found = _kinds.get(id(func))
    if found is None:
        found = _kinds[id(func)] = (func, _kind_of(func))
    return found[1]


def _kind_of(func: Any) -> _Kind:
    schema = getattr(func, "_schema", None)
    if schema is None:  # an operator of operators: all that it is given is needed
        return _Kind(False, False, frozenset(), False, False, True)
    name = schema.name.split("::")[-1]
    writes: set[int | str] = set()
    for place, argument in enumerate(schema.arguments):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or (argument.name in _RUNNING and "batch_norm" in name):  # of the latter schemas do not tell
            writes |= {place, argument.name}
    return _Kind(
        is_alias=name in ("detach", "alias", "lift_fresh"),
        is_view=not writes
        and (name in _VIEWS or all(one.alias_info is not None for one in schema.returns))
        and bool(schema.returns),
        writes=frozenset(writes),
        overwrites=name in _OVERWRITE or name == "_foreach_zero_",
        is_of_lists=name.startswith(("_foreach_", "_amp_foreach_", "_fused_"))
        and (not name.startswith("_foreach_addc") or schema.overload_name != "Tensor"),  # one tensor has all scalars
        makes_new=name not in _VIEWS and any(one.alias_info is None for one in schema.returns),
    )


def is_alias(func: Any) -> bool:
    """Whether it works on no page, whatever it is given."""
    return _kind(func).is_alias


def new_storages(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Iterator[torch.Tensor]:
    """Tensors of 16 KiB and more among what an operator returned that are in storages which it made."""
    if not _kind(func).makes_new:
        return
    found = [one for one in _tensors(result) if one.nbytes >= SMALL_BYTES and type(one) in _PLAIN]
    if not found:
        return
    given = {storage_id(one) for value in (*args, *kwargs.values()) for one in _tensors(value)}
    for tensor in found:
        if tensor.layout is torch.strided and storage_id(tensor) not in given:
            yield tensor


def touches(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], find: Find) -> Touched:
    """The pages that an operator's arguments are in, each once, in their order."""
    kind = _kind(func)
    if kind.is_alias:
        return _NOTHING
    pages: dict[Page, None] = {}
    written: dict[Page, None] = {}
    read: set[Page] = set()
    is_whole = kind.overwrites
    for place, value in (*enumerate(args), *kwargs.items()):
        for tensor in _tensors(value):
            page = find(storage_id(tensor))
            if page is None:
                continue
            pages[page] = None
            if place not in kind.writes:
                read.add(page)
            else:
                is_whole = is_whole and page not in written
                written[page] = None
                is_whole = is_whole and tensor.nbytes == page.size_bytes and tensor.is_contiguous()
    is_whole = is_whole and read.isdisjoint(written)
    if not pages:
        return _NOTHING
    return Touched(list(pages), list(written), is_whole, kind.is_of_lists, kind.is_view)


def in_parts(
    args: Sequence[Any], kwargs: Mapping[str, Any], find: Find, part_bytes: int
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """The arguments of an operator on lists, for some of their entries at a time: those of about ``part_bytes``."""
    values = [*args, *kwargs.values()]
    length = max((len(one) for one in values if isinstance(one, list | tuple)), default=0)

    def cut(value: Any, start: int, end: int) -> Any:
        is_list = isinstance(value, list | tuple) and len(value) == length
        return list(value[start:end]) if is_list else value

    start, size_bytes = 0, 0
    for at in range(length):
        size_bytes += sum(
            page.size_bytes
            for value in values
            if isinstance(value, list | tuple) and len(value) == length
            for page in [_page(value[at], find)]
            if page is not None
        )
        if size_bytes >= part_bytes or at == length - 1:
            yield (
                [cut(one, start, at + 1) for one in args],
                {name: cut(one, start, at + 1) for name, one in kwargs.items()},
            )
            start, size_bytes = at + 1, 0


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    """Of an argument or a result, in their order."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in _tensors(one)]
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in _tensors(one)]
    return ()


def _page(value: Any, find: Find) -> Page | None:
    return find(storage_id(value)) if isinstance(value, torch.Tensor) else None


def storage_id(tensor: torch.Tensor) -> int:
    """The identity of its storage; 0 where it has none, such as a sparse one."""
    try:
        return int(torch._C._storage_id(tensor))  # type: ignore[attr-defined]
    except (RuntimeError, NotImplementedError):
        return 0
