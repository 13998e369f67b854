"""A step of a model as shards: functions of tensors and values, cut from a graph that ``torch.export`` traced.

`CapturedStep` is one graph, for one shape of batch, in training or evaluation. `cut` turns it into a `ShardProgram`.
Values that cross a cut have names. A cut is legal if every value that crosses it is a tensor that nothing changes in
place later. Values may skip shards. The operators are those that the model calls (ATen, before decomposition), and
autograd runs them as usual. Results and gradients are therefore bit-identical to the model's own.
"""

import copy
import hashlib
import itertools
import logging
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx, nn

from penstock.errors import CaptureError
from penstock.fleet._batch import Structure, flatten
from penstock.fleet._job import CannotBeCut
from penstock.storages import storage_id

BATCH = "batch."
"""Prefix of the names of values that come from the batch."""


class ShardFunction(Protocol):
    """A function that computes a shard."""

    def __call__(
        self, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], device: torch.device
    ) -> Sequence[torch.Tensor]:
        """Compute output values from the shard's tensors and input values, in the order of their names.

        All are on ``device``. A shard may have no tensors or no inputs.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Consecutive layers that are on a device together."""

    run: ShardFunction
    """Its computation."""
    tensors: tuple[str, ...]
    """Names of parameters, buffers and constants that it reads or writes."""
    inputs: tuple[str, ...]
    """Names of values: parts of the batch, or outputs of earlier shards."""
    outputs: tuple[str, ...]
    """Names of values that later shards read; for the last shard, the results."""
    label: str
    """Its part of the model, for messages."""
    writes_buffers: bool
    """Whether forward may change a buffer, as batch norm does."""


@dataclass(slots=True)
class WholeStep:
    """A step that runs from its first line to its last, in the model's own code."""

    function: Callable[[Any, Any], Any]
    """A function from the model and a batch to the loss or to metrics."""
    result: Structure | None = None
    """Structure of the function's last result."""

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:  # any: a scalar or a dict of them
        """Rebuild the result of the function from its tensors."""
        assert self.result is not None
        return self.result.rebuild(tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardProgram:
    """A step as shards in order."""

    shards: tuple[Shard, ...]
    """The shards; at least one."""
    rebuild_result: Callable[[Sequence[torch.Tensor]], Any]  # any: a scalar or a dict of them
    """A function from the outputs of the last shard to the result of the user's function."""
    fingerprints: tuple[str, ...]
    """Per shard, a key of its computation.

    Equal for shards that compute the same with tensors of the same shapes and strides, of which the same need
    gradients.
    """
    whole: WholeStep | None = None
    """The step that runs instead of the shards' own functions if the model could not be traced."""


@dataclass(slots=True, kw_only=True)
class Atom:
    """The part of a graph between two neighboring legal cuts."""

    end: int
    """Index of its last node."""
    tensors: list[str] = field(default_factory=list)
    """Names of the tensors that it uses."""
    activation_bytes: int = 0
    """Bytes that its operators make: at least those that autograd may save."""
    crossing_bytes: int = 0
    """Bytes of values that cross the cut after it."""
    label: str = ""
    """The module of its last operator, for messages."""


class CapturedStep:
    """One graph of ``function(model, batch)``, for batches with the same signature as the given one.

    ``names`` maps the ``id`` of parameters and buffers to their names. Constants of the graph are added to
    ``constants``, with ``number`` in their names, so that the names differ between the graphs of a job.

    Raises ``CaptureError`` if the model cannot be traced, or if a trace would lose its derivatives (``trains``), and
    ``CannotBeCut`` if it cannot be cut either.
    """

    def __init__(
        self,
        model: nn.Module,
        function: Callable[[Any, Any], Any],
        leaves: Sequence[torch.Tensor],
        structure: Structure,
        names: dict[int, str],
        number: int,
        *,
        trains: bool,
    ):
        self._number = number
        results: list[Structure] = []

        def flat(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            tensors, result = flatten(function(model, structure.rebuild(inputs)))
            results.append(result)
            return tuple(tensors)

        step = _Step(model, flat)
        # Clones, because the sizes of a view's base would become symbols.
        whole = tuple(leaf.clone() if leaf._is_view() else leaf for leaf in leaves)
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # slow to import

        try:
            with _quiet(), _own_derivatives_refused() if trains else nullcontext():
                exported = torch.export.export(step, whole, strict=False)
        except Exception as error:  # a user's forward or PyTorch may raise anything
            raise CaptureError(f"{type(model).__name__} cannot be traced: {first_line(error)}") from error
        if any(free_unbacked_symbols(node.meta.get("val")) for node in exported.graph.nodes):
            raise CaptureError(
                f"{type(model).__name__} cannot be traced: sizes of its tensors depend on values of tensors"
            )
        if any(tensor.layout is not torch.strided for node in exported.graph.nodes for tensor in _tensors_of(node)):
            raise CannotBeCut("its forward uses sparse tensors")
        self.result = results[-1]
        self.constants: dict[str, torch.Tensor] = {}
        self._graph = exported.graph
        self._root = exported.graph_module
        self._tensor_of: dict[fx.Node, str] = {}
        self._batch_of: dict[fx.Node, str] = {}
        self._name_placeholders(exported, step, names)
        self.nodes = [node for node in self._graph.nodes if node.op in ("call_function", "get_attr")]
        (output,) = (node for node in self._graph.nodes if node.op == "output")
        self._results: list[fx.Node] = list(output.args[0])
        self._last_use = _last_uses(self.nodes)
        trained = {names[id(parameter)] for parameter in step.parameters() if parameter.requires_grad}
        self._needing = _needing(self._graph, {node for node, name in self._tensor_of.items() if name in trained})
        self.atoms = self._find_atoms()

    def cut(self, ends: Sequence[int]) -> ShardProgram:
        """Return shards that end after the atoms with these indexes. The last atom ends the last shard."""
        bounds = [-1, *(self.atoms[end].end for end in ends)]
        shards, fingerprints = [], []
        for first, last in itertools.pairwise(bounds):
            shard, fingerprint = self._shard(first + 1, last)
            shards.append(shard)
            fingerprints.append(fingerprint)
        return ShardProgram(shards=tuple(shards), rebuild_result=self.result.rebuild, fingerprints=tuple(fingerprints))

    def _name_placeholders(self, exported: Any, step: "_Step", names: dict[int, str]) -> None:
        specs = exported.graph_signature.input_specs
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        num_leaves = 0
        for node, spec in zip(placeholders, specs, strict=True):
            kind = spec.kind.name
            if kind == "USER_INPUT":
                self._batch_of[node] = f"{BATCH}{num_leaves}"
                num_leaves += 1
            elif kind == "PARAMETER":
                self._tensor_of[node] = names[id(step.get_parameter(spec.target))]
            elif kind == "BUFFER" and id(step.get_buffer(spec.target)) in names:
                self._tensor_of[node] = names[id(step.get_buffer(spec.target))]
            elif kind in ("BUFFER", "CONSTANT_TENSOR"):
                name = f"constant.{self._number}.{spec.target}"
                self.constants[name] = exported.constants[spec.target]
                self._tensor_of[node] = name
            elif node.users:
                raise CaptureError(
                    f"the graph of the model takes {kind.lower()} {spec.target!r}, which is not an input, a parameter "
                    "or a buffer; cut the model with stages="
                )

    def _find_atoms(self) -> list[Atom]:
        last_change = self._last_changes()
        atoms: list[Atom] = []
        open_atom = Atom(end=0)
        alive: set[fx.Node] = set()
        known: set[int] = set()
        for index, node in enumerate(self.nodes):
            open_atom.end = index
            for used in node.all_input_nodes:
                if used in self._tensor_of and self._tensor_of[used] not in open_atom.tensors:
                    open_atom.tensors.append(self._tensor_of[used])
            for tensor in _tensors_of(node):
                if storage_id(tensor) not in known:
                    known.add(storage_id(tensor))
                    open_atom.activation_bytes += tensor.untyped_storage().nbytes()
            alive = {value for value in alive | {node} if self._last_use[value] > index}
            is_end = index == len(self.nodes) - 1
            if is_end or all(_may_cross(value, last_change, index) for value in alive):
                crossing = [value for value in alive if not is_end and value.op != "get_attr"]
                open_atom.crossing_bytes = sum(
                    {storage_id(value.meta["val"]): _size(value) for value in crossing}.values()
                )
                open_atom.label = _label(node)
                atoms.append(open_atom)
                open_atom = Atom(end=index)
        return atoms

    def _last_changes(self) -> dict[int, int]:
        """Return, per storage, the last node that writes to it in place."""
        last: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            for argument in _written_by(node):
                for tensor in _tensors_of(argument):
                    last[storage_id(tensor)] = index
        return last

    def _shard(self, first: int, last: int) -> tuple[Shard, str]:
        graph = fx.Graph()
        inside = self.nodes[first : last + 1]
        members = set(inside)
        is_last = last == len(self.nodes) - 1
        outputs = (
            self._results
            if is_last
            else [node for node in inside if node.op != "get_attr" and self._last_use[node] > last]
        )
        used = [used_node for node in inside for used_node in node.all_input_nodes]
        outer = [node for node in dict.fromkeys([*used, *outputs]) if node not in members]
        tensors = [node for node in outer if node in self._tensor_of]
        inputs = [node for node in outer if node not in self._tensor_of and node.op != "get_attr"]
        attributes = [
            node for node in outer if node.op == "get_attr"
        ]  # submodules: copied into every shard that calls them
        mapped = {node: graph.placeholder(node.name) for node in (*tensors, *inputs)}
        for node in (*attributes, *inside):
            mapped[node] = graph.node_copy(node, mapped.__getitem__)
        graph.output(tuple(mapped[node] for node in outputs))
        children = {
            str(node.target): getattr(self._root, str(node.target)) for node in graph.nodes if node.op == "get_attr"
        }
        module = fx.GraphModule(children, graph)
        shard = Shard(
            run=_GraphRun(module),
            tensors=tuple(self._tensor_of[node] for node in tensors),
            inputs=tuple(self._batch_of.get(node, node.name) for node in inputs),
            outputs=tuple(f"result.{index}" if is_last else node.name for index, node in enumerate(outputs)),
            label=span(_label(inside[0]), _label(inside[-1])),
            writes_buffers=any(_may_write(node) for node in inside),
        )
        # Strides and gradients count too: a layer norm of a transposed value copies it, and a convolution whose input
        # needs no gradient computes none. Shards that differ in them do not take the same bytes.
        layouts = [(*_layout(node.meta["val"]), node in self._needing) for node in (*tensors, *inputs)]
        return shard, _fingerprint(module, layouts)


class _Step(nn.Module):
    """A module that calls the user's function with its model, over flat tensors.

    Tracing restores attributes, so results are stored elsewhere.
    """

    def __init__(self, model: nn.Module, function: Callable[..., tuple[torch.Tensor, ...]]):
        super().__init__()
        self.model = model
        self._function = function

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._function(*leaves)


class _GraphRun:
    """A function that runs a shard's graph.

    The graph is rewritten once per device, for operators that name a device.
    """

    def __init__(self, module: fx.GraphModule):
        self._modules = {"cpu": module}
        self._original = module

    def __call__(
        self, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], device: torch.device
    ) -> Sequence[torch.Tensor]:
        module = self._modules.get(str(device))
        if module is None:
            module = self._modules[str(device)] = _on_device(self._original, device)
        results: Sequence[torch.Tensor] = module(*tensors, *inputs)
        return results


def _on_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    module = copy.deepcopy(module)
    for child in module.modules():
        if not isinstance(child, fx.GraphModule):
            continue
        for node in child.graph.nodes:
            node.args, node.kwargs = fx.node.map_aggregate(
                (node.args, node.kwargs), lambda argument: device if isinstance(argument, torch.device) else argument
            )
            if "wrap_with_autocast" in str(node.target):
                node.args = (device.type, *node.args[1:])
        child.recompile()
    return module


def _last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return, per node, the position of its last user; one behind the end for results."""
    position = {node: index for index, node in enumerate(nodes)}
    uses = {node: [position.get(user, len(nodes)) for user in node.users] for node in nodes}
    return {node: max(users, default=position[node]) for node, users in uses.items()}


def _written_by(node: fx.Node) -> list[fx.Node]:
    """Return what the operator writes to in place, itself or in the graph that it runs."""
    inner = next((argument for argument in node.all_input_nodes if argument.op == "get_attr"), None)
    if inner is not None:
        return _written_inside(node, inner)
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    arguments = {argument.name: argument.alias_info for argument in schema.arguments}
    values = [*zip(arguments, node.args, strict=False), *node.kwargs.items()]
    written = [value for name, value in values if arguments[name] is not None and arguments[name].is_write]
    return _nodes_in(written)


def _written_inside(node: fx.Node, inner: fx.Node) -> list[fx.Node]:
    """Return those arguments of an operator that runs a graph to whose storage the graph writes."""
    module = inner.graph.owning_module
    graph = getattr(getattr(module, str(inner.target), None), "graph", None)
    arguments = [argument for argument in _nodes_in(node.args) if argument.op != "get_attr"]
    if graph is None:
        return arguments
    places = [node for node in graph.nodes if node.op == "placeholder"]
    if len(places) != len(arguments) or not all(map(_tensors_of, places)):
        return arguments
    written = {storage_id(tensor) for node in graph.nodes for used in _written_by(node) for tensor in _tensors_of(used)}
    return [
        argument
        for argument, place in zip(arguments, places, strict=True)
        if written & {storage_id(t) for t in _tensors_of(place)}
    ]


def _nodes_in(arguments: Any) -> list[fx.Node]:  # any: arguments of an operator
    nodes: dict[fx.Node, None] = {}
    fx.map_arg(arguments, nodes.setdefault)
    return list(nodes)


def _may_write(node: fx.Node) -> bool:
    """Whether the operator may change its arguments. The schema of batch norm does not tell."""
    runs_a_graph = any(argument.op == "get_attr" for argument in node.all_input_nodes)
    return runs_a_graph or bool(_written_by(node)) or "_norm" in str(node.target)


def _may_cross(node: fx.Node, last_change: dict[int, int], index: int) -> bool:
    value = node.meta.get("val")
    if node.op == "get_attr":
        return True  # a submodule: copied into every shard that calls it
    return isinstance(value, torch.Tensor) and last_change.get(storage_id(value), -1) <= index


def _tensors_of(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for tensor in value if isinstance(tensor, torch.Tensor)] if isinstance(value, tuple | list) else []


def _size(node: fx.Node) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in _tensors_of(node)) if node.op != "get_attr" else 0


def _label(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(list(stack.values())), ("",))[0] if stack else ""
    target = node.target
    name = target.__name__ if target is operator.getitem else str(target)
    return f"{path.removeprefix('model.')} ({name})" if path else name


def _needing(graph: fx.Graph, trained: set[fx.Node]) -> set[fx.Node]:
    """Return ``trained`` and the nodes computed from them that have derivatives.

    Only the names of operators are examined.
    """
    needing = set(trained)
    for node in graph.nodes:
        is_cut = "detach" in str(node.target) or ("set_grad_enabled" in str(node.target) and not node.args[0])
        has_derivatives = any(tensor.is_floating_point() or tensor.is_complex() for tensor in _tensors_of(node))
        if has_derivatives and not is_cut and needing.intersection(node.all_input_nodes):
            needing.add(node)
    return needing


def _layout(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()) if tensor.layout == torch.strided else ()


def _fingerprint(module: fx.GraphModule, layouts: list[tuple[Any, ...]]) -> str:
    numbers = {node: index for index, node in enumerate(module.graph.nodes)}
    text = repr(layouts)
    for node in module.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda argument: numbers[argument])
        target = getattr(module, node.target).code if node.op == "get_attr" else node.target
        text += f"{node.op if node.op == 'placeholder' else target} {arguments}\n"
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def _own_derivatives_refused() -> Iterator[None]:
    """Refuse code with derivatives of its own inside this context, since a trace records only the operators of forward.

    Such code is ``torch.autograd.Function``, which also implements hooks on a module's backward, and hooks on tensors.
    """
    tracer = threading.get_ident()
    apply, hook = vars(torch.autograd.Function)["apply"], torch.Tensor.register_hook

    def refused(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if threading.get_ident() == tracer:
                raise CaptureError(
                    "its forward uses a torch.autograd.Function or a hook on a tensor, which a trace would lose"
                )
            return original(*arguments, **keywords)

        return call

    torch.autograd.Function.apply = classmethod(refused(apply.__func__))  # type: ignore[assignment, method-assign]
    torch.Tensor.register_hook = refused(hook)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        torch.Tensor.register_hook = hook  # type: ignore[method-assign]


def span(first: str, last: str) -> str:
    """Return a shard's label, made of the labels of its first and its last part."""
    return first if first == last else f"{first} to {last}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence PyTorch, which prints the graph so far if code reads the value of a tensor.

    Users need not see it, because such a model is run whole.
    """
    import torch.export._trace  # loads Dynamo

    loggers = [logging.getLogger(name) for name in ("torch.fx.experimental.symbolic_shapes", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        vars(torch.export._trace)["print"] = lambda *_, **__: None
        yield
    finally:
        vars(torch.export._trace).pop("print", None)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def first_line(error: Exception) -> str:
    """Return the error's type and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
