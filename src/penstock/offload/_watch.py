"""Seeing whatever is about to read or write a page: operators, compiled graphs, and who goes past both."""

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.offload._operators import in_parts, new_storages, storage_id, touches
from penstock.offload._page import Kind, Page
from penstock.offload._pages import Pages

_PART_BYTES = 8 * 2**20
"""Of operators on lists of tensors, which run on a part of them at a time; of small budgets a sixteenth."""
_COMMUNICATION = ("c10d", "_c10d_functional", "c10d_functional")
_SCALING = (torch.ops.aten._foreach_mul_.Tensor, torch.ops.aten._foreach_mul_.Scalar)
"""Clipping by a norm, which would fetch gradients and let them go again."""
_SHARING = ("numpy", "__array__", "__dlpack__", "share_memory_")
"""Methods whose result is the storage itself, for nobody knows how long."""
_READING = ("tolist", "data_ptr", "__deepcopy__")
"""Methods that read its memory, or give its address away, past the dispatcher."""
_PICKLING = "__reduce_ex__"

_watching: "weakref.WeakSet[Watch]" = weakref.WeakSet()
_replaced: list[tuple[type, str, Any]] = []


class Watch(TorchDispatchMode):
    """Sees every operator of the thread that entered it, and has its pages brought to the device first."""

    def __init__(self, pages: Pages, device: torch.device):
        super().__init__()  # type: ignore[no-untyped-call]
        self._pages: Pages | None = pages
        self._device = device
        self._process = os.getpid()
        self._num_compiled = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """So that Dynamo does not give up because of it."""
        return True

    supports_higher_order_operators = True

    def begin(self) -> None:
        """From now on. Raises ``ValueError`` while another one does."""
        if _watching:
            raise ValueError(
                "another training is open in this process; close() it first. Models that train together are one: "
                "training(nn.ModuleList([generator, discriminator]), optimizer, ...)"
            )
        _watching.add(self)
        _replace_methods()
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Sees nothing any more. It leaves the stack of modes where it is the last that was entered."""
        self._pages = None
        _watching.discard(self)
        _give_methods_back()
        if torch.utils._python_dispatch._get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def page_of(self, tensor: torch.Tensor) -> tuple[Pages, Page] | None:
        """The page that the tensor is in."""
        pages = self._pages
        page = None if pages is None or self._process != os.getpid() else pages.find(storage_id(tensor))
        return None if pages is None or page is None else (pages, page)

    # any: PyTorch's
    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs, pages = kwargs or {}, self._pages
        if pages is None or pages.is_moving or self._process != os.getpid():
            return func(*args, **kwargs)
        if any(one.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for one in types):
            return NotImplemented  # a tensor made of others, whose own operators are to be seen
        touched = touches(func, args, kwargs, pages.find)
        if any(page.pending is not None or page.scaling is not None for page in touched.pages):
            with self:  # it is off while it handles an operator
                do_pending(touched.pages)
        if touched.is_of_lists:
            if func in _SCALING:
                args = (self._scale_later(pages, *args[:2]), *args[1:])
            most = min(_PART_BYTES, pages.budget_bytes // 16)
            results = [self._run(pages, func, *part) for part in in_parts(args, kwargs, pages.find, most)]
            found = [one for result in results if result is not None for one in result]
            return found or None
        return self._run(pages, func, args, kwargs)

    def _scale_later(self, pages: Pages, tensors: Sequence[torch.Tensor], factor: Any) -> list[torch.Tensor]:
        """Leaves gradients to be scaled when they are fetched for the update; returns what is none."""
        rest = []
        for tensor in tensors:
            page = pages.find(storage_id(tensor))
            if (
                page is None
                or page.kind is not Kind.GRADIENT
                or page.scaling is not None
                or tensor.nbytes != page.size_bytes
            ):
                rest.append(tensor)
            else:
                page.scaling = functools.partial(
                    _scale, pages, page, tensor.dtype, tensor.size(), tensor.stride(), factor
                )
        return rest

    def compiled(self, run: Callable[..., Any], inputs: Sequence[Any]) -> Any:  # any: tensors and numbers
        """A compiled graph, whose kernels read their inputs by address."""
        pages = self._pages
        if pages is None or self._process != os.getpid():
            return run(inputs)
        given = [one for one in inputs if isinstance(one, torch.Tensor)]
        do_pending(page for page in (pages.find(storage_id(one)) for one in given) if page is not None)
        with pages.lock:
            found = [page for page in dict.fromkeys(pages.find(storage_id(one)) for one in given) if page is not None]
            if found:
                pages.need(found, found)  # it may write to any of them
            added = set(found) - pages.pinned
            pages.pinned |= added
            known = {storage_id(one) for one in given}
            self._num_compiled += 1
            try:
                result = run(inputs)
            finally:
                self._num_compiled -= 1
                pages.pinned -= added
            results = result if isinstance(result, list | tuple) else (result,)
            self._adopt("a compiled graph", (one for one in results if isinstance(one, torch.Tensor)), known)
        return result

    def _run(self, pages: Pages, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        with pages.lock:
            touched = touches(func, args, kwargs, pages.find)
            if touched.pages:
                pages.need(touched.pages, touched.written, is_overwritten=touched.is_overwritten)
                if func.namespace in _COMMUNICATION:  # goes on in another thread after it returned
                    for page in touched.pages:
                        pages.let_go(page)
            result = func(*args, **kwargs)
            if pages.is_in_step and not self._num_compiled:  # kernels of a compiled graph read by address
                self._adopt(func, new_storages(func, args, kwargs, result))
            return result

    def _adopt(self, maker: Any, tensors: Iterable[torch.Tensor], known: Iterable[int] = ()) -> None:
        pages = self._pages
        if pages is None or not pages.is_in_step:
            return
        for tensor in tensors:
            if tensor.device == self._device and storage_id(tensor) not in known:
                storage = tensor.untyped_storage()
                if storage.resizable():
                    pages.begin(storage, Kind.OTHER, maker)


def _scale(
    pages: Pages, page: Page, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], factor: Any
) -> None:
    """Scales the tensor that the page is of, which it does not keep alive."""
    page.scaling = None
    pages.need([page], [page])  # `set_` would give an emptied storage bytes
    storage = page.storage()
    if storage is not None:
        with torch.no_grad():
            tensor = torch.empty(0, dtype=dtype, device=storage.device)
            tensor.set_(storage, 0, size, stride).mul_(factor)  # type: ignore[call-overload]


def do_pending(pages: Iterable[Page]) -> None:
    """Does what is to be done before anybody works on them."""
    for page in pages:
        if page.pending is not None:
            page.pending()
        if page.scaling is not None:
            page.scaling()


def _find(tensor: torch.Tensor) -> tuple[Pages, Page] | None:
    return next((found for found in (one.page_of(tensor) for one in list(_watching)) if found is not None), None)


def _replace_methods() -> None:
    """Whoever reads a tensor past the dispatcher finds its bytes, or an error."""
    from torch._inductor.output_code import CompiledFxGraph  # seconds, and Triton

    for name in _SHARING:
        _replace(torch.Tensor, name, lambda pages, page: pages.let_go(page))
    for name in _READING:
        _replace(torch.Tensor, name, lambda pages, page: pages.ask_for_address(page))
    for kind in (torch.Tensor, nn.Parameter):
        _replace(kind, _PICKLING, _refuse_pickling)
    run = CompiledFxGraph.__call__

    def run_watched(self: Any, inputs: Sequence[Any]) -> Any:
        watch = next(iter(_watching), None)
        return run(self, inputs) if watch is None else watch.compiled(functools.partial(run, self), inputs)

    _put(CompiledFxGraph, "__call__", run_watched)


def _replace(kind: type, name: str, prepare: Callable[[Pages, Page], None]) -> None:
    method = getattr(kind, name)

    @functools.wraps(method)
    def prepared(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = _find(self)
        if found is not None:
            do_pending(found[1:])
            prepare(*found)
        return method(self, *args, **kwargs)

    _put(kind, name, prepared)


def _put(kind: type, name: str, method: Any) -> None:
    _replaced.append((kind, name, kind.__dict__.get(name)))
    setattr(kind, name, method)


def _give_methods_back() -> None:
    while _replaced:
        kind, name, method = _replaced.pop()
        if method is None:
            delattr(kind, name)
        else:
            setattr(kind, name, method)


def _refuse_pickling(pages: Pages, page: Page) -> None:
    if page not in pages.pinned:
        raise ValueError(
            f"{page.label} may be in another tier now and cannot be pickled. Save where everything is on the device: "
            "with training.whole(): torch.save(model.state_dict(), path)"
        )
