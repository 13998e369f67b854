"""Conversion of AOTAutograd's joint graph to a problem.

It relies on three properties, each with a test that fails if PyTorch changes it. The joint graph's nodes are tagged
forward or backward (``partitioner_tag``). Their fake values share storages exactly where the real ones do, which is how
views are found. Mutation has been turned into extra outputs.
"""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from penstock.devices import backend_of, is_accelerator
from penstock.errors import CaptureError
from penstock.remat._problem import Operator, RematProblem, Storage
from penstock.remat._whole import is_opaque
from penstock.storages import storage_id

_IS_BACKWARD = "is_backward"
_RANDOM = torch.Tag.nondeterministic_seeded
_ROOT = re.compile(r"^(G\['__import_\w+'\]\.\w+|[LG]\['\w+'\](\.__closure__\[\d+\]\.cell_contents)*)\.?")
"""A pattern of how Dynamo's names of modules begin: the variable or the closure that holds the model."""


_DEPEND_ON_STRIDES = (torch.ops.aten.as_strided.default, torch.ops.aten._reshape_alias.default)
"""Operators that look at memory rather than at a tensor."""


@dataclass(slots=True)
class JointGraph:
    """A joint graph, with the nodes that represent the operators and storages of the problem."""

    graph: fx.Graph
    owner: nn.Module
    """The module whose attributes ``get_attr`` nodes of the graph refer to."""
    num_forward_outputs: int
    primals: list[fx.Node] = field(default_factory=list)
    """Inputs of forward: parameters, buffers and arguments."""
    tangents: list[fx.Node] = field(default_factory=list)
    """Inputs of backward: gradients of the outputs."""
    calls: list[fx.Node] = field(default_factory=list)
    """The node of each operator of the problem. Tangents count as operators, with which backward begins."""
    num_forward: int = 0
    """Number of forward operators."""
    values: list[fx.Node] = field(default_factory=list)
    """Per storage, the node whose value created it."""
    storage_of: dict[fx.Node, int] = field(default_factory=dict)
    """The storage of each value that was made in the graph, including views."""
    static_inputs_bytes: int = 0
    """Bytes of the primals; each storage counts once."""
    changed: set[fx.Node] = field(default_factory=set)
    """Primals that the caller overwrites with an output after forward, such as batch norm's statistics."""

    @property
    def forward_outputs(self) -> list[Any]:
        """The outputs that forward returns to the caller."""
        return list(_output_of(self.graph).args[0][: self.num_forward_outputs])  # type: ignore[index, arg-type]

    @property
    def gradients(self) -> list[Any]:
        """The outputs that backward returns."""
        return list(_output_of(self.graph).args[0][self.num_forward_outputs :])  # type: ignore[index, arg-type]

    @property
    def generator_state_bytes(self) -> int:
        """Bytes of generator states, if every random operator of forward runs again."""
        devices = [tensors_of(call)[0].device.type for call in self.calls[: self.num_forward] if is_random(call)]
        return sum(torch.get_rng_state().nbytes if device == "cpu" else 16 for device in devices)

    @property
    def device(self) -> torch.device:
        """The device of the primals; an accelerator if any is on one."""
        tensors = [tensor for node in self.primals for tensor in tensors_of(node)]
        return max((tensor.device for tensor in tensors), key=is_accelerator, default=torch.device("cpu"))

    @property
    def takes_any_layout(self) -> bool:
        """Whether backward is correct for gradients with other strides than the traced ones."""
        return not any(is_backward(node) and node.target in _DEPEND_ON_STRIDES for node in self.graph.nodes)

    @property
    def changed_bytes(self) -> int:
        """Bytes of copies of the changed primals, if backward reads all of them."""
        return sum(tensor.nbytes for node in self.changed for tensor in tensors_of(node))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that backward makes, or of the leaves' gradients that it adds to."""
        nodes = [node.all_input_nodes[0] if node.target is accumulate else node for node in self._gradient_nodes]
        return sum(tensor.nbytes for node in nodes for tensor in tensors_of(node))

    @property
    def _gradient_nodes(self) -> list[fx.Node]:
        return [node for node in self.gradients if isinstance(node, fx.Node)]


def read(joint: fx.GraphModule, num_forward_outputs: int) -> JointGraph:
    """Sort the nodes of a joint graph. Raise ``CaptureError`` for nodes that cannot be planned."""
    graph = joint.graph
    _correct_norms(graph)
    captured = JointGraph(graph=graph, owner=joint, num_forward_outputs=num_forward_outputs)
    owners: dict[int, int] = {}
    static: dict[int, int] = {}
    forward: list[fx.Node] = []
    backward: list[fx.Node] = []
    for node in graph.nodes:
        if _knows_too_little(node):
            raise CaptureError(
                f"the step reads the value of a tensor ({node.name} depends on it), so it cannot be planned before "
                "that value is known. Keep it a tensor: y * y.sum() instead of y * y.sum().item()"
            )
        if node.op == "placeholder":
            _place_input(captured, node)
        elif node.op == "call_function" and node.target is not operator.getitem and not is_view(node):
            (backward if is_backward(node) else forward).append(node)
        elif node.op not in ("call_function", "get_attr", "output"):
            raise CaptureError(
                f"the captured graph has a node of kind {node.op!r} ({node.name}), which cannot be planned"
            )
    for node in captured.primals:
        for tensor in tensors_of(node):
            static[storage_id(tensor)] = tensor.untyped_storage().nbytes()
    captured.static_inputs_bytes = sum(static.values())
    captured.changed = _changed(captured)
    captured.num_forward = len(forward)
    captured.calls = forward + captured.tangents + backward
    for call in captured.calls:
        for value in _values_of(call):
            for tensor in tensors_of(value):
                key = storage_id(tensor)
                if key not in static and key not in owners:
                    owners[key] = len(captured.values)
                    captured.values.append(value)
    for node in graph.nodes:
        for tensor in tensors_of(node):
            if storage_id(tensor) in owners:
                captured.storage_of[node] = owners[storage_id(tensor)]
    return captured


def tag_backward(graph: fx.Graph) -> None:
    """Tag the nodes that depend on tangents as backward.

    AOTAutograd leaves out the nodes of a ``torch.autograd.Function``'s backward.
    """
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in node.name
        if is_tangent or is_backward(node) or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
            if node.op == "call_function":
                node.meta["partitioner_tag"] = _IS_BACKWARD


def accumulate(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    """Represent the addition of a gradient to its leaf's in a joint graph.

    It costs as much as the real addition, and never runs as it is.
    """
    leaf.add_(gradient)


def accumulate_early(graph: fx.Graph, num_forward_outputs: int, inputs: Sequence[Any]) -> None:
    """Let a joint graph add gradients to their leaves where they are made, instead of returning them at the end.

    ``inputs`` are those for which the graph was compiled. Gradients of tensors that are not leaves, or have hooks, are
    returned as usual.
    """
    output = _output_of(graph)
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    descriptions = output.meta.get("desc") or [None] * len(results)
    primals = {node.meta.get("desc"): node for node in graph.nodes if node.op == "placeholder"}
    for index in range(num_forward_outputs, len(results)):
        of = getattr(descriptions[index], "grad_of", None)
        number = getattr(of, "idx", None)
        if of not in primals or number is None or not isinstance(results[index], fx.Node):
            continue
        if _is_plain_leaf(inputs[number]):
            with graph.inserting_after(_last_of_group(results[index])):
                results[index] = graph.call_function(accumulate, (primals[of], results[index]))
            results[index].meta["partitioner_tag"] = _IS_BACKWARD
    output.args = (tuple(results),)


def separate_sums(graph: fx.Graph, num_forward_outputs: int, groups: Sequence[Sequence[int]]) -> None:
    """Return the terms of a gradient's sum as gradients of further inputs, which autograd then adds.

    ``groups`` contains, for an input, its number and those of the inputs that represent further gradients of it.
    Autograd takes the gradient of the first one, and then from the last one backwards. Raises ``AssertionError`` if
    AOTAutograd replaced several views of a base by the base, since the numbers then mean other inputs.
    """
    if groups and any("ViewBase" in type(node.meta.get("desc")).__name__ for node in graph.nodes):
        raise AssertionError("several inputs are views of one tensor, which the graph changes")
    output = _output_of(graph)
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for first, *further in groups:
        terms: list[Any] = [results[num_forward_outputs + first]]
        while len(terms) <= len(further) and _is_sum(terms[0]):
            terms[:1] = terms[0].args
        # autograd runs the aliases of an input from the last one backwards, after the first
        for position, term in zip([first, *reversed(further)], terms, strict=False):
            results[num_forward_outputs + position] = term
    output.args = (tuple(results),)
    graph.eliminate_dead_code()


def _is_sum(node: Any) -> bool:
    """Whether a gradient is the sum of all earlier terms and one more."""
    if not isinstance(node, fx.Node) or node.target is not torch.ops.aten.add.Tensor or len(node.args) != 2:
        return False
    tensors = [term.meta["val"] for term in (node, *node.args) if isinstance(term, fx.Node)]
    same = len({(tuple(tensor.shape), tensor.dtype) for tensor in tensors if isinstance(tensor, torch.Tensor)}) == 1
    return is_backward(node) and len(node.users) == 1 and len(tensors) == 3 and same


def accumulates_now(leaf: torch.Tensor) -> bool:
    """Whether this run of autograd has to add a gradient to that of ``leaf``, and do nothing else.

    Call it inside a backward.

    It does not if the graph is kept, since ``create_graph`` needs gradients of gradients, or on a stream of the
    caller's own, for which autograd would let the addition wait.
    """
    if not _is_plain_leaf(leaf) or not is_in_backward() or keeps_graph():
        return False
    if is_accelerator(leaf.device) and not backend_of(leaf.device).is_on_default_stream():
        return False
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)  # type: ignore[attr-defined]
    except RuntimeError:  # torch.autograd.grad wants it returned
        return False


def is_in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)  # type: ignore[attr-defined]


def keeps_graph() -> bool:
    """Whether the graph, and what it saved, is kept for another backward. Call it inside a backward."""
    if not is_in_backward():
        return False
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # type: ignore[attr-defined]


def problem_of(
    captured: JointGraph, durations_s: Sequence[float], workspaces: Sequence[int], **lanes: Any
) -> RematProblem:
    """Return the problem of a captured graph with measured operators.

    ``lanes`` are further fields of ``RematProblem``.
    """
    made_by: dict[int, list[int]] = {}
    producers = {}
    for index, call in enumerate(captured.calls):
        for value in _values_of(call):
            storage = captured.storage_of.get(value)
            if storage is not None and captured.values[storage] is value:
                made_by.setdefault(index, []).append(storage)
                producers[storage] = index
    outputs = {
        captured.storage_of[node]
        for node in captured.forward_outputs + captured.gradients
        if isinstance(node, fx.Node) and node in captured.storage_of
    }
    # ``loss.backward()`` keeps its first gradient until it returns
    outputs |= {
        captured.storage_of[node]
        for node in captured.tangents
        if node in captured.storage_of and node.meta["val"].dim() == 0
    }
    operators = tuple(
        Operator(
            name=call.name,
            target=_target(call),
            inputs=tuple(dict.fromkeys(_read_by(captured, call))),
            outputs=tuple(made_by.get(index, ())),
            duration_s=durations_s[index],
            workspace_bytes=workspaces[index],
            must_run_once=_must_run_once(call),
            module=module_of(call),
        )
        for index, call in enumerate(captured.calls)
    )
    storages = tuple(
        Storage(
            name=value.name,
            size_bytes=_size_bytes(value),
            producer=producers[index],
            is_output=index in outputs,
            must_stay=is_opaque(value),
        )
        for index, value in enumerate(captured.values)
    )
    return RematProblem(operators=operators, num_forward=captured.num_forward, storages=storages, **lanes)


def costs_of(captured: JointGraph, profile: RematProblem) -> tuple[list[float], list[int]] | None:
    """Return times and workspaces from a problem of the same operators; ``None`` if the operators differ."""
    if [_target(call) for call in captured.calls] != [operator.target for operator in profile.operators]:
        return None
    return [operator.duration_s for operator in profile.operators], [
        operator.workspace_bytes for operator in profile.operators
    ]


def is_view(node: fx.Node) -> bool:
    """Whether ``node`` only views a storage of one of its inputs."""
    tensors = tensors_of(node)
    if not tensors or (isinstance(node.meta.get("val"), list | tuple) and node.target is not operator.getitem):
        return bool(tensors) and _all_alias(node, tensors)
    return _all_alias(node, tensors)


def is_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd marks the node as part of backward."""
    return node.meta.get("partitioner_tag") == _IS_BACKWARD


def is_collective(node: fx.Node) -> bool:
    """Whether ``node`` takes part in communication, which may read its input until the end of the wait for it."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in (
        "_c10d_functional", "c10d_functional", "c10d",
    )  # fmt: skip


def is_random(node: fx.Node) -> bool:
    """Whether ``node`` draws from a generator, so that running it again must replay the generator's state."""
    if not isinstance(node.target, torch._ops.OpOverload) or _RANDOM not in node.target.tags:
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(arguments.get("dropout_p", None) != 0.0)  # attention without dropout draws nothing


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the fake tensors of a node's value."""
    value = node.meta.get("val")
    parts = value if isinstance(value, list | tuple) else [value]
    return [part for part in parts if isinstance(part, torch.Tensor) and part.layout is torch.strided]


def taken_from(call: fx.Node) -> set[int] | None:
    """Return which of a call's results the graph uses; ``None`` for a call with a single result.

    The others are dropped as soon as the call has ended, and count as its workspace.
    """
    if not isinstance(call.meta.get("val"), list | tuple):
        return None
    return {user.args[1] for user in call.users if user.target is operator.getitem}  # type: ignore[misc]


def device_of(call: fx.Node) -> torch.device:
    """Return the device of an operator's results, or of its inputs if it has no results."""
    nodes = (call, *call.all_input_nodes)
    return next((tensor.device for node in nodes for tensor in tensors_of(node)), torch.device("cpu"))


def module_of(node: fx.Node) -> str:
    """Return the innermost module from which the node comes, or the user's line of code."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if stack:
        return _ROOT.sub("", str(list(stack.values())[-1][0]))
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
    return next((line for line in reversed(lines) if line.strip("^~")), "")


def _is_plain_leaf(tensor: Any) -> bool:
    """Whether only ``grad`` uses a gradient of ``tensor``.

    There are no hooks, and no other process waits for it.
    """
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.is_leaf
        and tensor.requires_grad
        and not tensor._backward_hooks
        and not getattr(tensor, "_post_accumulate_grad_hooks", None)
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())
    )


def _last_of_group(node: fx.Node) -> fx.Node:
    """Return the node after which ``node`` may be used, since getitem nodes of one call stay together."""
    while node.next.target is operator.getitem:
        node = node.next
    return node


def _place_input(captured: JointGraph, node: fx.Node) -> None:
    if "tangents" in node.name:
        captured.tangents.append(node)
    elif "primals" in node.name:
        captured.primals.append(node)
    else:
        raise CaptureError(f"the captured graph has the input {node.name}, which cannot be planned")


def _changed(captured: JointGraph) -> set[fx.Node]:
    """Return the changed primals, found by AOTAutograd's descriptions of inputs and outputs."""
    descriptions = _output_of(captured.graph).meta.get("desc") or []
    changed = [getattr(description, "mutated_input", None) for description in descriptions]
    return {node for node in captured.primals if node.meta.get("desc") is not None and node.meta["desc"] in changed}


def _knows_too_little(node: fx.Node) -> bool:
    """Whether the fake value is a symbol, or that of a view which does not share its input's storage.

    ``item()`` returns a symbol, or leaves outdated fake values behind if Dynamo turns it into a tensor again.
    """
    if isinstance(node.meta.get("val"), torch.SymFloat | torch.SymInt | torch.SymBool):
        return True
    return _looks_at_an_input(node) and bool(tensors_of(node)) and not is_view(node)


def _looks_at_an_input(node: fx.Node) -> bool:
    """Whether the operator returns views, according to its schema."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)


def _correct_norms(graph: fx.Graph) -> None:
    """Give results of norms the dtype of the tensor from which kernels take it.

    For bfloat16 or float16, PyTorch's fake tensors have another dtype. Means and deviations have that of the input,
    where CPU kernels use that of the weights. Running statistics have float32, where kernels keep theirs. The gradient
    of a group norm's input should have that of the weights.
    """
    anew: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if anew.intersection(node.all_input_nodes) and (node.target is operator.getitem or _looks_at_an_input(node)):
            node.meta["val"] = node.target(*fx.map_arg(node.args, lambda argument: argument.meta["val"]), **node.kwargs)
            anew.add(node)
            continue
        if node.target not in _NORMS or not isinstance(value, list | tuple):
            continue
        corrected = list(value)
        for index, places in _NORMS[node.target].items():
            like = next(
                (argument for argument in map(node.args.__getitem__, places) if isinstance(argument, fx.Node)), None
            )
            if like is None or corrected[index] is None:  # a gradient that is not needed
                continue
            if corrected[index].device.type != "cpu" and index in _MEAN_AND_DEVIATION:
                continue
            dtype = like.meta["val"].dtype
            if corrected[index].dtype != dtype:
                corrected[index] = torch.empty_like(corrected[index], dtype=dtype)
                anew.add(node)
        node.meta["val"] = tuple(corrected)


_MEAN_AND_DEVIATION = (1, 2)
"""Positions of mean and deviation in the results of norms."""

_NORMS: dict[Any, dict[int, tuple[int, ...]]] = {
    torch.ops.aten.native_layer_norm.default: dict.fromkeys(_MEAN_AND_DEVIATION, (2,)),
    torch.ops.aten.native_group_norm.default: dict.fromkeys(_MEAN_AND_DEVIATION, (1,)),
    torch.ops.aten.native_group_norm_backward.default: {0: (1,)},
    torch.ops.aten._native_batch_norm_legit_functional.default: {
        **dict.fromkeys(_MEAN_AND_DEVIATION, (1, 3)),
        3: (3,),
        4: (4,),
    },
    torch.ops.aten._native_batch_norm_legit.default: dict.fromkeys(_MEAN_AND_DEVIATION, (1, 3)),
    torch.ops.aten._native_batch_norm_legit.no_stats: dict.fromkeys(_MEAN_AND_DEVIATION, (1,)),
    torch.ops.aten.native_batch_norm.default: dict.fromkeys(_MEAN_AND_DEVIATION, (1, 3)),
}
"""Per result of a norm, by position: the arguments that may give its dtype. The first that is a tensor does."""


def _values_of(call: fx.Node) -> list[fx.Node]:
    """Return the nodes that hold a call's results: its getitem nodes, or itself."""
    if isinstance(call.meta.get("val"), list | tuple):
        return [user for user in call.users if user.target is operator.getitem]
    return [call]


def _read_by(captured: JointGraph, call: fx.Node) -> list[int]:
    return [captured.storage_of[node] for node in call.all_input_nodes if node in captured.storage_of]


def _all_alias(node: fx.Node, tensors: list[torch.Tensor]) -> bool:
    if not tensors or node.op != "call_function" or node.target is operator.getitem or _changes_an_input(node):
        return False
    known = {storage_id(tensor) for argument in node.all_input_nodes for tensor in tensors_of(argument)}
    return all(storage_id(tensor) in known for tensor in tensors)


def _changes_an_input(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _size_bytes(value: fx.Node) -> int:
    return max(tensor.untyped_storage().nbytes() for tensor in tensors_of(value))


def _target(call: fx.Node) -> str:
    if call.op == "placeholder":
        return "tangent"
    return "accumulate" if call.target is accumulate else str(call.target)


def _must_run_once(call: fx.Node) -> str:
    if call.op == "placeholder":
        return "an input"
    if isinstance(call.target, torch._ops.OpOverload):
        if is_collective(call):
            return "a collective"
        if _changes_an_input(call):
            return "it changes its input"
    if isinstance(call.target, torch._ops.HigherOrderOperator):
        return "its effects are not known"
    return ""


def _output_of(graph: fx.Graph) -> fx.Node:
    node: fx.Node = next(iter(reversed(graph.nodes)))
    return node
