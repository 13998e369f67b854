"""RNNs of several layers, one layer at a time, so that each layer can be dropped and recomputed by itself.

On a CPU PyTorch runs the layers one after the other, with dropout between them, and each by its function for one layer.
If the layers are separated, results are bit-identical. cuDNN runs all layers as one, with random numbers of its own;
there an RNN stays one operator.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def layer_by_layer(
    run: Callable[..., Any], hidden_at: int, data_at: int, arguments: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    """Return the output and the last hidden states of all layers.

    ``run`` takes ``arguments`` and runs the RNN that they describe. They contain, in PyTorch's order: data of any
    layout at ``data_at``, the hidden states at ``hidden_at``, and after them the weights, whether there are biases, the
    number of layers, the probability of dropout, whether to train, whether to run both directions, and others.
    """
    before, after = list(arguments[:hidden_at]), arguments[hidden_at + 6 :]
    hidden, weights, has_bias, num_layers, dropout, trains, *_ = arguments[hidden_at:]
    states, num_weights = _split(hidden, num_layers), len(weights) // num_layers
    last = []
    for at in range(num_layers):
        if at and dropout > 0 and trains:
            before[data_at] = torch.dropout(before[data_at], dropout, train=True)
        own = weights[at * num_weights : (at + 1) * num_weights]
        before[data_at], *made = run(*before, states[at], own, has_bias, 1, 0.0, trains, *after)
        last.append(made)
    return before[data_at], *(torch.cat(layers) for layers in zip(*last, strict=True))


def _split(hidden: Any, num_layers: int) -> list[Any]:
    """Return each layer's initial states, in the form that the function takes."""
    if isinstance(hidden, torch.Tensor):
        return list(hidden.chunk(num_layers))
    return [type(hidden)(layer) for layer in zip(*(one.chunk(num_layers) for one in hidden), strict=True)]
