"""Access to pages that bypasses the dispatcher: tensor methods, compiled graphs, ``torch.save``.

While a training is open, these functions are replaced by ones that fetch a page before its memory is read, or raise.
"""

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from penstock.offload._operators import id_or_zero
from penstock.offload._page import Page
from penstock.offload._pages import Pages
from penstock.storages import id_of

_SHARING = ("numpy", "__array__", "__dlpack__", "share_memory_")
"""Methods whose result shares the storage, for an unknown time."""
_READING = ("tolist", "data_ptr", "__deepcopy__")
"""Methods that read the memory, or return its address, past the dispatcher."""
_PICKLING = "__reduce_ex__"
_TAKES_ALL = "safetensors.torch"
"""A module that needs the memory of all tensors of a file at once."""


class Watching(Protocol):
    """An object that knows the pages of a training."""

    @property
    def pages(self) -> Pages | None:
        """Its pages; ``None`` once they are gone, or if they belong to another process."""

    def find(self, identity: int) -> tuple[Pages, Page] | None:
        """Return the pages and the page of a storage, by the storage's identity."""

    def compiled(self, run: Callable[..., Any], inputs: Sequence[Any]) -> Any:  # any: tensors and numbers
        """Run a compiled graph."""

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """See this thread's operators while the block runs, whichever thread it is."""


_watching: "list[weakref.ref[Watching]]" = []
"""The one that watches; at most one."""
_replaced: list[tuple[Any, str, Any]] = []  # any: classes and modules, and what they had
_saving = threading.local()


def begin_watching(watcher: Watching) -> None:
    """Report all access to ``watcher`` from now on. Raises ``ValueError`` if another one watches."""
    if _watcher() is not None:
        raise ValueError(
            "another training is open in this process; call its close() first. To train models together, combine "
            "them: training(nn.ModuleList([generator, discriminator]), optimizer, ...)"
        )
    _watching[:] = [weakref.ref(watcher)]
    _replace_all()


def end_watching(watcher: Watching) -> None:
    """Restore all functions, if ``watcher`` is the one that watches."""
    if _watcher() is watcher:
        _watching.clear()
        while _replaced:
            _give_back(*_replaced.pop())


def _watcher() -> Watching | None:
    return _watching[0]() if _watching else None


def do_pending(pages: Iterable[Page]) -> None:
    """Do the updates and scalings that are due on these pages, before anybody works on them."""
    waiting = [page for page in pages if page.pending is not None or page.scaling is not None]
    watching = _watcher() if waiting else None
    if watching is None:
        return
    own = watching.pages
    with watching.entered(), contextlib.nullcontext() if own is None else own.lock:
        for page in waiting:  # another thread may have done it in the meantime
            if page.pending is not None:
                page.pending()
            if page.scaling is not None:
                page.scaling()


def do_all_pending(pages: Pages) -> None:
    """Do all due updates within the budget, for a caller that looks at everything."""
    with pages.lock:
        if pages.course.is_in_step:
            do_pending(list(pages))
            return
        pages.begin_step()  # so that temporary results of updates are pages
        try:
            do_pending(list(pages))
        finally:
            pages.end_step((), is_whole=False)


def _replace_all() -> None:
    from torch._inductor.output_code import CompiledFxGraph  # takes seconds, and imports Triton

    for name in _SHARING:
        _replace_method(torch.Tensor, name, _let_go)
    for name in _READING:
        _replace_method(torch.Tensor, name, _ask_for_address)
    for kind in (torch.Tensor, nn.Parameter):
        _replace_method(kind, _PICKLING, _refuse_pickling)
    save = torch.serialization._save
    nbytes = torch.UntypedStorage.nbytes
    _put(torch.UntypedStorage, "nbytes", lambda self: _nbytes(nbytes, self))
    _put(torch.serialization, "_save", functools.wraps(save)(functools.partial(_save, save)))
    run = CompiledFxGraph.__call__

    def run_watched(self: Any, inputs: Sequence[Any]) -> Any:
        watching = _watcher()
        return run(self, inputs) if watching is None else watching.compiled(functools.partial(run, self), inputs)

    _put(CompiledFxGraph, "__call__", run_watched)


def _replace_method(kind: type, name: str, prepare: Callable[[Pages, Page], None]) -> None:
    method = getattr(kind, name)

    @functools.wraps(method)
    def prepared(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        watching = _watcher()
        place = None if watching is None else watching.find(id_or_zero(self))
        if place is not None:
            pages, page = place
            if sys._getframe(1).f_globals.get("__name__") == _TAKES_ALL and page not in pages.register.pinned:
                raise ValueError(
                    f"safetensors takes {page.label} and all other tensors of a file at once, which may exceed the "
                    "budget. training.save_weights(path) writes such files one part at a time. If everything fits the "
                    "device: with training.whole(): model.save_pretrained(path)"
                )
            do_pending([page])
            prepare(pages, page)
        return method(self, *args, **kwargs)

    _put(kind, name, prepared)


def _put(owner: Any, name: str, new: Any) -> None:
    _replaced.append((owner, name, owner.__dict__.get(name)))
    setattr(owner, name, new)


def _give_back(owner: Any, name: str, old: Any) -> None:
    if old is None:  # the class had inherited it
        delattr(owner, name)
    else:
        setattr(owner, name, old)


def _let_go(pages: Pages, page: Page) -> None:
    pages.let_go(page)


def _ask_for_address(pages: Pages, page: Page) -> None:
    pages.ask_for_address(page)


def _refuse_pickling(pages: Pages, page: Page) -> None:
    writer: _ArchiveWriter | None = getattr(_saving, "writer", None)
    if writer is not None:
        writer.begin()
    elif page not in pages.register.pinned:
        raise ValueError(
            f"{page.label} may be in another tier now, where pickle cannot find it. Use torch.save(model.state_dict(), "
            "path). For anything else, bring everything to the device: with training.whole(): pickle.dumps(model)"
        )


# torch.save first pickles everything, with references to storages, and then writes the storages one by one


def _save(save: Callable[..., None], what: Any, file: Any, *rest: Any, **options: Any) -> None:
    watching = _watcher()
    pages = None if watching is None else watching.pages
    if watching is None or pages is None or hasattr(_saving, "writer"):
        save(what, file, *rest, **options)
        return
    _saving.writer = writer = _ArchiveWriter(file, pages)
    try:
        with watching.entered():
            save(what, writer, *rest, **options)
    finally:
        writer.let_go()
        del _saving.writer


class _ArchiveWriter:
    """A wrapper of PyTorch's archive writer that knows when pickling has ended and which page is being written."""

    def __init__(self, file: Any, pages: Pages):
        self._file, self._pages = file, pages
        self._is_writing = self._has_pages = False
        self._pinned: Page | None = None

    def begin(self) -> None:
        """Note that a page is among what is saved, and do all due updates first, since they change numbers outside of
        pages.
        """
        if not self._has_pages:
            self._has_pages = True
            do_all_pending(self._pages)

    def size_bytes(self, identity: int) -> int | None:
        """Return the bytes of a page's storage, ``None`` for other storages.

        PyTorch asks for the size before it writes a storage. So the page is fetched here and stays until it is written.
        """
        page = self._pages.find(identity)
        if page is None or self._pages.is_moving:
            return None
        if self._is_writing:
            self.let_go()
            with self._pages.lock:
                self._pages.need([page], [])
                if page not in self._pages.register.pinned:
                    self._pages.register.pinned.add(page)
                    self._pinned = page
        return page.size_bytes

    def let_go(self) -> None:
        """Let the page that was written last leave again."""
        with self._pages.lock:
            if self._pinned is not None:
                self._pages.register.pinned.discard(self._pinned)
                self._pinned = None

    def write_record(self, *arguments: Any) -> None:
        self._is_writing = True
        self._file.write_record(*arguments)
        self.let_go()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _nbytes(own: Callable[[torch.UntypedStorage], int], storage: torch.UntypedStorage) -> int:
    writer: _ArchiveWriter | None = getattr(_saving, "writer", None)  # of this thread
    size_bytes = None if writer is None else writer.size_bytes(id_of(storage))
    return own(storage) if size_bytes is None else size_bytes
