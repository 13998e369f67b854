"""A page: a storage that is emptied and filled in place, with its state."""

from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.storages import id_of, is_gone, storage_of
from penstock.tiers import Handle, HandleState, HostWork


class PageKind(Enum):
    """The kind of bytes in a page."""

    __hash__ = object.__hash__  # the enum's own takes a call in Python

    PARAMETER = "parameters"
    GRADIENT = "gradients"
    STATE = "optimizer state"
    OTHER = "activations"


class Scaling(Protocol):
    """A function that scales a gradient when the gradient is needed."""

    def __call__(self) -> None: ...

    def factor_on_host(self) -> Any:  # any: a number, or a tensor with one
        """Return the factor, for use on the host instead."""


class OnHost(HostWork, Protocol):
    """An update on the host that changes a page's bytes in host memory."""

    @property
    def parameter(self) -> torch.Tensor: ...

    def forget(self) -> None:
        """Do not wait for anybody any more who looks at its small states."""


class Narrow:
    """Tensors of another precision whose sum, in their order, is a page.

    They are the half-precision gradients that autocast made, or the weight of which a page is the cast.
    """

    __slots__ = ("_dtype", "parts")

    def __init__(self, tensor: torch.Tensor, page: "Page", dtype: torch.dtype):
        self.parts = [(tensor, page)]
        self._dtype = dtype

    def is_here(self) -> bool:
        """Return whether all of them are on the device."""
        return all(page.is_here for _, page in self.parts)

    def is_held(self) -> bool:
        """Return whether all of them are on the device or on their way to it."""
        return all(page.held_bytes() for _, page in self.parts)

    def put(self, number: int, storage: torch.UntypedStorage) -> None:
        """Fill the page with the first of them, or add a further one, as an operator on the device would."""
        tensor = self.parts[number][0]
        wide = torch.empty(0, dtype=self._dtype, device=storage.device)
        wide.set_(storage, 0, tensor.size(), tensor.stride())  # type: ignore[call-overload]
        (wide.add_ if number else wide.copy_)(tensor)


class Page:
    """One storage, filled or emptied.

    It is wide because each mechanism that may delay, replace or forbid its copies leaves a mark on it, and all marks
    are read for every operator: updates, scaling, casts, the host's work.
    """

    __slots__ = (
        "_name",
        "_weak",
        "cast",
        "handle",
        "identity",
        "is_coming",
        "is_here",
        "is_refused",
        "key",
        "kind",
        "last_use",
        "narrow",
        "norm",
        "num_writes",
        "on_host",
        "pending",
        "rank",
        "scaling",
        "size_bytes",
        "stale",
        "stays_until",
        "wide",
    )

    def __init__(self, storage: torch.UntypedStorage, key: int, kind: PageKind, name: Any):  # any: a text, an operator
        self._weak = StorageWeakRef(storage)
        self._name = name
        self.identity = id_of(storage)
        self.key = key
        """The key of the same parameter, gradient or state in every step, even if its storage changes."""
        self.kind = kind
        self.size_bytes = len(storage)
        self.handle: Handle | None = None
        """The handle of a copy in a lower tier, finished or under way; ``None`` if the bytes are only on the device."""
        self.pending: Callable[[], None] | None = None
        """The update that is due before anybody works on this page."""
        self.scaling: Scaling | None = None
        """The scaling, for clipping, that is due before anybody works on this page."""
        self.on_host: OnHost | None = None
        """The update that changes its bytes in host memory; meanwhile they must not be copied."""
        self.narrow: Narrow | None = None
        """The tensors that it is the sum of, if any. Such a page is emptied without a copy."""
        self.cast: Page | None = None
        """For a weight: the cast of it that is emptied without a copy."""
        self.wide: Page | None = None
        """The page that this one is a cast of, or that is made from this one."""
        self.norm: tuple[Any, int, torch.Tensor] | None = None  # any: a call
        """For a gradient: the call that asked for its norm, the page's number of writes at the time, and the norm."""
        self.stale: list[Handle] = []
        """Handles of copies out that were under way when the bytes changed. They still read the storage."""
        self.is_here = True
        self.is_refused = False
        """Whether its memory is refused to whoever asks for it."""
        self.is_coming = False
        """Whether its copy in has begun, and nobody has asked for it yet."""
        self.last_use = self.stays_until = self.num_writes = 0
        self.rank = 0.0
        """Among the pages on the device, the one with the lowest rank leaves first."""

    @property
    def label(self) -> str:
        """The page's name in messages."""
        return self._name if isinstance(self._name, str) else f"a result of {self._name}"

    def call(self, name: str, kind: PageKind) -> None:
        """Give the page another name and kind, once it turns out what it is."""
        self._name, self.kind = name, kind

    @property
    def is_dead(self) -> bool:
        """Whether no tensor uses the storage any more."""
        return is_gone(self._weak)

    @property
    def is_at_hand(self) -> bool:
        """Whether its bytes, or the tensors it is the sum of, are on the device."""
        return self.is_here or (self.narrow is not None and self.narrow.is_here())

    @property
    def is_clean(self) -> bool:
        """Whether emptying it now loses nothing, since a copy is in a lower tier."""
        return self.handle is not None and self.handle.state is HandleState.PARKED

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage; ``None`` once it is dead."""
        return storage_of(self._weak)

    def forget_copy(self) -> None:
        """Release the copy in a lower tier, which is outdated or useless."""
        if self.handle is not None:
            self.handle.release()
            self.handle = None

    def forget_stale(self) -> None:
        """Wait for outdated copies out that still read the storage, which is about to be freed."""
        while self.stale:
            handle = self.stale.pop()
            handle.finish_out()
            handle.release()

    def held_bytes(self) -> int:
        """Return the bytes that it takes on the device."""
        return self.size_bytes if self.is_here or self.is_coming else 0
