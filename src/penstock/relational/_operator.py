"""The one custom operator of all layers, with its derivative.

It takes tensors, and two numbers that stand for the compiled program and the graph, since `torch.compile` understands
numbers. It sees one node with known shapes, and autograd one step.

Operators made by `torch.library.custom_op` import all of Dynamo when they are first called, 0.9 s; these do not.
"""

from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import DoubleBackwardError
from penstock.relational._differentiate import GRADIENT, KEPT
from penstock.relational._registry import registered

NO_SECOND_DERIVATIVE = (
    "a relational layer cannot be differentiated twice; use torch.autograd.grad without create_graph=True, or write "
    "the layer in plain PyTorch"
)
"""Message of the error for ``create_graph=True``."""


def run_layer(tensors: Sequence[torch.Tensor], program: int, graph: int, num_outputs: int) -> list[torch.Tensor]:
    """Call the operator: return the layer's outputs, then what backward needs.

    ``tensors`` are the program's inputs; ``program`` and ``graph`` are numbers of the registry.
    """
    results: list[torch.Tensor] = torch.ops.penstock.relational_layer(tensors, program, graph, num_outputs)
    return results


_LIBRARY = torch.library.Library("penstock", "FRAGMENT")
_LIBRARY.define("relational_layer(Tensor[] tensors, int program, int graph, int num_outputs) -> Tensor[]")
_LIBRARY.define(
    "relational_layer_backward(Tensor[] tensors, Tensor[] kept, Tensor[] gradients, int program, int graph) -> Tensor[]"
)


@torch.library.impl(_LIBRARY, "relational_layer", "CompositeExplicitAutograd")
def _layer_operator(tensors: Sequence[torch.Tensor], program: int, graph: int, num_outputs: int) -> list[torch.Tensor]:
    """Run forward: return the layer's outputs, then what backward needs."""
    del num_outputs
    compiled, on = registered(program), registered(graph)
    by_input = dict(zip(zip(compiled.names, compiled.domains, strict=True), tensors, strict=True))
    results: list[torch.Tensor] = compiled.forward.run(on, lambda argument: by_input[argument.name, argument.domain])
    return _apart(results, tensors)


@torch.library.impl(_LIBRARY, "relational_layer_backward", "CompositeExplicitAutograd")
def _backward_operator(
    tensors: Sequence[torch.Tensor],
    kept: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    program: int,
    graph: int,
) -> list[torch.Tensor]:
    """Return the gradients of the wanted inputs, in order."""
    compiled, on = registered(program), registered(graph)
    by_input: dict[Any, torch.Tensor] = dict(
        zip(zip(compiled.names, compiled.domains, strict=True), tensors, strict=True)
    )
    for number, tensor in enumerate(kept):
        by_input[KEPT.format(number)] = tensor
    for number, tensor in enumerate(gradients):
        by_input[GRADIENT.format(number)] = tensor
    results: list[torch.Tensor] = compiled.backward.run(
        on,
        lambda argument: by_input[argument.name if argument.name in by_input else (argument.name, argument.domain)],
    )
    return _apart(results, [*tensors, *kept, *gradients])


def _apart(values: list[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return results with memory of their own, as operators must."""
    taken = {value.untyped_storage().data_ptr() for value in inputs}
    results = []
    for value in values:
        pointer = value.untyped_storage().data_ptr()
        result = value.clone() if value.numel() and pointer in taken else value
        taken.add(result.untyped_storage().data_ptr())
        results.append(result)
    return results


def _fake_layer(tensors: Sequence[torch.Tensor], program: int, graph: int, num_outputs: int) -> list[torch.Tensor]:
    compiled, on = registered(program), registered(graph)
    del num_outputs
    forward = compiled.forward
    sample = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    device = on.device if sample is None else sample.device
    outputs = [(place, forward.program[place]) for place in forward.program.outputs]
    return [
        torch.empty(on.indexes.count(output.domain), *output.shape, dtype=forward.dtype_of(place), device=device)
        for place, output in outputs
    ]


def _fake_backward(
    tensors: Sequence[torch.Tensor],
    kept: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    program: int,
    graph: int,
) -> list[torch.Tensor]:
    del kept, gradients, graph
    wanted = (tensors[number] for number in registered(program).wanted)
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in wanted]


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    # What backward needs is among the operator's outputs, so that autograd and torch.compile see its lifetime.
    tensors, program, graph, _ = inputs
    compiled = registered(program)
    ctx.num_tensors, ctx.program, ctx.graph = len(tensors), program, graph
    ctx.compiled, ctx.on = compiled, registered(graph)  # keeps them alive until backward
    kept = [output[number] for number in compiled.kept]
    ctx.set_materialize_grads(False)  # else kept values get gradients of zeros
    ctx.save_for_backward(*tensors, *kept)
    ctx.outputs = [(result.shape, result.dtype, result.device) for result in output[: compiled.num_outputs]]


def _refuse(ctx: Any, *gradients: Any) -> Any:
    del ctx, gradients
    raise DoubleBackwardError(NO_SECOND_DERIVATIVE)


def _backward(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Any:
    saved = ctx.saved_tensors
    tensors, kept = list(saved[: ctx.num_tensors]), list(saved[ctx.num_tensors :])
    filled = [
        torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
        for gradient, (shape, dtype, device) in zip(gradients, ctx.outputs, strict=False)
    ]
    computed = torch.ops.penstock.relational_layer_backward(tensors, kept, filled, ctx.program, ctx.graph)
    results: list[torch.Tensor | None] = [None] * ctx.num_tensors
    for number, gradient in zip(ctx.compiled.wanted, computed, strict=True):
        results[number] = gradient
    return results, None, None, None


torch.library.register_fake("penstock::relational_layer", _fake_layer, lib=_LIBRARY)
torch.library.register_fake("penstock::relational_layer_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("penstock::relational_layer", _backward, setup_context=_setup_context, lib=_LIBRARY)
torch.library.register_autograd("penstock::relational_layer_backward", _refuse, lib=_LIBRARY)
