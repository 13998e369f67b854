"""Which storages are pages, and under which keys."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.state._page import Page, PageKind
from penstock.storages import id_of


class Register:
    """The pages of one device by storage and by key, and the storages that must not become pages."""

    def __init__(self) -> None:
        self.pinned: set[Page] = set()
        """Pages that stay on the device, whatever the budget is."""
        self.num_changes = 0
        """Counts every time that a storage becomes a page or stops being one."""
        self.due: dict[int, Callable[[], None]] = {}
        """By storages that are no pages, what is to be called before anybody works on them. Whoever adds one keeps the
        storage alive.
        """
        self._by_storage: dict[int, Page] = {}
        self._by_key: dict[int, Page] = {}
        self._last: dict[int, Page] = {}
        """The last page of each key, also if it is dead."""
        self._left_alone: dict[int, StorageWeakRef] = {}
        self._keys = _Keys()

    def find(self, identity: int) -> Page | None:
        """Return the page of a living storage, by the storage's identity.

        No other storage has the identity of a dead page's, as long as that page is not dropped: the page's weak
        reference keeps it taken. If something is `due` on a storage that is no page, it is done.
        """
        page = self._by_storage.get(identity)
        if page is None and identity in self.due:
            self.due[identity]()
        return page

    def add(
        self, storage: torch.UntypedStorage, kind: PageKind, name: Any, place: Any
    ) -> Page:  # any: a text, an operator
        """Make a storage a page; ``place`` tells which page of earlier steps it corresponds to."""
        page = Page(storage, self._keys.free(place, self._by_key), kind, name)
        self._by_storage[page.identity] = self._by_key[page.key] = self._last[page.key] = page
        self.num_changes += 1
        return page

    def places(self) -> dict[Any, list[int]]:  # any: see `add`
        """Return the keys of pages by their place, which is the same in each run."""
        return {place: [*keys] for place, keys in self._keys.by_place.items()}

    def restore(self, places: dict[Any, list[int]]) -> None:
        """Give places the keys that they had in an earlier run, and the pages so far, too."""
        place_of = {key: place for place, keys in self._keys.by_place.items() for key in keys}
        pages, self._keys = list(self._by_key.values()), _Keys(places)
        self._by_key, self._last = {}, {}
        for page in pages:
            page.key = self._keys.free(place_of[page.key], self._by_key)
            self._by_key[page.key] = self._last[page.key] = page

    def rekey(self, page: Page, place: Any, *, is_new: bool) -> bool:  # any: see `add`
        """Move a page to another place; return whether it has another key now.

        A page that is not new, so that operators know its key, is moved only if no page was at the place before.
        """
        key = self._keys.free(place, self._by_key)
        if self._by_key.get(page.key) is not page or (key in self._last and not is_new):
            return False
        del self._by_key[page.key]
        page.key = key
        self._by_key[key] = self._last[key] = page
        return True

    def remove(self, page: Page) -> None:
        """Forget a page."""
        self.num_changes += 1
        if self._by_storage.get(page.identity) is page:
            del self._by_storage[page.identity]
        if self._by_key.get(page.key) is page:
            del self._by_key[page.key]

    def with_key(self, key: int) -> Page | None:
        """Return the living page that has a key."""
        page = self._by_key.get(key)
        return None if page is None or page.is_dead else page

    def last_with_key(self, key: int) -> Page | None:
        """Return the page that has a key, dead or alive."""
        return self._by_key.get(key)

    def label(self, key: int) -> str:
        """Return the name of the last page that had a key."""
        return self._last[key].label

    def leave_alone(self, page: Page) -> None:
        """Let the page's storage never become a page again, since somebody uses it past the dispatcher."""
        storage = page.storage()
        if storage is not None:
            self._left_alone[page.identity] = StorageWeakRef(storage)

    def is_left_alone(self, storage: torch.UntypedStorage) -> bool:
        """Whether `leave_alone` was called for a page of this storage."""
        weak = self._left_alone.get(id_of(storage)) if self._left_alone else None
        return weak is not None and not weak.expired()

    def everything(self) -> list[Page]:
        """Return all pages, also dead ones that nobody has dropped yet."""
        return list(self._by_storage.values())

    def __iter__(self) -> Iterator[Page]:
        return iter([page for page in self._by_storage.values() if not page.is_dead])

    def __len__(self) -> int:
        return len(self._by_storage)


class _Keys:
    """Keys for pages by label or by position in the step. A place has several where pages of earlier steps live on."""

    def __init__(self, by_place: dict[Any, list[int]] | None = None):  # any: a text, a number
        self.by_place = by_place or {}
        self._new = itertools.count(1 + max(itertools.chain.from_iterable(self.by_place.values()), default=-1))

    def free(self, place: Any, taken: Mapping[int, Page]) -> int:
        """Return the first key of the place that no living page has."""
        keys = self.by_place.setdefault(place, [])
        for key in keys:
            page = taken.get(key)
            if page is None or page.is_dead:
                return key
        keys.append(next(self._new))
        return keys[-1]
