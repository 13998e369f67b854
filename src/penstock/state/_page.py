"""A page: a storage that is emptied and filled in place, with its state."""

from enum import Enum
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.errors import InternalError
from penstock.storages import id_of, is_gone, storage_of
from penstock.tiers import Handle, HandleState, HostWork


class PageKind(Enum):
    """The kind of bytes in a page."""

    __hash__ = object.__hash__  # the enum's own takes a call in Python

    PARAMETER = "parameters"
    GRADIENT = "gradients"
    STATE = "optimizer state"
    OTHER = "activations"


class PageState(Enum):
    """Where a page's bytes are, by what was begun, and not by what has ended."""

    __hash__ = object.__hash__

    HERE = "here"
    """On the device, to stay."""
    LEAVING = "leaving"
    """On the device, and emptied once a tier below has them."""
    AWAY = "away"
    """In a tier below, or in the pages that it is made from."""
    COMING = "coming"
    """In a tier below; a copy in has begun, and nobody has asked for the page yet."""
    DROPPED = "dropped"
    """No page any more: dead, or somebody else's."""


CHANGES = {
    PageState.HERE: (PageState.LEAVING, PageState.AWAY, PageState.DROPPED),
    PageState.LEAVING: (PageState.HERE, PageState.AWAY, PageState.DROPPED),
    PageState.AWAY: (PageState.COMING, PageState.HERE, PageState.DROPPED),
    PageState.COMING: (PageState.HERE, PageState.AWAY, PageState.DROPPED),
    PageState.DROPPED: (),
}
"""The states that may follow each state."""


class Scaling(Protocol):
    """A function that scales a gradient when the gradient is needed."""

    def __call__(self) -> None: ...

    def factor_on_host(self) -> Any:  # any: a number, or a tensor with one
        """Return the factor, for use on the host instead."""


class Due(Protocol):
    """An update that is due before anybody works on its pages."""

    @property
    def parameter(self) -> torch.Tensor: ...

    @property
    def host_work(self) -> HostWork | None:
        """The work of another thread that changes bytes in host memory, which must not be copied meanwhile."""

    def __call__(self) -> None: ...

    def forget(self) -> None:
        """Do not wait for anybody any more."""


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
        "is_here",
        "is_refused",
        "key",
        "kind",
        "last_use",
        "narrow",
        "norm",
        "num_writes",
        "pending",
        "rank",
        "scaling",
        "size_bytes",
        "stale",
        "state",
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
        self.pending: Due | None = None
        """The update that is due before anybody works on this page."""
        self.scaling: Scaling | None = None
        """The scaling, for clipping, that is due before anybody works on this page."""
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
        self.state = PageState.HERE
        self.is_here = True
        """Whether its bytes are on the device: `PageState.HERE` or ``LEAVING``. Asked for at every operator."""
        self.is_refused = False
        """Whether its memory is refused to whoever asks for it."""
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
    def host_work(self) -> HostWork | None:
        """The work that changes its bytes in host memory, if any is due."""
        return None if self.pending is None else self.pending.host_work

    def become(self, state: PageState) -> None:
        """Change the state. Raises ``InternalError`` where `CHANGES` has no such change."""
        if state not in CHANGES[self.state]:
            raise InternalError(f"{self.label} is {self.state.value} and cannot become {state.value}")
        self.state = state
        self.is_here = state is PageState.HERE or state is PageState.LEAVING

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
        return self.size_bytes if self.is_here or self.state is PageState.COMING else 0
