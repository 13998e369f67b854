"""Half-precision casts of weights and half-precision gradients, which are moved under autocast in place of the
originals.

A weight that the device does not update keeps its cast as a page of its own, which has half the size. Such a weight is
frozen, or the host updates it and casts it anew. Operators get that page where they would have cast the weight, so the
weight itself is not fetched. In the other direction, autograd makes a single-precision gradient from a half-precision
one. It has no bytes until somebody asks for them; what leaves the device is the half-precision gradient.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.state._operators import SMALL_BYTES
from penstock.state._page import Narrow, Page, PageKind
from penstock.state._pages import Pages
from penstock.state._past import do_pending
from penstock.storages import id_of, id_or_zero

CAST, ADD = torch.ops.aten._to_copy.default, torch.ops.aten.add_.Tensor
_MOST_PARTS = 4
"""The most half-precision gradients that are summed on the host. Two take as much memory there as their sum."""
_HALF = (torch.bfloat16, torch.float16)
Layout = tuple[torch.Size, tuple[int, ...], int]
Key = tuple[int, torch.dtype, Layout]


@dataclass(slots=True)
class CastTwin:
    """A weight's copy in half precision."""

    weight: Page
    page: Page
    tensor: torch.Tensor
    """The tensor that keeps the storage of ``page`` alive."""
    num_writes: int
    """Number of writes to the weight at the time of the cast."""
    layout: "Layout"
    """Layout of the tensor that was cast: the weight, or a view of it."""


class Casts:
    """The half-precision weights and gradients of one training."""

    def __init__(self, pages: Pages, device: torch.device):
        self._pages, self._device = pages, device
        self.hosted: Collection[int] | None = ()
        """The identities of the weights that the host updates; ``None`` if it updates all that are trained."""
        self.name: Callable[[torch.Tensor], str] = str
        """A function that returns a parameter's name for messages."""
        self._twins: dict[Key, CastTwin] = {}
        self._alone = _uses(torch.empty(1))

    def given(self, args: Sequence[Any], options: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the result of a cast without computing it, or ``None`` if it has to be computed."""
        tensor, dtype = args[0], options.get("dtype")
        if len(args) != 1 or dtype is None or not self._is_plain(tensor, options):
            return None
        if tensor.dtype in _HALF:
            return self._gradient(tensor, dtype) if dtype is torch.float32 and self.hosted != () else None
        return self._twin(tensor, dtype) if dtype in _HALF and tensor.dtype is torch.float32 else None

    def done(self, args: Sequence[Any], result: torch.Tensor, *, was_here: bool) -> None:
        """Keep the result of a cast, so that the next cast of this weight does not have to fetch it.

        This is done only where the weight was not on the device and the cast stays valid for a while. Any other cast is
        made anew where it is needed again, instead of being copied out and in: autocast holds on to casts that nobody
        uses any more.
        """
        weight = self._pages.find(id_or_zero(args[0]))
        page = self._pages.find(id_or_zero(result))
        if weight is None or page is None or weight.kind is not PageKind.PARAMETER:
            return
        if result.nbytes != page.size_bytes or torch.is_inference_mode_enabled() or result.dtype not in _HALF:
            return
        if args[0].requires_grad and not self._is_hosted(weight):
            self._let_be_made_anew(weight, page, args[0], result)
        elif not was_here:
            self._keep(weight, page, args[0], result)

    def _let_be_made_anew(self, weight: Page, page: Page, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Let a cast leave without a copy, since the weight has all that it is made of."""
        is_whole = tensor.dtype is torch.float32 and tensor.nbytes == weight.size_bytes
        if is_whole and tensor.stride() == result.stride() and (weight.cast is None or weight.cast.is_dead):
            weight.cast, page.narrow = page, Narrow(tensor.detach(), weight, result.dtype)

    def _keep(self, weight: Page, page: Page, tensor: torch.Tensor, result: torch.Tensor) -> None:
        key = _key(tensor, result.dtype)
        if key not in self._twins:
            self._pages.copies.call(
                page, f"{weight.label} in {str(result.dtype).removeprefix('torch.')}", PageKind.PARAMETER
            )
            page.wide = weight
            self._twins[key] = CastTwin(weight, page, result.detach(), weight.num_writes, _layout(tensor))

    def added(self, args: Sequence[Any], options: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the sum of two gradients without computing it, or ``None`` if it has to be computed."""
        if len(args) != 2 or options or not all(isinstance(argument, torch.Tensor) for argument in args):
            return None
        sum_, term = self._pages.find(id_or_zero(args[0])), self._pages.find(id_or_zero(args[1]))
        if sum_ is None or term is None or sum_ is term or sum_.narrow is None or term.narrow is None:
            return None
        if not sum_.kind is term.kind is PageKind.GRADIENT:
            return None
        if len(sum_.narrow.parts) + len(term.narrow.parts) > _MOST_PARTS or not _are_alike(*args):
            return None
        if any(page.pending is not None or page.scaling is not None for page in (sum_, term)):
            return None  # these are due on the gradient as it was before
        with self._pages.lock:
            for _, part in term.narrow.parts:
                part.wide = sum_
            sum_.narrow.parts += term.narrow.parts
            sum_.num_writes += 1
            self._pages.let_leave(sum_)
        return args[0]  # type: ignore[no-any-return]

    def of(self, weight: Page, parameter: torch.Tensor) -> list[CastTwin]:
        """Return the casts of a weight in its present layout that are up to date and that nobody else uses."""
        layout = _layout(parameter)
        twins = [twin for twin in self._twins.values() if twin.weight is weight and twin.layout == layout]
        return [twin for twin in twins if self._is_right(twin) and self._is_alone(twin)]

    def forget(self, weight: Page | None = None, *, but: Sequence[CastTwin] = ()) -> None:
        """Forget the casts of one weight, or of all weights, except those in ``but``."""
        for key, twin in list(self._twins.items()):
            if weight in (None, twin.weight) and twin not in but:
                twin.page.wide = None
                del self._twins[key]

    def begin_step(self) -> None:
        """Forget the casts of weights that no longer exist."""
        for twin in list(self._twins.values()):
            if twin.weight.is_dead:
                self.forget(twin.weight)

    def _twin(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        twin = self._twins.get(_key(tensor, dtype))
        if twin is None:
            return None
        if twin.page.pending is not None:
            do_pending([twin.page])
        with self._pages.lock:
            if twin.weight.pending is not None or not self._is_right(twin):
                self.forget(twin.weight)
                return None
            if not self._is_alone(twin):  # somebody who holds another tensor of it may write to it
                return None
            self._pages.need([twin.page], [])
            return twin.tensor.detach()

    def _is_right(self, twin: CastTwin) -> bool:
        return (twin.weight.num_writes, twin.page.num_writes) == (twin.num_writes, 0) and not twin.weight.is_dead

    def _is_alone(self, twin: CastTwin) -> bool:
        return _uses(twin.tensor) <= self._alone

    def _gradient(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a single-precision gradient without bytes, if autograd casts this one to add it to a parameter's."""
        node = torch._C._current_autograd_node()
        if node is None or len(node.next_functions) != 1:
            return None
        parameter = getattr(node.next_functions[0][0], "variable", None)
        page = self._pages.find(id_or_zero(tensor))
        if parameter is None or page is None or not tensor.is_contiguous() or not self._may_add(parameter):
            return None
        if not self._is_hosted(self._pages.find(id_or_zero(parameter))):
            return None
        if page.wide is not None and not page.wide.is_dead:
            return None  # it is also the gradient of another parameter
        with self._pages.lock:
            wide = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=tensor.device)
            name = f"gradient of {self.name(parameter)}"
            self._pages.begin(wide.untyped_storage(), PageKind.GRADIENT, name)
            gradient = self._pages.find(id_or_zero(wide))
            if gradient is None:
                return None
            self._pages.copies.call(page, f"{name} in {str(tensor.dtype).removeprefix('torch.')}", PageKind.GRADIENT)
            page.wide, gradient.narrow = gradient, Narrow(tensor.detach(), page, dtype)
            self._pages.course.has_no_bytes(gradient)
            self._pages.let_leave(gradient)
        return wide

    def _is_hosted(self, weight: Page | None) -> bool:
        return self.hosted is None or (weight is not None and weight.identity in self.hosted)

    def _may_add(self, parameter: torch.Tensor) -> bool:
        """Whether one more gradient can become the parameter's gradient, or join those that are summed later."""
        if parameter.grad is None:
            return True
        page = self._pages.find(id_or_zero(parameter.grad))
        return page is not None and page.narrow is not None and len(page.narrow.parts) < _MOST_PARTS

    def _is_plain(self, tensor: torch.Tensor, options: Mapping[str, Any]) -> bool:
        """Whether the operator does nothing but cast, and casts a whole page."""
        page = self._pages.find(id_or_zero(tensor))
        return (
            page is not None
            and tensor.nbytes == page.size_bytes
            and page.size_bytes >= 2 * SMALL_BYTES
            and tensor.layout is torch.strided
            and not tensor.is_conj()
            and options.get("device") in (None, self._device)
            and options.get("layout") in (None, torch.strided)
            and options.get("memory_format") in (None, torch.preserve_format)
            and not options.get("pin_memory")
        )


def _are_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (tensor.size(), tensor.stride(), tensor.dtype) == (other.size(), other.stride(), other.dtype)


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


def _key(tensor: torch.Tensor, dtype: torch.dtype) -> Key:
    return id_or_zero(tensor), dtype, _layout(tensor)


def _uses(tensor: torch.Tensor) -> int:
    """Return how many tensors use its storage, by PyTorch's own count."""
    storage = tensor.untyped_storage()  # from here on the storage has a Python object, which counts
    return int(torch._C._storage_Use_Count(id_of(storage)))  # type: ignore[attr-defined]
