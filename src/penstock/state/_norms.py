"""Norms of gradients, computed when a gradient is complete and still on the device.

Clipping asks for the norm of every gradient after backward. Gradients that have left the device by then would be
fetched just for that. So if the last step asked for norms, this step computes them in advance, by the same call, and
returns them for gradients that have not been written to since.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from penstock.state._page import Page, PageKind
from penstock.state._pages import Pages
from penstock.storages import id_or_zero

_OF_LISTS, _OF_ONE = torch.ops.aten._foreach_norm.Scalar, torch.ops.aten.linalg_vector_norm.default
NORMS = (_OF_LISTS, _OF_ONE)
"""The operators by which norms are asked for."""
Call = tuple[Any, ...]  # any: an operator, and its arguments that are not tensors


class Norms:
    """The norms of one training's gradients."""

    def __init__(self, pages: Pages):
        self._pages = pages
        self._expected: Call | None = None
        """The call by which the last step asked for norms."""
        self._asked: Call | None = None
        self._is_taking = False
        self._times: dict[str, int] = {}
        """How often each gradient was added to in this step, by its label."""
        self._last_times: dict[str, int] = {}
        """The same for the last step."""

    def begin_step(self) -> None:
        """Begin a step."""
        self._expected, self._asked = self._asked, None
        self._times, self._last_times = {}, self._times

    def take(self, gradient: torch.Tensor) -> None:
        """Compute the norm of a gradient that seems to be complete."""
        page = self._page_of(gradient)
        if page is None:
            return
        times = self._times[page.label] = self._times.get(page.label, 0) + 1
        if self._expected is None or times < self._last_times.get(page.label, 1):  # more micro-batches follow
            return
        func, rest, options = self._expected
        self._is_taking = True
        try:
            with torch.no_grad():
                norms = func([gradient] if func is _OF_LISTS else gradient, *rest, **dict(options))
        finally:
            self._is_taking = False
        page.norm = self._expected, page.num_writes, norms[0] if func is _OF_LISTS else norms

    def given(
        self,
        func: Any,
        args: Sequence[Any],
        options: Mapping[str, Any],
        compute: Callable[[Sequence[Any]], Any],
    ) -> Any | None:
        """Return the operator's result, with norms that are known already; ``None`` if none of them is.

        ``compute`` runs the operator on the rest of the tensors.
        """
        if func not in NORMS or self._is_taking:
            return None
        tensors = args[0] if func is _OF_LISTS else [args[0]]
        pages = [self._page_of(tensor) for tensor in tensors]
        if not any(pages):
            return None
        self._asked = func, tuple(args[1:]), tuple(options.items())
        known = [None if page is None else self._known(page) for page in pages]
        if all(norm is None for norm in known):
            return None
        if func is _OF_ONE:
            return known[0]
        rest = [tensor for tensor, norm in zip(tensors, known, strict=True) if norm is None]
        computed = iter(compute([rest, *args[1:]]) or () if rest else ())
        return [next(computed) if norm is None else norm for norm in known]

    def _known(self, page: Page) -> torch.Tensor | None:
        """Return the norm of a page, once only, since the caller may write to it."""
        kept, page.norm = page.norm, None
        if kept is None:
            return None
        call, num_writes, norm = kept
        return norm if call == self._asked and num_writes == page.num_writes else None

    def _page_of(self, gradient: torch.Tensor) -> Page | None:
        page = self._pages.find(id_or_zero(gradient))
        if page is None or page.kind is not PageKind.GRADIENT or gradient.nbytes != page.size_bytes:
            return None
        return page
