"""RNNs, in a form that can be captured: over packed sequences, and one layer at a time.

The number of sequences of a packed batch is the first of its ``batch_sizes``, a value in a tensor. PyTorch's modules
read it where Dynamo must give up the whole module. Here it is taken from the order of the sequences, if that is known.
Otherwise it is read in a place after which a graph can begin. The RNN is one operator, whose result's shape needs no
values.

RNNs of several layers run one layer at a time, so that each layer can be dropped and recomputed by itself. On a CPU
PyTorch runs the layers one after the other, with dropout between them, and each by its function for one layer. If the
layers are separated, results are bit-identical. cuDNN runs all layers as one, with random numbers of its own; there an
RNN stays one operator.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from penstock.remat._aot import is_fake

_library = torch.library.Library("penstock", "FRAGMENT")
_library.define(
    "packed_rnn(str mode, Tensor data, Tensor batch_sizes, Tensor[] hidden, Tensor[] weights, bool bias,"
    " int num_layers, float dropout, bool training, bool bidirectional) -> Tensor[]"
)
PACKED_RNN = torch.ops.penstock.packed_rnn
_FUNCTIONS = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}


def packed_rnn(
    mode: str, data: torch.Tensor, batch_sizes: torch.Tensor, hidden: Sequence[torch.Tensor], *others: Any
) -> list[torch.Tensor]:
    """Return the output and the last hidden states by PyTorch's function; for fake tensors, their shapes."""
    if is_fake(data):
        return _shapes(data, hidden, *others)
    states: Any = tuple(hidden) if mode == "LSTM" else hidden[0]
    return list(_FUNCTIONS[mode](data, batch_sizes, states, *others))  # type: ignore[operator]


def _shapes(
    data: torch.Tensor, hidden: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *others: Any
) -> list[torch.Tensor]:
    num_directions = 2 if others[-1] else 1
    output = data.new_empty(data.shape[0], num_directions * hidden[0].shape[2])
    results = [output, *(torch.empty_like(states) for states in hidden)]
    needs = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (data, *hidden, *weights))
    return [tensor.requires_grad_(needs) for tensor in results]


_library.impl("packed_rnn", packed_rnn, "CompositeImplicitAutograd")


def forwards(outside: Callable[..., Any]) -> dict[type[nn.Module], Callable[..., Any]]:
    """Return the ``forward`` that each module needs while a step is traced. Dynamo does not look ``outside``."""
    return {kind: _for_packed_too(kind.forward, outside) for kind in (nn.LSTM, nn.GRU, nn.RNN)}


@functools.cache
def _for_packed_too(original: Callable[..., Any], outside: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(original, "takes_packed", False):
        return original
    read = outside(_num_sequences)

    @functools.wraps(original)
    def forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:  # noqa: A002  # callers may name it
        if not isinstance(input, PackedSequence):
            return original(self, input, hx)
        # Without an order, the number of sequences has to be read, which ends a graph. With one, its shape tells it.
        order = input.sorted_indices
        return _packed(self, input, hx, read(input.batch_sizes) if order is None else order.shape[0])

    forward.takes_packed = True  # type: ignore[attr-defined]
    return forward


def _num_sequences(batch_sizes: torch.Tensor) -> int:
    return int(batch_sizes[0])


def _packed(module: nn.RNNBase, packed: PackedSequence, hx: Any, num_sequences: int) -> Any:
    data, batch_sizes, order, back = packed
    is_lstm = module.mode == "LSTM"
    module.check_input(data, batch_sizes)
    num_states = module.num_layers * (2 if module.bidirectional else 1)
    widths = (module.proj_size or module.hidden_size, module.hidden_size)[: 2 if is_lstm else 1]
    shapes = [(num_states, num_sequences, width) for width in widths]
    if hx is None:
        hidden = [torch.zeros(*shape, dtype=data.dtype, device=data.device) for shape in shapes]
    else:
        hidden = list(hx) if is_lstm else [hx]
        for states, shape in zip(hidden, shapes, strict=True):
            module.check_hidden_size(states, shape)
        hidden = [states if order is None else states.index_select(1, order) for states in hidden]
    weights = [weight for layer in module.all_weights for weight in layer]
    output, *last = PACKED_RNN(
        module.mode,
        data,
        batch_sizes,
        hidden,
        weights,
        module.bias,
        module.num_layers,
        module.dropout,
        module.training,
        module.bidirectional,
    )
    last = [states if back is None else states.index_select(1, back) for states in last]
    return PackedSequence(output, batch_sizes, order, back), tuple(last) if is_lstm else last[0]


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
    for layer in range(num_layers):
        if layer and dropout > 0 and trains:
            before[data_at] = torch.dropout(before[data_at], dropout, train=True)
        own = weights[layer * num_weights : (layer + 1) * num_weights]
        before[data_at], *hidden_after = run(*before, states[layer], own, has_bias, 1, 0.0, trains, *after)
        last.append(hidden_after)
    return before[data_at], *(torch.cat(layers) for layers in zip(*last, strict=True))


def _split(hidden: Any, num_layers: int) -> list[Any]:
    """Return each layer's initial states, in the form that the function takes."""
    if isinstance(hidden, torch.Tensor):
        return list(hidden.chunk(num_layers))
    return [type(hidden)(layer) for layer in zip(*(states.chunk(num_layers) for states in hidden), strict=True)]
