"""What forward of a shard writes to: buffers, which it may change, and nothing else.

A model's buffers change in forward (running statistics, counters, spectral norm's vectors). Backward that runs forward
again has to begin with what forward began with, and what it writes is to be forgotten. Writes to anything else would be
lost or happen twice, since a shard's bytes have copies below and units may run again: they are refused by name.
"""

from collections.abc import Mapping, Sequence

import torch

from penstock.errors import CaptureError
from penstock.fleet._program import Shard


class StandIns:
    """Lets tensors stand for other bytes meanwhile, so that what is written to them is forgotten."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]):
        self._tensors = {name: tensors[name] for name in others}
        self._others = others

    def __enter__(self) -> None:
        self._data = {name: tensor.data for name, tensor in self._tensors.items()}
        for name, tensor in self._tensors.items():
            tensor.data = self._others[name]

    def __exit__(self, *_: object) -> None:
        for name, tensor in self._tensors.items():
            tensor.data = self._data[name]


def run_watched(
    shard: Shard,
    tensors: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    buffers: frozenset[str],
    device: torch.device,
) -> Sequence[torch.Tensor]:
    """Runs the shard on ``device``. Raises ``CaptureError`` if it writes to anything but ``buffers``."""
    given = list(zip((*shard.tensors, *shard.inputs), (*tensors, *inputs), strict=True))
    versions = [tensor._version for _, tensor in given]
    outputs = shard.run(tensors, inputs, device)
    for (name, tensor), version in zip(given, versions, strict=True):
        if tensor._version != version and name not in buffers:
            what = f"the parameter {name}" if name in shard.tensors else f"its input {name}"
            raise CaptureError(
                f"the shard {shard.label} writes to {what} in place, which would be lost or happen twice. Write to a "
                "copy (x = x.clone()), register what forward changes as a buffer, or with stages= begin a stage with "
                "an operator that does not write to its input"
            )
    return outputs
