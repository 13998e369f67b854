"""Autograd's check that saved tensors were not changed in place, for code that saves tensors in its place."""

from collections.abc import Sequence

import torch

from penstock.arguments import checked, must_be


def version_of(tensor: torch.Tensor) -> int:
    """Return how many times ``tensor`` was changed in place; 0 for an inference tensor, which has no counter."""
    if not isinstance(tensor, torch.Tensor):
        raise must_be("tensor", "a torch.Tensor", tensor, "version_of(tensor)")
    return 0 if tensor.is_inference() else tensor._version


@checked("check_version(tensor, version_of(tensor))")
def check_version(
    tensor: torch.Tensor, version: int, *, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None
) -> None:
    """Raise autograd's ``RuntimeError`` if ``tensor`` was changed since ``version``.

    The message names ``dtype`` and ``shape``, for a ``tensor`` that is an alias with others.
    """
    if version_of(tensor) != version:
        kind, size = str(dtype or tensor.dtype).removeprefix("torch."), list(tensor.shape if shape is None else shape)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{kind} tensor of shape {size}] is at version {version_of(tensor)}; expected version {version} instead. "
            "Use the out-of-place operation, or change it before it is saved."
        )
