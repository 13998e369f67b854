"""The user's rules on which saved tensors may be parked, by module, size or a function."""

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor that autograd saves, as a policy sees it."""

    module: str
    """Qualified name of the module whose forward runs, ``""`` for the model itself."""
    shape: tuple[int, ...]
    """Shape of the saved view."""
    dtype: torch.dtype
    """Dtype of the saved view."""
    size_bytes: int
    """Bytes of the whole storage under the tensor, which is what would be parked."""
    is_checkpoint_input: bool
    """Whether the tensor is an input of a ``torch.utils.checkpoint`` region."""


Policy = Callable[[SavedTensor], bool]
"""A function that says whether a saved tensor may be parked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The offloader's rules for single tensors. A tensor is parked only if all of them agree."""

    min_bytes: int = 2**20
    """Size below which storages are left alone; 0 parks everything."""
    modules: Sequence[str] | None = None
    """Patterns (``fnmatch``) of modules to park from, with the modules inside them. ``None`` means all."""
    keep_last: Sequence[str] = ()
    """Names of modules whose tensors stay on the device, since backward begins with them."""
    checkpoint_inputs_only: bool = False
    """Whether to park only the inputs of checkpointed regions."""
    policy: Policy | None = None
    """The policy, asked last; ``False`` keeps the tensor."""

    def keep_reason(self, tensor: SavedTensor) -> str:
        """Return why ``tensor`` must be kept; empty if it may be parked."""
        if tensor.size_bytes < self.min_bytes:
            return "kept: small"
        if self.checkpoint_inputs_only and not tensor.is_checkpoint_input:
            return "kept: not a checkpoint's input"
        if self.modules is not None and not any(covers(pattern, tensor.module) for pattern in self.modules):
            return "kept: module not chosen"
        if any(covers(name, tensor.module) for name in self.keep_last):
            return "kept: last modules"
        if self.policy is not None and not self.policy(tensor):
            return "kept: policy"
        return ""


def covers(pattern: str, module: str) -> bool:
    """Return whether ``pattern`` matches ``module`` or a module that contains it."""
    parts = module.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))
