"""Which of a model's tensors an operator is about to use.

A model that is run whole (`_whole.py`) has most of its tensors elsewhere: on the device they are *hollow*, shapes and
strides over a storage without bytes. Modules announce their own tensors when they are called; whatever is used in
another way, such as a weight that a module's parent reads, is seen here, one operator at a time, before it runs.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from penstock.errors import CaptureError


class Watch(TorchDispatchMode):
    """Asks for tensors that an operator uses and that are hollow.

    ``names`` gives hollow storages, by identity, the names of their tensors, which ``tensors`` has. ``bring(names)`` is
    called for those that an operator uses; it may send others away, so ``keep(names)`` then brings back what of the
    operator's arguments has left, and sends nothing away. ``writes(tensors)`` is told of what one is about to write to.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        tensors: Mapping[str, torch.Tensor],
        bring: Callable[[list[str]], None],
        keep: Callable[[list[str]], None],
        writes: Callable[[list[torch.Tensor]], None],
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._tensors = names, tensors
        self._bring, self._keep, self._writes = bring, keep, writes
        self.note: Callable[[Any], None] | None = None
        """Told what operators make, results of any kind, where somebody wants to know."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """So that Dynamo, in this thread or another, does not give up because of it."""
        return True

    # any: PyTorch's
    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.need([*args, *kwargs.values()]):
            args, kwargs = tree_map_only(torch.Tensor, self.filled, (args, kwargs))
        if func._schema.is_mutable:
            self._writes(list(_written_by(func, args, kwargs)))
        result = func(*args, **kwargs)
        if self.note is not None:
            self.note(result)
        return result

    def need(self, tensors: Sequence[Any]) -> bool:  # any: arguments of an operator
        """Brings what is hollow of ``tensors``; returns whether anything was."""
        hollow = self._hollow(tensors)
        if not hollow:
            return False
        with _disable_current_modes(), torch.no_grad():  # what copies do is nobody's operator
            self._bring(hollow)
            left = self._hollow(tensors)
            if left:
                self._keep(left)
        return True

    def _hollow(self, tensors: Iterable[Any]) -> list[str]:
        found = (self._names.get(tensor.untyped_storage()._cdata) for tensor in tensors_in(tensors))
        return [name for name in found if name is not None]

    def filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or, for an alias made while its storage was hollow (``parameter.data``), the same view."""
        name = self._names.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        if name is None:
            return tensor
        whole = self._tensors[name].data
        return whole.as_strided(tensor.size(), tensor.stride(), whole.storage_offset() + tensor.storage_offset())


class Made:
    """Storages that operators made and that are alive still."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(self, result: Any) -> None:  # any: an operator's
        """Remembers the storages of ``result``."""
        for tensor in tensors_in((result,)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._found and storage.nbytes():
                self._found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def alive_bytes(self, others: Iterable[int]) -> int:
        """Their bytes, without those of ``others``, which are known by identity."""
        self._found = {key: found for key, found in self._found.items() if not found[0].expired()}
        others = set(others)
        return sum(size_bytes for key, (_, size_bytes) in self._found.items() if key not in others)


class Recorder(TorchDispatchMode):
    """Notes in which order operators use a model's tensors, and the bytes that they make in between.

    Raises ``CaptureError`` where one is about to write to ``parameters``.
    """

    def __init__(self, names: Mapping[int, Sequence[str]], parameters: Collection[str]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._parameters = names, parameters
        self.uses: list[tuple[Sequence[str], int]] = []
        """Names of the tensors that an operator used, and bytes that were made until the next such operator."""
        self._known: set[int] = set()

    # any: PyTorch's
    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        used = [
            name
            for tensor in tensors_in([*args, *(kwargs or {}).values()])
            for name in self._names.get(tensor.untyped_storage()._cdata, ())
        ]
        if used:
            self.uses.append((used, 0))
            for tensor in _written_by(func, args, kwargs or {}):
                for name in self._names.get(tensor.untyped_storage()._cdata, ()):
                    if name in self._parameters:
                        raise writes_to(name)
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in((result,)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._names and storage._cdata not in self._known and self.uses:
                self._known.add(storage._cdata)
                names, size_bytes = self.uses[-1]
                self.uses[-1] = names, size_bytes + storage.nbytes()
        return result


def writes_to(name: str) -> CaptureError:
    """The error for a model whose forward writes to a parameter."""
    return CaptureError(
        f"forward writes to the parameter {name}, or to one beside it, which would be lost or happen twice, since its "
        "bytes have copies elsewhere. Register what forward changes as a buffer, or change it in the optimizer"
    )


def _written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:  # any: PyTorch's
    """What an operator writes to in place."""
    if not func._schema.is_mutable:
        return
    writes = {one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write}
    given = zip((one.name for one in func._schema.arguments), args, strict=False)
    yield from tensors_in([value for name, value in (*given, *kwargs.items()) if name in writes])


def tensors_in(things: Iterable[Any]) -> Iterator[torch.Tensor]:  # any: arguments or results of operators
    """The strided tensors in nests of lists and tuples."""
    for thing in things:
        if isinstance(thing, torch.Tensor):
            if thing.layout is torch.strided:
                yield thing
        elif isinstance(thing, list | tuple):
            yield from tensors_in(thing)
