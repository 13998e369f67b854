"""A dispatch mode that sees which operators and compiled graphs are about to read or write pages."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from penstock.errors import ForkedProcessError
from penstock.forks import renewed_in_child
from penstock.state._casts import ADD, CAST, Casts
from penstock.state._effects import Effect, effect_of
from penstock.state._norms import NORMS, Norms
from penstock.state._operators import PLAIN, SMALL_BYTES, Touched, in_parts, new_storages, parts_of_sparse, touches
from penstock.state._page import Page, PageKind
from penstock.state._pages import Pages
from penstock.state._past import begin_watching, do_pending, end_watching
from penstock.storages import has_bytes, id_or_zero

_PART_BYTES = 8 * 2**20
"""Bytes of pages for which an operator on lists runs at a time. With small budgets it is a sixteenth of the budget."""
_COMMUNICATION = ("c10d", "_c10d_functional", "c10d_functional")
_TRACING = tuple(torch._C._TorchDispatchModeKey.__members__.values())  # type: ignore[attr-defined]
"""Modes of tracing and compiling, which come after all others."""
_COMES_HERE = torch._C._disabled_torch_dispatch_impl
"""The ``__torch_dispatch__`` of classes whose operators come here."""
_SCALING = (torch.ops.aten._foreach_mul_.Tensor, torch.ops.aten._foreach_mul_.Scalar)
"""The operators by which clipping scales gradients. They would fetch all gradients only to let them leave again."""


class _Mode(TorchDispatchMode):
    """The dispatch mode of a watch. It stays on a thread's stack, and does not keep the watch alive."""

    def __init__(self, watch: "PageWatch"):
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = weakref.ref(watch)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return true, so that Dynamo does not give up because of this mode."""
        return True

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return false: what PyTorch would do takes 4 microseconds for every operator, and is done once below."""
        return False

    # any: PyTorch's
    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        watch = self.watch()
        return func(*args, **(kwargs or {})) if watch is None else watch.run(func, types, args, kwargs or {})

    set_code_exec_strategy(__torch_dispatch__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    """Dynamo skips it and all that it calls."""

    def is_on_stack(self) -> bool:
        """Whether this thread's operators come here."""
        return any(mode is self for mode in _get_current_dispatch_mode_stack())

    def put_below(self) -> None:
        """Put it below all modes of this thread's stack.

        A user's mode may end before the training does, and each ends by taking the topmost from the stack. There it
        also sees operators as they run, after other modes have changed them.
        """
        with _without_modes():
            _push_mode(self)

    def leave(self) -> None:
        """Leave this thread's stack, wherever in it."""
        above = []
        while self.is_on_stack():
            top = _pop_mode(None)
            if top is self:
                break
            above.append(top)
        for mode in reversed(above):
            _push_mode(mode)


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    """Take all modes from this thread's stack while the block runs; what the block puts there stays below them."""
    modes = []
    while torch._C._len_torch_dispatch_stack():
        modes.append(_pop_mode(None))
    try:
        yield
    finally:
        for mode in reversed(modes):
            if not (isinstance(mode, _Mode) and mode.watch() is None):  # of a training that nobody has any more
                _push_mode(mode)


class PageWatch:
    """Sees every operator of the threads that entered it, and first fetches its pages."""

    def __init__(self, pages: Pages, device: torch.device):
        self._mode = _Mode(self)
        self._pages: Pages | None = pages
        self._device = device
        self._thread = threading.get_ident()
        """The thread that trains. Others may use pages, and what they make is theirs."""
        self._is_copy = False
        """Whether this is the copy in a forked process, where the pages are not."""
        self._all.add(self)
        self._num_compiled = 0
        self._plain_types: set[tuple[type, ...]] = set()
        """Classes of arguments, as PyTorch gives them, of which it is known that none is a wrapper."""
        self.adopts_results = True
        """Whether results of operators become pages."""
        self.norms = Norms(pages)
        self.casts = Casts(pages, device)

    def _note_copied(self) -> None:
        self._is_copy = True

    _all = renewed_in_child(_note_copied)

    def begin(self) -> None:
        """Begin to watch this thread."""
        begin_watching(self)
        self._mode.put_below()

    def end(self) -> None:
        """Stop watching, and leave this thread's stack of modes."""
        self._pages = None
        end_watching(self)
        self._mode.leave()

    @property
    def pages(self) -> Pages | None:
        """Its pages; ``None`` after `end` or in another process."""
        return None if self._is_copy else self._pages

    def find(self, identity: int) -> tuple[Pages, Page] | None:
        """Return the page of a storage. Raises ``ForkedProcessError`` if another process has moved its bytes away."""
        pages = self._pages
        page = None if pages is None else pages.find(identity)
        if pages is None or page is None:
            return None
        if not self._is_copy:
            return pages, page
        if page.is_here and page.pending is None and page.scaling is None:
            return None
        raise ForkedProcessError(
            f"{page.label} is in a tier of the parent process, from which this one was forked. Use it there, or bring "
            "it to the device before you fork: with training.whole(): ..."
        )

    # any: PyTorch's
    def run(self, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator of a thread whose operators come here."""
        pages = self._pages
        if pages is None or self._is_copy:
            if self._is_copy:
                touches(effect_of(func), args, kwargs, self._refuse_elsewhere)
            return func(*args, **kwargs)
        if pages.is_moving:
            return func(*args, **kwargs)
        if types and types not in self._plain_types and not self._are_plain(types):
            if any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING):
                return func(*args, **kwargs)  # compiling: its own mode comes next
            return NotImplemented  # a wrapper tensor; the operators on its parts come here
        effect = effect_of(func)
        if effect.is_alias:
            return func(*args, **kwargs)
        if func is CAST:
            shortcut = self.casts.given(args, kwargs)
            if shortcut is not None:
                return shortcut
        if func is ADD and self.casts.hosted != ():
            shortcut = self.casts.added(args, kwargs)
            if shortcut is not None:
                return shortcut
        num_changes = pages.register.num_changes
        touched = touches(effect, args, kwargs, pages.find)
        if not touched.pages:
            result = func(*args, **kwargs)
            if type(result) is torch.Tensor and result.layout is torch.strided and result.nbytes < SMALL_BYTES:
                return result  # as most of such operators
            return self._made_of_no_page(pages, func, effect, args, kwargs, result)
        is_ready = is_here = True
        for page in touched.pages:
            is_here = is_here and page.is_here
            is_ready = is_ready and page.pending is None and page.scaling is None
        if pages.before_use is not None:
            pages.before_use(touched.pages)
        if touched.is_view and is_here and is_ready:
            return func(*args, **kwargs)  # this is half of all operators
        if not is_ready:
            do_pending(touched.pages)
        if func in NORMS:
            norms = self.norms.given(func, args, kwargs, lambda given: self._parts(pages, func, given, kwargs))
            if norms is not None:
                return norms
        if touched.is_of_lists:
            if func in _SCALING:
                args = (self._scale_later(pages, *args[:2]), *args[1:])
            return self._parts(pages, func, args, kwargs)
        result = self._run(pages, func, args, kwargs, touched, num_changes)
        if func is CAST:
            self.casts.done(args, result, was_here=is_here)
        return result

    # any: as above
    def _made_of_no_page(
        self, pages: Pages, func: Any, effect: Effect, args: Sequence[Any], kwargs: Any, result: Any
    ) -> Any:
        """Return the result of an operator that works on no page. What it makes may become one."""
        if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
            self._let_go_of_sparse(pages, result)
        if effect.makes_new and not self._num_compiled:
            self._adopt(pages, func, new_storages(func, args, kwargs, result))
        return result

    def _are_plain(self, types: tuple[type, ...]) -> bool:
        are_plain = all(kind.__torch_dispatch__ is _COMES_HERE for kind in types)  # type: ignore[attr-defined]
        if are_plain and all(kind in PLAIN for kind in types):  # others may come and go
            self._plain_types.add(types)
        return are_plain

    def _let_go_of_sparse(self, pages: Pages, result: Any) -> None:
        for part in parts_of_sparse(result):  # operators on a sparse tensor do not name its parts
            page = pages.find(id_or_zero(part))
            if page is not None:
                pages.let_go(page)

    def _parts(self, pages: Pages, func: Any, args: Sequence[Any], kwargs: Any) -> list[Any] | None:
        """Run an operator on lists, on some of the entries at a time."""
        most = min(_PART_BYTES, pages.course.budget_bytes // 16)
        results = [self._run(pages, func, *part) for part in in_parts(args, kwargs, pages.find, most)]
        return [tensor for result in results if result is not None for tensor in result] or None

    def _refuse_elsewhere(self, identity: int) -> None:
        self.find(identity)

    def _scale_later(self, pages: Pages, tensors: Sequence[torch.Tensor], factor: Any) -> list[torch.Tensor]:
        """Put off the scaling of gradients until the update fetches them; return the tensors that are no such
        gradients.
        """
        rest, shared = [], _Factor(factor)
        for tensor in tensors:
            page = pages.find(id_or_zero(tensor))
            if (
                page is None
                or page.kind is not PageKind.GRADIENT
                or page.scaling is not None
                or tensor.nbytes != page.size_bytes
            ):
                rest.append(tensor)
            else:
                page.scaling = _Scaling(pages, page, tensor, shared)
        return rest

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """See this thread's operators while the block runs, in another thread or within the handling of an operator."""
        if self._mode.is_on_stack():
            yield
            return
        self._mode.put_below()
        try:
            yield
        finally:
            self._mode.leave()

    def compiled(self, run: Callable[..., Any], inputs: Sequence[Any]) -> Any:  # any: tensors and numbers
        """Run a compiled graph, whose kernels read their inputs by address."""
        pages = self.pages
        if pages is None:
            return run(inputs)
        tensors_in = [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)]
        known = dict.fromkeys(map(id_or_zero, tensors_in))
        do_pending(page for page in map(pages.find, known) if page is not None)
        with pages.lock:
            read = [page for page in map(pages.find, known) if page is not None]
            if read:
                pages.need(read, read)  # it may write to any of them
            added = set(read) - pages.register.pinned
            pages.register.pinned |= added
            self._num_compiled += 1
            try:
                result = run(inputs)
            finally:
                self._num_compiled -= 1
                pages.register.pinned -= added
            results = result if isinstance(result, list | tuple) else (result,)
            tensors = (tensor for tensor in results if isinstance(tensor, torch.Tensor))
            self._adopt(pages, "a compiled graph", tensors, set(known))
        return result

    def _run(
        self,
        pages: Pages,
        func: Any,
        args: Sequence[Any],
        kwargs: Any,
        touched: Touched | None = None,
        num_changes: int = -1,
    ) -> Any:
        """Run an operator on its pages, which are ``touched`` as of ``num_changes``; they are looked up again if that
        changed.
        """
        with pages.lock:
            if touched is None or pages.register.num_changes != num_changes:
                touched = touches(effect_of(func), args, kwargs, pages.find)
            if touched.pages:
                pages.need(
                    touched.pages,
                    touched.written,
                    is_overwritten=touched.is_overwritten,
                    is_noted=not touched.is_view and self._trains(),
                )
                if func.namespace in _COMMUNICATION:  # it goes on in another thread after it returns
                    for page in touched.pages:
                        pages.let_go(page)
            result = func(*args, **kwargs)
            self._let_go_of_sparse(pages, result)
            if not self._num_compiled:  # kernels of a compiled graph read by address
                self._adopt(pages, func, new_storages(func, args, kwargs, result))
            return result

    def _trains(self) -> bool:
        """Whether this thread does the step's work: the one that trains, or autograd's for a device."""
        return self._thread == threading.get_ident() or torch._C._current_graph_task_id() != -1

    def _adopt(self, pages: Pages, maker: Any, tensors: Iterable[torch.Tensor], known: Iterable[int] = ()) -> None:
        if not pages.course.is_in_step or not self.adopts_results or not self._trains():
            return
        for tensor in tensors:
            if tensor.device == self._device and id_or_zero(tensor) not in known:
                storage = tensor.untyped_storage()
                if storage.resizable() and has_bytes(storage):
                    pages.begin(storage, PageKind.OTHER, maker)


class _Factor:
    """A number, or a tensor with one number, that many gradients are multiplied by."""

    def __init__(self, value: Any):  # any: see above
        self.value = value.detach().clone() if isinstance(value, torch.Tensor) else value  # it may be filled anew

    @functools.cached_property
    def on_host(self) -> Any:
        """The factor in main memory."""
        return self.value.cpu() if isinstance(self.value, torch.Tensor) else self.value


class _Scaling:
    """The due scaling of a gradient's page. It does not keep the tensor alive."""

    def __init__(self, pages: Pages, page: Page, tensor: torch.Tensor, factor: _Factor):
        self._pages, self._page, self._factor = pages, page, factor
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()

    def __call__(self) -> None:
        self._page.scaling = None
        self._pages.need([self._page], [self._page])  # `set_` would allocate an emptied storage
        storage = self._page.storage()
        if storage is not None:
            with torch.no_grad():
                tensor = torch.empty(0, dtype=self._dtype, device=storage.device)
                tensor.set_(storage, 0, self._size, self._stride).mul_(self._factor.value)  # type: ignore[call-overload]

    def factor_on_host(self) -> Any:
        return self._factor.on_host
