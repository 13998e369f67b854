"""The interface to AOTAutograd, which makes the joint graph of forward and backward and calls what a plan makes of it.

The compiled function leaves its plan open: forward hands backward one ticket instead of tensors, so that each call may
follow another plan (`_piece.py`). AOTAutograd therefore gets only an outline: a graph with the results' fake values and
a ticket, which never runs.

Python decompositions that change the last bits (interpolation) are disabled meanwhile: the operator and its own
backward are captured instead.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from penstock.remat._ticket import TICKET_BYTES

Partition = Callable[[fx.GraphModule, int], None]
"""A function that takes a joint graph and its number of forward outputs, and may make plans for it."""

Runner = Callable[[list[Any]], Any]
"""A boxed function: it takes a list and empties it, so that arguments are freed after their last use."""

_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
_WHOLE = ("upsample_", "_upsample_")
"""Prefixes of operators whose decompositions for tracing round differently than the operators do."""


def compiled(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Partition,
    forward: Runner,
    backward: Runner,
    inference: Callable[[fx.GraphModule], Runner],
) -> Callable[..., Any]:
    """Compile ``module`` for arguments like ``inputs``, to run by ``forward`` and ``backward``, or by ``inference``.

    ``partition`` gets the joint graph; it is not called if nothing requires gradients. ``forward`` returns the results
    and a ticket, which ``backward`` gets before the gradients of the results.
    """
    from torch._dynamo.backends.common import aot_autograd  # importing Dynamo takes a second
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def split(
        joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        with unset_fake_temporarily(), _disable_current_modes():
            partition(joint, num_fwd_outputs)
        return _outlines(joint, num_fwd_outputs)

    compile_ = aot_autograd(
        fw_compiler=lambda _module, _: boxed_function(forward),
        bw_compiler=lambda _module, _: boxed_function(backward),
        inference_compiler=lambda module, _: inference(module),
        partition_fn=split,
    )
    with _operators_stay_whole(), _gradients_of_any_layout():
        return compile_(module, inputs)  # type: ignore[no-any-return]


@functools.cache
def cannot_trace() -> tuple[type[Exception], ...]:
    """Return the errors raised for operators whose result shapes depend on values, or that have no fake version."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    names = (
        "DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedFakeTensorException",
        "UnsupportedMutationAliasingException", "UnsupportedOperatorException",
    )  # fmt: skip
    return GuardOnDataDependentSymNode, *(getattr(fake_tensor, name) for name in names if hasattr(fake_tensor, name))


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has only a shape, since it is being traced."""
    from torch._subclasses import fake_tensor

    return fake_tensor.is_fake(tensor)


def _outlines(joint: fx.GraphModule, num_forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return a forward and a backward with the right inputs, outputs and fake values, and nothing in between."""
    nodes = list(joint.graph.nodes)
    results = list(nodes[-1].args[0])
    ticket = fake_like(joint.graph, TICKET_BYTES)
    forward, backward = fx.Graph(), fx.Graph()
    inside: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.op == "placeholder" and "tangents" not in node.name:
            inside[node] = _copy(forward.placeholder(node.name), node)
    outputs = [_stand_in(forward, inside, node) for node in results[:num_forward_outputs]]
    forward.output((*outputs, forward.call_function(_never)))  # without a value: no buffer that backward may reuse
    backward.placeholder("saved_ticket").meta["val"] = ticket
    inside = {}
    for node in nodes:
        if node.op == "placeholder" and "tangents" in node.name:
            inside[node] = _copy(backward.placeholder(node.name), node)
    backward.output(tuple(_stand_in(backward, inside, node) for node in results[num_forward_outputs:]))
    for graph in (forward, backward):
        next(iter(reversed(graph.nodes))).meta |= {"desc": []}
    return fx.GraphModule(joint, forward), fx.GraphModule(joint, backward)


def fake_like(graph: fx.Graph, size_bytes: int) -> torch.Tensor:
    """Return a fake tensor of ``size_bytes`` bytes, in the mode in which ``graph`` was traced."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    with mode or contextlib.nullcontext():
        return torch.empty(size_bytes, dtype=torch.uint8)


def _stand_in(graph: fx.Graph, inside: dict[fx.Node, fx.Node], node: Any) -> Any:
    if not isinstance(node, fx.Node) or node in inside:
        return inside.get(node, node)
    return _copy(graph.call_function(_never), node)


def _copy(copy: fx.Node, node: fx.Node) -> fx.Node:
    copy.meta = dict(node.meta)
    return copy


def _never() -> torch.Tensor:
    raise NotImplementedError  # an outline does not run


@contextlib.contextmanager
def _operators_stay_whole() -> Iterator[None]:
    """Trace operators of `_WHOLE` as such inside this context, and their backward as in eager PyTorch."""
    removed = []
    for operator in _whole_operators():
        keys = [key for key in _KEYS if key in operator.py_kernels]
        removed += [(operator, key, operator.py_kernels.pop(key)) for key in keys]
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, key, kernel in removed:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()


@functools.cache
def _whole_operators() -> list[torch._ops.OpOverload]:
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()]
    operators = []
    for name, _, overload in (full_name.partition(".") for full_name in names if full_name.startswith(_WHOLE)):
        packet = getattr(torch.ops.aten, name)
        if (overload or "default") in packet.overloads():
            operators.append(getattr(packet, overload or "default"))
    return operators


@contextlib.contextmanager
def _gradients_of_any_layout() -> Iterator[None]:
    """Trace gradients of results with the results' strides inside this context, and accept any strides at run time.

    AOTAutograd copies a gradient whose strides differ. Eager PyTorch does not, and some kernels sum in the order of
    memory.
    """
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

    guess = MemoryFormatMeta.from_tensor

    def from_tensor(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        guessed = guess(tensor, *arguments, **keywords)
        if torch._debug_has_internal_overlap(tensor) == 1:  # an expanded tensor, which cannot hold a gradient
            return guessed
        return MemoryFormatMeta(size=tensor.size(), stride=_AnyStride(tensor.stride()))

    MemoryFormatMeta.from_tensor = staticmethod(from_tensor)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        MemoryFormatMeta.from_tensor = staticmethod(guess)  # type: ignore[method-assign]


class _AnyStride(tuple[int, ...]):
    """Strides that are equal to those of any tensor."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple)

    def __hash__(self) -> int:
        return 0


def boxed(module: fx.GraphModule) -> Runner:
    """Return a runner of ``module``, node by node, that frees each value after its last use."""
    module.graph.set_codegen(fx.graph._BoxedCodeGen())
    module.recompile()
    run = module.forward

    def runner(arguments: list[Any]) -> Any:
        return run(arguments)

    return boxed_function(runner)


def boxed_function(runner: Runner) -> Runner:
    """Mark a runner as boxed, which AOTAutograd checks."""
    runner._boxed_call = True  # type: ignore[attr-defined]
    return runner
