"""The part of a step that runs outside of planned graphs. What autograd saves there is counted, or offloaded to a tier.

Code that Dynamo leaves eager saves its activations as plain PyTorch does. Hooks around the call see each of them.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from penstock.storages import id_of, storage_id
from penstock.tiers import Budget, check_version, version_of

_TINY_BYTES = 1024
"""Size below which storages are not counted."""


class Offloading(Protocol):
    """A context that offloads what the eager rest saves, such as those of `penstock.offload`."""

    def __enter__(self) -> object:
        """Enter it around the call of a step."""

    def __exit__(self, *_: Any) -> None:
        """Leave it at the end of the call."""

    def close(self) -> None:
        """Close it. Nothing is moved any more."""


MakeOffloading = Callable[[nn.Module, Budget], Offloading]
"""A function that makes an ``Offloading`` for a module and an account."""


class EagerRest:
    """A counter of the bytes that autograd saves outside of planned graphs."""

    def __init__(self) -> None:
        self.held_bytes = 0
        """Bytes that are saved now and wait for backward."""
        self.peak_bytes = 0
        """The most bytes at once since the last reading."""
        self._standing: frozenset[int] = frozenset()
        """Storages that exist anyway."""
        self._entries: weakref.WeakValueDictionary[int, _SavedStorage] = weakref.WeakValueDictionary()

    @contextlib.contextmanager
    def counting(self, standing: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Count what is saved inside this context until it is freed.

        Parameters and ``standing`` do not count, because they exist anyway.
        """
        self._standing = frozenset(storage_id(tensor) for tensor in standing if _is_counted(tensor))
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def take_peak(self) -> int:
        """Return the most bytes at once since the last call of this method."""
        peak, self.peak_bytes = self.peak_bytes, self.held_bytes
        return peak

    @torch._disable_dynamo  # type: ignore[attr-defined]  # torch.compiler.disable would import all of Dynamo here
    def _pack(self, tensor: torch.Tensor) -> "_SavedTensor":
        entry = None
        base = tensor if tensor._base is None else tensor._base
        is_parameter = base.is_leaf and base.requires_grad
        if _is_counted(tensor) and not is_parameter:
            storage = tensor.untyped_storage()
            key, size_bytes = id_of(storage), storage.nbytes()
            if size_bytes >= _TINY_BYTES and key not in self._standing:
                entry = self._entries.get(key)
                if entry is None:
                    entry = self._entries[key] = _SavedStorage(self, size_bytes)
        return _SavedTensor(tensor, entry)


class _SavedStorage:
    """One saved storage."""

    __slots__ = ("__weakref__", "_rest", "_size_bytes")

    def __init__(self, rest: EagerRest, size_bytes: int):
        self._rest, self._size_bytes = rest, size_bytes
        rest.held_bytes += size_bytes
        rest.peak_bytes = max(rest.peak_bytes, rest.held_bytes)

    def __del__(self) -> None:
        self._rest.held_bytes -= self._size_bytes


class _SavedTensor:
    """A saved tensor, with a check of our own for changes in place, because hooks switch off PyTorch's."""

    __slots__ = ("entry", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, entry: _SavedStorage | None):
        self.tensor = tensor if tensor.is_leaf else tensor.detach()  # a node's own result would keep the node alive
        self.version = version_of(tensor)
        self.entry = entry


def _is_counted(tensor: torch.Tensor) -> bool:
    """Whether the tensor has plain bytes of its own."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not is_wrapped


def users_hooks() -> Any:  # any: whatever can be called
    """Return the function by which hooks of the user's pack saved tensors now, or ``None``.

    They may change tensors as they like. Hooks of PyTorch's and ours give back what they got.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    if hooks is None or not torch.is_grad_enabled():
        return None
    is_known = (getattr(hooks[0], "__module__", None) or "").startswith(("torch.", "penstock."))
    return None if is_known else hooks[0]


def refuse_hooks() -> None:
    """Raise ``ValueError`` if hooks of the user's are open.

    A plan saves other tensors than the model alone, and hands them over behind a ticket that hooks do not see.
    """
    pack = users_hooks()
    if pack is not None:
        raise ValueError(
            f"saved_tensors_hooks({getattr(pack, '__qualname__', pack)}, ...) is open around a planned step, which "
            "saves other tensors than the model alone and does not pass them to hooks. Call the step outside of them. "
            "To train with them, offload instead: with penstock.offload.activations(model, budget='6GiB'), inside of "
            "which they can be open around parts of the model"
        )


def are_hooks_off() -> bool:
    """Whether this thread is inside of ``torch.func.grad`` or its kind, where PyTorch refuses hooks."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None  # type: ignore[attr-defined]


def is_refused_beside(error: RuntimeError) -> bool:
    """Whether ``torch.func`` refuses to work together with hooks.

    Dynamo may have switched hooks off while it tried; they are switched on again.
    """
    if "saved tensor hooks" not in str(error):
        return False
    torch._C._autograd._saved_tensors_hooks_enable()  # type: ignore[attr-defined]
    return True


@torch._disable_dynamo  # type: ignore[attr-defined]
def _unpack(saved: _SavedTensor) -> torch.Tensor:
    check_version(saved.tensor, saved.version)
    return saved.tensor
