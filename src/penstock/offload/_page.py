"""A storage that is emptied and filled in place, and what is known of it."""

import itertools
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.tiers import Handle, HandleState


class Kind(Enum):
    """What a page is."""

    PARAMETER = "parameters"
    GRADIENT = "gradients"
    STATE = "optimizer state"
    OTHER = "activations"


class Scaling(Protocol):
    """Scales a gradient when it is wanted."""

    def __call__(self) -> None: ...

    def factor_on_host(self) -> Any:  # any: a number, or a tensor with one
        """What it is multiplied by, for whoever does it on the host instead."""


class OnHost(Protocol):
    """Changes bytes in host memory."""

    @property
    def is_done(self) -> bool: ...


class Narrow:
    """Tensors in half precision of which a page is the sum, in their order: gradients that autocast made."""

    __slots__ = ("_dtype", "parts")

    def __init__(self, tensor: torch.Tensor, page: "Page", dtype: torch.dtype):
        self.parts = [(tensor, page)]
        self._dtype = dtype

    def is_here(self) -> bool:
        """Whether all of them are on the device."""
        return all(page.is_here for _, page in self.parts)

    def put(self, number: int, storage: torch.UntypedStorage) -> None:
        """Fills it with the first of them, or adds one, as an operator on the device."""
        tensor = self.parts[number][0]
        wide = torch.empty(0, dtype=self._dtype, device=storage.device)
        wide.set_(storage, 0, tensor.size(), tensor.stride())  # type: ignore[call-overload]
        (wide.add_ if number else wide.copy_)(tensor)


class Page:
    """One storage, filled or emptied."""

    __slots__ = (
        "_name",
        "_weak",
        "handle",
        "identity",
        "is_coming",
        "is_here",
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

    def __init__(self, storage: torch.UntypedStorage, key: int, kind: Kind, name: Any):  # any: a text, an operator
        self._weak = StorageWeakRef(storage)
        self._name = name
        self.identity = storage._cdata
        self.key = key
        """Of the same parameter, gradient or state in every step, though its storage may be another."""
        self.kind = kind
        self.size_bytes = storage.nbytes()
        self.handle: Handle | None = None
        """Of a copy below, or one on its way; ``None`` where the bytes on the device are the only ones."""
        self.pending: Callable[[], None] | None = None
        """The update that is to be done before anybody works on it."""
        self.scaling: Scaling | None = None
        """The same of clipping."""
        self.on_host: OnHost | None = None
        """Who changes its bytes in host memory, which nobody is to copy meanwhile."""
        self.narrow: Narrow | None = None
        """What its bytes are made of, if they are: it is emptied without a copy, then."""
        self.wide: Page | None = None
        """The page that it is a cast of, or that is made of it."""
        self.norm: tuple[Any, int, torch.Tensor] | None = None  # any: a call
        """Of a gradient: how it was asked for, how often the page had been written to, and the norm."""
        self.stale: list[Handle] = []
        """Of copies out that were under way when the bytes changed: they still read the storage."""
        self.is_here = True
        self.is_coming = False
        """Whether its copy in was begun, and not yet asked for."""
        self.last_use = self.stays_until = self.num_writes = 0
        self.rank = 0.0
        """Among those here the lowest leaves first."""

    @property
    def label(self) -> str:
        """What a message calls it."""
        return self._name if isinstance(self._name, str) else f"a result of {self._name}"

    def call(self, name: str, kind: Kind) -> None:
        """It turned out to be this."""
        self._name, self.kind = name, kind

    @property
    def is_dead(self) -> bool:
        """Whether no tensor has the storage any more."""
        return bool(self._weak.expired())

    @property
    def is_ready(self) -> bool:
        """Whether its bytes are on the device, and nothing is to be done before somebody works on them."""
        return self.is_here and self.pending is None and self.scaling is None

    @property
    def is_at_hand(self) -> bool:
        """Whether its bytes are on the device, or what they are made of."""
        return self.is_here or (self.narrow is not None and self.narrow.is_here())

    @property
    def is_clean(self) -> bool:
        """Whether emptying it now loses nothing."""
        return self.handle is not None and self.handle.state is HandleState.PARKED

    def storage(self) -> torch.UntypedStorage | None:
        """The storage itself; ``None`` once it is dead."""
        return torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)  # type: ignore[attr-defined, no-any-return]

    def forget_copy(self) -> None:
        """The copy below is old, or of no use."""
        if self.handle is not None:
            self.handle.release()
            self.handle = None

    def forget_stale(self) -> None:
        """Waits for copies out that read what is about to be freed."""
        while self.stale:
            handle = self.stale.pop()
            handle.finish_out()
            handle.release()

    def held_bytes(self) -> int:
        """Of the device."""
        return self.size_bytes if self.is_here or self.is_coming else 0


class Keys:
    """Numbers for pages by label or by place in the step: more than one where pages of earlier steps live on."""

    def __init__(self) -> None:
        self._by_place: dict[Any, list[int]] = {}  # any: a text, a number
        self._new = itertools.count()

    def free(self, place: Any, taken: Mapping[int, Page]) -> int:
        """The first number of the place that no living page has."""
        keys = self._by_place.setdefault(place, [])
        for key in keys:
            page = taken.get(key)
            if page is None or page.is_dead:
                return key
        keys.append(next(self._new))
        return keys[-1]
