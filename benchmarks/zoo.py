"""Architectures of transformers, timm, diffusers, torchvision and torchaudio, small, from configurations alone.

Weights are random and nothing is downloaded. Widths are tiny, most have two layers, images and texts are short: a
training step takes far less than a second on one core. What trains is what the library offers for training, with the
loss that it computes itself, or the mean square of its outputs where it computes none. Dropout is as configured by
default. `ARCHITECTURES` has them by name; those of other libraries than transformers carry the library's name.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.zoo_operators import usable

Batch = dict[str, Any]
"""Keyword arguments of a model's forward: tensors, and whatever else it takes."""

VOCABULARY = 100
LIBRARIES = ("transformers", "timm", "diffusers", "torchvision", "torchaudio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model to train, and batches of any size for it."""

    name: str
    """The name in its library."""
    library: str
    """One of `LIBRARIES`."""
    make: Callable[[], nn.Module]
    """Makes the model, with random weights."""
    make_batch: Callable[[int], Batch]
    """Makes random inputs for a number of samples."""

    @property
    def is_installed(self) -> bool:
        """Whether its library is installed."""
        return importlib.util.find_spec(self.library) is not None


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss of a model's output: its own, the sum of its losses, or the mean square of its tensors."""
    loss: torch.Tensor | None = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    tensors = [
        leaf for leaf in pytree.tree_leaves(_plain(output)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack(tensors).sum()
    return torch.stack([tensor.square().mean() for tensor in tensors]).mean()


def _plain(output: Any) -> Any:
    """Return ``output`` as tuples and dictionaries, since pytree takes an unknown class for a leaf."""
    if isinstance(output, Mapping):
        return {key: _plain(value) for key, value in output.items()}
    if isinstance(output, list | tuple):
        return [_plain(value) for value in output]
    return output


def from_transformers(
    kind: str, maker: str, make_batch: Callable[[int], Batch], *options: Mapping[str, Any]
) -> Architecture:
    """Return transformers' architecture of a kind of configuration.

    ``maker`` is an auto class, or the model's own; of ``options`` later ones win, and ``...`` leaves one out.
    """
    chosen = {key: value for some in options for key, value in some.items()}
    chosen = {key: value for key, value in chosen.items() if value is not ...}

    def make() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **chosen)
        wanted = getattr(transformers, maker)
        model: nn.Module = wanted.from_config(config) if maker.startswith("AutoModel") else wanted(config)
        return model

    return Architecture(name=kind, library="transformers", make=make, make_batch=make_batch)


def all_architectures() -> dict[str, Architecture]:
    """Return all architectures by name, in the order of `LIBRARIES`."""
    usable()  # transformers looks for torchvision too
    from benchmarks import zoo_libraries, zoo_signals, zoo_text, zoo_vision

    modules = (zoo_text, zoo_vision, zoo_signals, zoo_libraries)
    architectures = [architecture for module in modules for architecture in module.ARCHITECTURES]
    architectures.sort(key=lambda architecture: LIBRARIES.index(architecture.library))
    result = {architecture.name: architecture for architecture in architectures}
    assert len(result) == len(architectures), "two architectures have one name"
    return result
