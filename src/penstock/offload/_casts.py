"""Under autocast the weight in half precision travels, not the weight; and so does its gradient.

A weight that the device does not update keeps its cast as a page of its own, of half the size: one that is frozen, or
that the host updates, which casts it anew. Operators are given that page where they would have cast the weight, so that
the weight itself need not come. The other way round, the gradient in single precision that autograd makes of one in
half precision has no bytes until somebody asks for them: it leaves as what it was made of.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.offload._operators import SMALL_BYTES, storage_id
from penstock.offload._page import Kind, Narrow, Page
from penstock.offload._pages import Pages
from penstock.offload._past import do_pending

CAST, ADD = torch.ops.aten._to_copy.default, torch.ops.aten.add_.Tensor
_MOST_PARTS = 4
"""Gradients in half precision that are summed on the host at most: two take as much room there as their sum."""
_HALF = (torch.bfloat16, torch.float16)
Layout = tuple[torch.Size, tuple[int, ...], int]
Key = tuple[int, torch.dtype, Layout]


@dataclass(slots=True)
class Twin:
    """A weight in half precision."""

    weight: Page
    page: Page
    tensor: torch.Tensor
    """The one that keeps its storage alive."""
    num_writes: int
    """To the weight, when it was cast."""
    layout: "Layout"
    """Of what was cast: the weight, or a view of it."""


class Casts:
    """Of one training's weights and gradients."""

    def __init__(self, pages: Pages, device: torch.device):
        self._pages, self._device = pages, device
        self.updates_on_host = False
        """Whether the host updates the weights that are trained."""
        self.name: Callable[[torch.Tensor], str] = str
        """What a message calls a parameter."""
        self._twins: dict[Key, Twin] = {}
        self._alone = _uses(torch.empty(1))

    def given(self, args: Sequence[Any], options: Mapping[str, Any]) -> torch.Tensor | None:
        """The result of a cast without its being done; ``None`` if it is to be done."""
        tensor, dtype = args[0], options.get("dtype")
        if len(args) != 1 or dtype is None or not self._is_plain(tensor, options):
            return None
        if tensor.dtype in _HALF:
            return self._gradient(tensor, dtype) if dtype is torch.float32 and self.updates_on_host else None
        return self._twin(tensor, dtype) if dtype in _HALF and tensor.dtype is torch.float32 else None

    def done(self, args: Sequence[Any], result: torch.Tensor, *, was_here: bool) -> None:
        """A cast has been done, of a weight that had to come for it: the next one need not."""
        weight = self._pages.find(storage_id(args[0]))
        page = self._pages.find(storage_id(result))
        is_lasting = weight is not None and (self.updates_on_host or not args[0].requires_grad)
        if was_here or not is_lasting or weight is None or page is None or weight.kind is not Kind.PARAMETER:
            return
        if result.nbytes != page.size_bytes or torch.is_inference_mode_enabled() or result.dtype not in _HALF:
            return
        key = _key(args[0], result.dtype)
        if key not in self._twins:
            page.call(f"{weight.label} in {str(result.dtype).removeprefix('torch.')}", Kind.PARAMETER)
            page.wide = weight
            self._twins[key] = Twin(weight, page, result.detach(), weight.num_writes, _layout(args[0]))

    def added(self, args: Sequence[Any], options: Mapping[str, Any]) -> torch.Tensor | None:
        """The result of adding a gradient to another without its being done; ``None`` if it is to be done."""
        if len(args) != 2 or options or not all(isinstance(one, torch.Tensor) for one in args):
            return None
        sum_, one = self._pages.find(storage_id(args[0])), self._pages.find(storage_id(args[1]))
        if sum_ is None or one is None or sum_ is one or sum_.narrow is None or one.narrow is None:
            return None
        if len(sum_.narrow.parts) + len(one.narrow.parts) > _MOST_PARTS or not _are_alike(*args):
            return None
        if any(page.pending is not None or page.scaling is not None for page in (sum_, one)):
            return None  # that is of what there was before
        with self._pages.lock:
            for _, part in one.narrow.parts:
                part.wide = sum_
            sum_.narrow.parts += one.narrow.parts
            sum_.num_writes += 1
            self._pages.let_leave(sum_)
        return args[0]  # type: ignore[no-any-return]

    def of(self, weight: Page, parameter: torch.Tensor) -> list[Twin]:
        """Casts of a weight as it is, that are right, and that nobody but this has."""
        layout = _layout(parameter)
        found = [one for one in self._twins.values() if one.weight is weight and one.layout == layout]
        return [one for one in found if self._is_right(one) and self._is_alone(one)]

    def forget(self, weight: Page | None = None, *, but: Sequence[Twin] = ()) -> None:
        """Casts of a weight, or all, are none any more."""
        for key, one in list(self._twins.items()):
            if weight in (None, one.weight) and one not in but:
                one.page.wide = None
                del self._twins[key]

    def begin_step(self) -> None:
        """Lets go of casts of weights that are no more."""
        for one in list(self._twins.values()):
            if one.weight.is_dead:
                self.forget(one.weight)

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
            if not self._is_alone(twin):  # whoever has the last one may write to it
                return None
            self._pages.need([twin.page], [])
            return twin.tensor.detach()

    def _is_right(self, twin: Twin) -> bool:
        return (twin.weight.num_writes, twin.page.num_writes) == (twin.num_writes, 0) and not twin.weight.is_dead

    def _is_alone(self, twin: Twin) -> bool:
        return _uses(twin.tensor) <= self._alone

    def _gradient(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """What autograd adds to, or takes for, the gradient of a parameter."""
        node = torch._C._current_autograd_node()
        if node is None or len(node.next_functions) != 1:
            return None
        parameter = getattr(node.next_functions[0][0], "variable", None)
        page = self._pages.find(storage_id(tensor))
        if parameter is None or page is None or not tensor.is_contiguous() or not self._may_add(parameter):
            return None
        if page.wide is not None and not page.wide.is_dead:
            return None  # it is another parameter's gradient, too
        with self._pages.lock:
            wide = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=tensor.device)
            name = f"gradient of {self.name(parameter)}"
            self._pages.begin(wide.untyped_storage(), Kind.GRADIENT, name)
            made = self._pages.find(storage_id(wide))
            if made is None:
                return None
            page.call(f"{name} in {str(tensor.dtype).removeprefix('torch.')}", Kind.GRADIENT)
            page.wide, made.narrow = made, Narrow(tensor.detach(), page, dtype)
            self._pages.let_leave(made)
        return wide

    def _may_add(self, parameter: torch.Tensor) -> bool:
        """Whether one more gradient becomes its gradient, or one of those that are summed later."""
        if parameter.grad is None:
            return True
        page = self._pages.find(storage_id(parameter.grad))
        return page is not None and page.narrow is not None and len(page.narrow.parts) < _MOST_PARTS

    def _is_plain(self, tensor: torch.Tensor, options: Mapping[str, Any]) -> bool:
        """Whether the cast does nothing else, and is of the whole of a page."""
        page = self._pages.find(storage_id(tensor))
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


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.size(), one.stride(), one.dtype) == (other.size(), other.stride(), other.dtype)


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


def _key(tensor: torch.Tensor, dtype: torch.dtype) -> Key:
    return storage_id(tensor), dtype, _layout(tensor)


def _uses(tensor: torch.Tensor) -> int:
    """Tensors that have its storage, counted as PyTorch counts them."""
    storage = tensor.untyped_storage()  # which has an object in Python from now on
    return int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]
