"""Which saved tensors may be parked at all: what the user says, by module, size or predicate."""

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """What a policy sees of a tensor that autograd saves."""

    module: str
    """Qualified name of the module whose forward runs, ``""`` for the model itself."""
    shape: tuple[int, ...]
    """Shape of the saved view."""
    dtype: torch.dtype
    """Its dtype."""
    size_bytes: int
    """Bytes of the whole storage under it: what would be parked."""
    is_checkpoint_input: bool
    """Whether it is saved as the input of a ``torch.utils.checkpoint`` region."""


Policy = Callable[[SavedTensor], bool]
"""Says whether a saved tensor may be parked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The offloader's settings that decide on single tensors. All must agree for a tensor to be parked."""

    min_bytes: int = 2**20
    """Smaller storages are left alone; 0 parks everything."""
    modules: Sequence[str] | None = None
    """Patterns (``fnmatch``) of module names to park from; a pattern covers what is inside. ``None`` is all."""
    keep_last: Sequence[str] = ()
    """Names of modules whose tensors stay, since backward begins with them."""
    checkpoint_inputs_only: bool = False
    """Park nothing but the inputs of checkpointed regions."""
    policy: Policy | None = None
    """Asked last; ``False`` keeps the tensor."""

    def keep_reason(self, tensor: SavedTensor) -> str:
        """Why ``tensor`` must be kept; empty if it may be parked."""
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
    """Whether ``pattern`` names ``module`` or something that it is inside of."""
    parts = module.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))
