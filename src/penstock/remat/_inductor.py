"""Compilation of planned graphs with Inductor, piece by piece. Only this file uses Inductor.

Swaps, replays of generators, random operators and the addition of gradients stay separate calls, in the plan's order.
The operators between two of them are decomposed and compiled as one piece. Inductor fuses inside a piece, so its memory
differs from the plan's. A step is therefore accepted only after one was measured (`_trial.py`).
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from penstock.remat._aot import Runner, boxed_function
from penstock.remat._capture import is_random, is_view
from penstock.remat._whole import is_whole

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

_MIN_CALLS = 2
"""Fewest computing operators for which a piece is worth compiling."""


@dataclass(slots=True)
class _Piece:
    """Consecutive nodes of a graph that run as one."""

    inputs: list[fx.Node]
    outputs: list[fx.Node]
    run: Callable[[list[Any]], Any]


def compiled(module: fx.GraphModule) -> Runner:
    """Return a boxed runner of ``module``. Raise what Inductor raises."""
    pieces = [_piece(module, nodes) if len(nodes) > 1 else nodes[0] for nodes in _cuts(module.graph)]
    dies = _last_uses(pieces)

    def runner(arguments: list[Any]) -> Any:
        values: dict[fx.Node, Any] = {}
        remaining = iter(arguments)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(remaining)
        del remaining
        arguments.clear()
        result = None
        for piece in pieces:
            gone = dies.get(id(piece), ())
            if isinstance(piece, _Piece):
                taken = [values.pop(node) if node in gone else values[node] for node in piece.inputs]
                values |= zip(piece.outputs, piece.run(taken), strict=True)
            elif piece.op == "output":
                result = fx.node.map_arg(piece.args[0], values.__getitem__)
            elif piece.op == "get_attr":
                values[piece] = operator.attrgetter(str(piece.target))(module)
            elif piece.op == "call_function":
                given_here = fx.node.map_arg((piece.args, piece.kwargs), values.__getitem__)
                values[piece] = piece.target(*given_here[0], **given_here[1])  # type: ignore[operator]
                del given_here
            for node in gone:
                values.pop(node, None)
        return result

    return boxed_function(runner)


def _cuts(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield the nodes of ``graph`` in order: sequences that Inductor may compile, and every other node alone."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        if _is_pure(node):
            run.append(node)
            continue
        if sum(call.target is not operator.getitem and not is_view(call) for call in run) >= _MIN_CALLS:
            yield run
        else:
            yield from ([call] for call in run)
        run = []
        yield [node]


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return _is_pure(node.all_input_nodes[0])
    return isinstance(node.target, torch._ops.OpOverload) and not is_random(node) and not is_whole(node)


def _piece(module: fx.GraphModule, nodes: list[fx.Node]) -> _Piece:
    inside = set(nodes)
    inputs = list(
        dict.fromkeys(argument for node in nodes for argument in node.all_input_nodes if argument not in inside)
    )
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode([node.meta.get("val") for node in (*inputs, *nodes)])
    assert mode is not None
    run = _compile(fx.GraphModule(module, graph), [node.meta["val"] for node in inputs], mode)
    return _Piece(inputs=inputs, outputs=outputs, run=run)


def _compile(module: fx.GraphModule, inputs: list[Any], mode: "FakeTensorMode") -> Callable[[list[Any]], Any]:
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode:
        decomposed = make_fx(module, decomposition_table=select_decomp_table())(*inputs)
    result = next(iter(reversed(decomposed.graph.nodes)))
    result.meta["user_visible_output_idxs"] = list(range(len(result.args[0])))  # their strides stay as they are
    with tracing(TracingContext(mode)):
        return compile_fx_inner(decomposed, inputs)  # type: ignore[no-any-return]


def _last_uses(pieces: list[Any]) -> dict[int, list[fx.Node]]:
    """Return, per piece or node by identity, the values that nothing reads after it."""
    last: dict[fx.Node, int] = {}
    for piece in pieces:
        own = piece.outputs if isinstance(piece, _Piece) else [piece]
        for node in (*own, *(piece.inputs if isinstance(piece, _Piece) else piece.all_input_nodes)):
            last[node] = id(piece)
    dies: dict[int, list[fx.Node]] = {}
    for node, piece in last.items():
        dies.setdefault(piece, []).append(node)
    return dies
