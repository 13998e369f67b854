"""The layout of a tensor over its storage: all that is needed to rebuild the same view over other bytes."""

from dataclasses import dataclass

import torch

from penstock.arguments import must_be


@dataclass(frozen=True, slots=True)
class ViewLayout:
    """The dtype, shape, strides and offset of a strided tensor over its storage.

    Strides may be 0 (expanded tensors).
    """

    dtype: torch.dtype
    """Type of the elements."""
    shape: tuple[int, ...]
    """Elements along each dimension."""
    stride: tuple[int, ...]
    """Elements between neighbors along each dimension."""
    storage_offset: int
    """Number of elements before the first."""
    is_conjugated: bool
    """Whether the lazy conjugate bit is set (complex dtypes only)."""
    is_negated: bool
    """Whether the lazy negative bit is set."""

    @staticmethod
    def of(tensor: torch.Tensor) -> "ViewLayout":
        """Return the layout of ``tensor``, which may be any strided tensor."""
        if not isinstance(tensor, torch.Tensor):
            raise must_be("tensor", "a torch.Tensor", tensor, "ViewLayout.of(tensor)")
        return ViewLayout(
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def rebuild(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor with this layout that shares ``storage``. It does not require gradients."""
        if not isinstance(storage, torch.UntypedStorage):
            raise must_be("storage", "a torch.UntypedStorage", storage, "layout.rebuild(tensor.untyped_storage())")
        with torch.no_grad():
            tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
            tensor.set_(storage, self.storage_offset, self.shape, self.stride)  # type: ignore[call-overload]
            if self.is_conjugated:
                tensor = tensor.conj()
            if self.is_negated:
                tensor = torch._neg_view(tensor)
        return tensor
