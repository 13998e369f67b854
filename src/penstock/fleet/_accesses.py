"""Detection of the model's tensors that an operator is about to use.

A model that is run whole (`_whole.py`) keeps most of its tensors off the device. There they are *hollow*: shapes and
strides over a storage without bytes. Modules announce their own tensors when they are called. Any other use, such as a
weight that a module's parent reads, is detected here, one operator at a time, before the operator runs.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from penstock.errors import CaptureError
from penstock.fleet._job import CannotBeCut
from penstock.storages import id_of, storage_id


class HollowWatch(TorchDispatchMode):
    """A dispatch mode that asks for the hollow tensors which an operator uses.

    ``names`` maps hollow storages, by identity, to the names of their tensors in ``tensors``. ``bring(names)`` is
    called for those that an operator uses. It may send others away, so ``keep(names)`` then brings back those of the
    operator's arguments that have left, and sends nothing away. ``writes(tensors)`` receives the tensors that an
    operator is about to write to.
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
        """A callback that receives the results, of any kind, of every operator; ``None`` if nobody needs them."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return ``True``, so that Dynamo, in this thread or another, does not give up because of this mode."""
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
        """Bring the hollow ones of ``tensors`` to the device, and return whether there were any."""
        hollow = self._hollow(tensors)
        if not hollow:
            return False
        with _disable_current_modes(), torch.no_grad():  # the operators of these copies are not the model's
            self._bring(hollow)
            left = self._hollow(tensors)
            if left:
                self._keep(left)
        return True

    def _hollow(self, tensors: Iterable[Any]) -> list[str]:
        names = (self._names.get(storage_id(tensor)) for tensor in tensors_in(tensors))
        return [name for name in names if name is not None]

    def filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or the same view of the filled storage for a hollow alias (``parameter.data``)."""
        name = self._names.get(storage_id(tensor)) if tensor.layout is torch.strided else None
        if name is None:
            return tensor
        whole = self._tensors[name].data
        return whole.as_strided(tensor.size(), tensor.stride(), whole.storage_offset() + tensor.storage_offset())


class Made:
    """Storages that operators made and that are still alive."""

    # Not looked up in the garbage collector's list: while other threads run, that breaks Python, because a tuple that
    # is being built cannot be resized if something else refers to it (SystemError: bad argument to internal function).

    def __init__(self) -> None:
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(self, result: Any) -> None:  # any: an operator's
        """Remember the storages of ``result``."""
        for tensor in tensors_in((result,)):
            storage = tensor.untyped_storage()
            if id_of(storage) not in self._found and storage.nbytes():
                self._found[id_of(storage)] = StorageWeakRef(storage), storage.nbytes()

    def alive_bytes(self, others: Iterable[int]) -> int:
        """Return the bytes of these storages, without those whose identities are in ``others``."""
        self._found = {key: entry for key, entry in self._found.items() if not entry[0].expired()}
        others = set(others)
        return sum(size_bytes for key, (_, size_bytes) in self._found.items() if key not in others)


class Recorder(TorchDispatchMode):
    """A dispatch mode that records the order in which operators use a model's tensors, and the bytes made in between.

    Raises ``CaptureError`` if an operator is about to write to ``parameters``, and ``CannotBeCut`` at sparse tensors.
    """

    def __init__(self, names: Mapping[int, Sequence[str]], parameters: Collection[str]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._parameters = names, parameters
        self.uses: list[tuple[Sequence[str], int]] = []
        """Per operator that uses tensors: their names, and the bytes made until the next such operator."""
        self._known: set[int] = set()

    # any: PyTorch's
    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        used = [
            name
            for tensor in tensors_in([*args, *(kwargs or {}).values()])
            for name in self._names.get(storage_id(tensor), ())
        ]
        if used:
            self.uses.append((used, 0))
            for tensor in _written_by(func, args, kwargs or {}):
                for name in self._names.get(storage_id(tensor), ()):
                    if name in self._parameters:
                        raise writes_to(name)
        result = func(*args, **(kwargs or {}))
        if any(tensor.layout is not torch.strided for tensor in (result, *args) if isinstance(tensor, torch.Tensor)):
            raise CannotBeCut("its forward uses sparse tensors")
        for tensor in tensors_in((result,)):
            storage = tensor.untyped_storage()
            if id_of(storage) not in self._names and id_of(storage) not in self._known and self.uses:
                self._known.add(id_of(storage))
                names, size_bytes = self.uses[-1]
                self.uses[-1] = names, size_bytes + storage.nbytes()
        return result


def writes_to(name: str) -> CaptureError:
    """Return the error for a model whose forward writes to a parameter."""
    return CaptureError(
        f"forward writes to the parameter {name}, or to another one in the same storage. Such a write would be lost or "
        "applied twice, because other copies of these bytes exist. Register what forward changes as a buffer, or "
        "change it in the optimizer"
    )


def _written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:  # any: PyTorch's
    """Yield the tensors that an operator writes to in place."""
    if not func._schema.is_mutable:
        return
    writes = {
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    values = zip((argument.name for argument in func._schema.arguments), args, strict=False)
    yield from tensors_in([value for name, value in (*values, *kwargs.items()) if name in writes])


def tensors_in(things: Iterable[Any]) -> Iterator[torch.Tensor]:  # any: arguments or results of operators
    """Yield the strided tensors in nested lists and tuples."""
    for thing in things:
        if isinstance(thing, torch.Tensor):
            if thing.layout is torch.strided:
                yield thing
        elif isinstance(thing, list | tuple):
            yield from tensors_in(thing)
