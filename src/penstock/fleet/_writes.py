"""Writes of a shard's forward: it may change buffers, and nothing else.

A model's buffers change in forward (running statistics, counters, spectral norm's vectors). A backward that runs
forward again must begin with the values that forward began with, and discard what it writes. Writes to anything else
would be lost or happen twice, since a shard's bytes have copies in lower tiers and units may run again. They raise an
error that names the tensor.
"""

from collections.abc import Mapping, Sequence

import torch

from penstock.errors import CaptureError
from penstock.fleet._program import Shard


class StandIns:
    """A context in which tensors use other bytes, so that writes to them are discarded."""

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
    """Run the shard on ``device``. Raise ``CaptureError`` if it writes to anything but ``buffers``."""
    named = list(zip((*shard.tensors, *shard.inputs), (*tensors, *inputs), strict=True))
    versions = [tensor._version for _, tensor in named]
    outputs = shard.run(tensors, inputs, device)
    for (name, tensor), version in zip(named, versions, strict=True):
        if tensor._version != version and name not in buffers:
            what = f"the parameter {name}" if name in shard.tensors else f"its input {name}"
            raise CaptureError(
                f"the shard {shard.label} writes to {what} in place. Such a write would be lost or applied twice. "
                "Write to a copy (x = x.clone()), register what forward changes as a buffer, or with stages= begin a "
                "stage with an operator that does not write to its input"
            )
    return outputs
