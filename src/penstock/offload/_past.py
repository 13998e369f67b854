"""Who reads pages past the dispatcher: methods of tensors, compiled graphs, ``torch.save``.

While a training is open, they are replaced by what fetches a page before its memory is read, or refuses to.
"""

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from penstock.offload._operators import storage_id
from penstock.offload._page import Page
from penstock.offload._pages import Pages

_SHARING = ("numpy", "__array__", "__dlpack__", "share_memory_")
"""Methods whose result is the storage itself, for nobody knows how long."""
_READING = ("tolist", "data_ptr", "__deepcopy__")
"""Methods that read its memory, or give its address away, past the dispatcher."""
_PICKLING = "__reduce_ex__"
_TAKES_ALL = "safetensors.torch"
"""Has the memory of all tensors of a file at once."""


class Watching(Protocol):
    """Who knows the pages of a training."""

    @property
    def pages(self) -> Pages | None:
        """``None`` where there are none any more, or they are another process's."""

    def find(self, identity: int) -> tuple[Pages, Page] | None:
        """The page of a storage."""

    def compiled(self, run: Callable[..., Any], inputs: Sequence[Any]) -> Any:  # any: tensors and numbers
        """Calls a compiled graph."""

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Inside, it sees what this thread does, whichever that is."""


_watching: "weakref.WeakSet[Watching]" = weakref.WeakSet()
_replaced: list[tuple[Any, str, Any]] = []  # any: classes and modules, and what they had
_saving = threading.local()


def begin_watching(one: Watching) -> None:
    """From now on ``one`` hears of them. Raises ``ValueError`` while another does."""
    if _watching:
        raise ValueError(
            "another training is open in this process; close() it first. Models that train together are one: "
            "training(nn.ModuleList([generator, discriminator]), optimizer, ...)"
        )
    _watching.add(one)
    _replace_all()


def end_watching(one: Watching) -> None:
    """All is as before."""
    if one in _watching:
        _watching.discard(one)
        while _replaced:
            _give_back(*_replaced.pop())


def do_pending(pages: Iterable[Page]) -> None:
    """Does what is to be done before anybody works on them."""
    waiting = [page for page in pages if page.pending is not None or page.scaling is not None]
    watching = next(iter(_watching), None)
    if not waiting or watching is None:
        return
    with watching.entered():
        for page in waiting:
            if page.pending is not None:
                page.pending()
            if page.scaling is not None:
                page.scaling()


def do_all_pending(pages: Pages) -> None:
    """Does all that waits, within the budget, for whoever looks at everything."""
    if pages.is_in_step:
        do_pending(list(pages))
        return
    pages.begin_step()  # so that what updates make for a moment are pages
    try:
        do_pending(list(pages))
    finally:
        pages.end_step((), is_whole=False)


def _replace_all() -> None:
    from torch._inductor.output_code import CompiledFxGraph  # seconds, and Triton

    for name in _SHARING:
        _replace_method(torch.Tensor, name, _let_go)
    for name in _READING:
        _replace_method(torch.Tensor, name, _ask_for_address)
    for kind in (torch.Tensor, nn.Parameter):
        _replace_method(kind, _PICKLING, _refuse_pickling)
    save = torch.serialization._save
    _put(torch.serialization, "_save", functools.wraps(save)(functools.partial(_save, save)))
    run = CompiledFxGraph.__call__

    def run_watched(self: Any, inputs: Sequence[Any]) -> Any:
        watching = next(iter(_watching), None)
        return run(self, inputs) if watching is None else watching.compiled(functools.partial(run, self), inputs)

    _put(CompiledFxGraph, "__call__", run_watched)


def _replace_method(kind: type, name: str, prepare: Callable[[Pages, Page], None]) -> None:
    method = getattr(kind, name)

    @functools.wraps(method)
    def prepared(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        watching = next(iter(_watching), None)
        found = None if watching is None else watching.find(storage_id(self))
        if found is not None:
            pages, page = found
            if sys._getframe(1).f_globals.get("__name__") == _TAKES_ALL and page not in pages.pinned:
                raise ValueError(
                    f"safetensors takes {page.label} with all other tensors of a file at once, for which the budget "
                    "may have no room. training.save(path) writes such files a part at a time; where there is room, "
                    "this does: with training.whole(): model.save_pretrained(path)"
                )
            do_pending([page])
            prepare(pages, page)
        return method(self, *args, **kwargs)

    _put(kind, name, prepared)


def _put(owner: Any, name: str, new: Any) -> None:
    _replaced.append((owner, name, owner.__dict__.get(name)))
    setattr(owner, name, new)


def _give_back(owner: Any, name: str, old: Any) -> None:
    if old is None:  # it was inherited
        delattr(owner, name)
    else:
        setattr(owner, name, old)


def _let_go(pages: Pages, page: Page) -> None:
    pages.let_go(page)


def _ask_for_address(pages: Pages, page: Page) -> None:
    pages.ask_for_address(page)


def _refuse_pickling(pages: Pages, page: Page) -> None:
    if page not in pages.pinned and not hasattr(_saving, "writer"):
        raise ValueError(
            f"{page.label} may be in another tier now, where pickle does not find it. torch.save(model.state_dict(), "
            "path) does. For whatever else, have everything on the device: with training.whole(): pickle.dumps(model)"
        )


# torch.save: all is pickled first, with references to storages, and then each storage is written after the other


def _save(save: Callable[..., None], what: Any, file: Any, *rest: Any, **options: Any) -> None:
    watching = next(iter(_watching), None)
    pages = None if watching is None else watching.pages
    if watching is None or pages is None or hasattr(_saving, "writer"):
        save(what, file, *rest, **options)
        return
    do_all_pending(pages)
    _saving.writer = _Writer(file)
    try:
        with watching.entered(), _fetched_to_be_written(pages):
            save(what, _saving.writer, *rest, **options)
    finally:
        del _saving.writer


class _Writer:
    """PyTorch's writer of an archive, which notes that pickling is over."""

    def __init__(self, file: Any):
        self._file = file
        self.is_writing = False

    def write_record(self, *arguments: Any) -> None:
        self.is_writing = True
        self._file.write_record(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def _fetched_to_be_written(pages: Pages) -> Iterator[None]:
    """Inside, asking for a storage's size, which comes before it is written, brings its page to the device."""
    own = torch.UntypedStorage.nbytes

    def nbytes(self: torch.UntypedStorage) -> int:
        writer: _Writer | None = getattr(_saving, "writer", None)  # of this thread
        page = pages.find(self._cdata)
        if writer is None or page is None or pages.is_moving:
            return own(self)
        if writer.is_writing:
            pages.need([page], [])
        return page.size_bytes

    torch.UntypedStorage.nbytes = nbytes  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del torch.UntypedStorage.nbytes  # it was inherited
