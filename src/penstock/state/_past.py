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

from penstock.state._page import Page
from penstock.state._pages import Pages
from penstock.storages import id_of, id_or_zero

_SHARING = ("numpy", "__array__", "__dlpack__", "share_memory_")
"""Methods whose result shares the storage, for an unknown time."""
_READING = ("tolist", "data_ptr", "__deepcopy__", "__repr__")
"""Methods that read the memory, or return its address, past the dispatcher."""
_CAPSULES = ((torch.utils.dlpack, "to_dlpack"), (torch, "to_dlpack"), (torch._C, "_to_dlpack"))
"""Functions whose result shares the storage of their argument."""
_OF_STORAGES = ("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_")
"""Methods of storages whose result shares the storage, as in a queue between processes."""
_READING_STORAGES = ("size", "__getitem__", "__iter__", "tolist", "cpu", "clone", "copy_", "byteswap", "_byteswap")
"""Methods of storages that read the memory."""
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


_watching: "weakref.WeakSet[Watching]" = weakref.WeakSet()
"""All that watch."""
_replaced: list[tuple[Any, str, Any]] = []  # any: classes and modules, and what they had
_saving = threading.local()


def begin_watching(watcher: Watching) -> None:
    """Report all access to the pages of ``watcher`` from now on."""
    _watching.add(watcher)
    weakref.finalize(watcher, _restore_if_unused)
    if not _replaced:
        _replace_all()


def end_watching(watcher: Watching) -> None:
    """Stop, and restore all functions if nobody else watches."""
    _watching.discard(watcher)
    _restore_if_unused()


def _restore_if_unused() -> None:
    if not list(_watching):
        while _replaced:
            _give_back(*_replaced.pop())


def _place_of(identity: int) -> tuple[Watching, Pages, Page] | None:
    """Return who watches a storage that is a page, and its pages."""
    for watching in list(_watching):
        place = watching.find(identity)
        if place is not None:
            return (watching, *place)
    return None


def do_pending(pages: Iterable[Page]) -> None:
    """Do the updates and scalings that are due on these pages of one training, before anybody works on them."""
    waiting = [page for page in pages if page.pending is not None or page.scaling is not None]
    place = _place_of(waiting[0].identity) if waiting else None
    if place is None:
        return
    watching, own, _ = place
    with watching.entered(), own.lock:
        for page in waiting:  # another thread may have done it in the meantime
            own.allow(page)
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
    for owner, name in _CAPSULES:
        _replace_method(owner, name, _let_go)
    for names, prepare in ((_OF_STORAGES, _let_go), (_READING_STORAGES, _ask_for_address)):
        for name in names:
            if hasattr(torch.UntypedStorage, name):
                _replace_method(torch.UntypedStorage, name, prepare)
    save = torch.serialization._save
    nbytes = torch.UntypedStorage.nbytes
    _put(torch.UntypedStorage, "nbytes", lambda self: _nbytes(nbytes, self))
    data_ptr = torch.UntypedStorage.data_ptr
    _put(torch.UntypedStorage, "data_ptr", lambda self: _data_ptr(data_ptr, self))
    _put(torch.serialization, "_save", functools.wraps(save)(functools.partial(_save, save)))
    run = CompiledFxGraph.__call__

    def run_watched(self: Any, inputs: Sequence[Any]) -> Any:
        runner = functools.partial(run, self)
        for watching in list(_watching):
            runner = functools.partial(watching.compiled, runner)
        return runner(inputs)

    _put(CompiledFxGraph, "__call__", run_watched)
    start = threading.Thread.start

    @functools.wraps(start)
    def start_watched(self: threading.Thread) -> None:
        work = getattr(self, "_target", None) or self.run
        if not str(getattr(work, "__module__", None)).startswith("penstock."):  # a method of C has no module
            self.run = functools.partial(_run_watched, self.run)  # type: ignore[method-assign]
        start(self)

    _put(threading.Thread, "start", start_watched)


def _run_watched(run: Callable[[], None]) -> None:
    """Run a thread of the user's, whose operators are seen by all that watch."""
    with contextlib.ExitStack() as stack:
        for watching in list(_watching):
            stack.enter_context(watching.entered())
        run()


def _replace_method(kind: Any, name: str, prepare: Callable[[Pages, Page], None]) -> None:  # any: a class or a module
    method = getattr(kind, name)

    @functools.wraps(method)
    def prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        place = _place_of(id_of(self) if isinstance(self, torch.UntypedStorage) else id_or_zero(self))
        if place is not None and not place[1].is_moving:
            _, pages, page = place
            _refuse_taking_all(sys._getframe(1).f_globals.get("__name__", ""), pages, page)
            do_pending([page])
            prepare(pages, page)
        return method(self, *args, **kwargs)

    _put(kind, name, prepared)


def _refuse_taking_all(caller: str, pages: Pages, page: Page) -> None:
    """Raise ``ValueError`` if a library asks that needs the memory of all tensors at once."""
    if caller == _TAKES_ALL and page not in pages.register.pinned:
        raise ValueError(
            f"safetensors takes {page.label} and all other tensors of a file at once, which may exceed the budget. "
            "training.save_weights(path) writes such files one part at a time. If everything fits the device: with "
            "training.whole(): model.save_pretrained(path)"
        )


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
        writer.begin(pages)
    elif page not in pages.register.pinned:
        raise ValueError(
            f"{page.label} may be in another tier now, where pickle cannot find it. Use torch.save(model.state_dict(), "
            "path). For anything else, bring everything to the device: with training.whole(): pickle.dumps(model)"
        )


# torch.save first pickles everything, with references to storages, and then writes the storages one by one


def _save(save: Callable[..., None], what: Any, file: Any, *rest: Any, **options: Any) -> None:
    if hasattr(_saving, "writer") or not list(_watching):
        save(what, file, *rest, **options)
        return
    _saving.writer = writer = _ArchiveWriter(file)
    try:
        with contextlib.ExitStack() as stack:
            for watching in list(_watching):
                stack.enter_context(watching.entered())
            save(what, writer, *rest, **options)
    finally:
        writer.let_go()
        del _saving.writer


class _ArchiveWriter:
    """A wrapper of PyTorch's archive writer that knows when pickling has ended and which page is being written."""

    def __init__(self, file: Any):
        self._file = file
        self._is_writing = False
        self._begun: list[Pages] = []
        self._pinned: tuple[Pages, Page] | None = None

    def begin(self, pages: Pages) -> None:
        """Note that a page is among what is saved, and do all due updates first, since they change numbers outside of
        pages.
        """
        if pages not in self._begun:
            self._begun.append(pages)
            do_all_pending(pages)

    def size_bytes(self, identity: int) -> int | None:
        """Return the bytes of a page's storage, ``None`` for other storages.

        PyTorch asks for the size before it writes a storage. So the page is fetched here and stays until it is written.
        """
        place = _place_of(identity)
        if place is None or place[1].is_moving:
            return None
        _, pages, page = place
        if self._is_writing:
            self.let_go()
            with pages.lock:
                pages.need([page], [])
                if page not in pages.register.pinned:
                    pages.register.pinned.add(page)
                    self._pinned = pages, page
        return page.size_bytes

    def let_go(self) -> None:
        """Let the page that was written last leave again."""
        if self._pinned is not None:
            (pages, page), self._pinned = self._pinned, None
            with pages.lock:
                pages.register.pinned.discard(page)

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


def _data_ptr(own: Callable[[torch.UntypedStorage], int], storage: torch.UntypedStorage) -> int:
    """Return the address of a storage, of a page once it is on the device.

    It is 0 for a page while this thread pickles, which only compares addresses of storages.
    """
    caller = sys._getframe(2).f_globals.get("__name__", "")
    place = None if caller.startswith("penstock.") else _place_of(id_of(storage))
    if place is None or place[1].is_moving:
        return own(storage)
    if hasattr(_saving, "writer"):
        return 0
    _, pages, page = place
    _refuse_taking_all(caller, pages, page)
    do_pending([page])
    pages.ask_for_address(page)
    return own(storage)
