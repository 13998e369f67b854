"""The language: a layer is a function over one symbolic edge and one symbolic node, run once to record what it does.

``for e in g.edges()`` and ``for n in g.nodes()`` iterate once. What the body computes from ``x[e.src]``,
``weight[e.etype]`` or ``norm[e]`` holds for every edge; what it computes from ``x[n]`` or ``n.sum(message)`` holds for
every node. There are three rules; an error names the line that breaks one:

- a tensor is looked up by one kind of index: an edge, an end of it, a node, an edge type or a node type;
- values of an edge can be combined with values of a node only if the end is named, ``z[e.src]`` or ``z[e.dst]``;
- rows are combined only by ``n.sum``, ``n.mean``, ``n.max`` and ``softmax``, over the edges that enter a node.
"""

import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from penstock.relational._domain import OF_TYPES, Domain, common
from penstock.relational._ir import (
    Builder,
    Concat,
    Constant,
    Count,
    Dot,
    Dropout,
    Input,
    Map,
    Matmul,
    Operation,
    Program,
    Reduce,
    Reshape,
    SameRows,
    Shape,
    Slice,
    SumTo,
    broadcast,
    matmul_shape,
    rewritten,
)

Scope = Literal["edge", "node", "all"]
SEED = "seed of dropout"
"""Name of the input for dropout's seed, an ``int`` given with every call."""


@dataclass(frozen=True, slots=True)
class ArgumentShape:
    """The shapes of an argument, rows included."""

    source: Shape
    """Shape of the tensor with a row for each source, and of tensors that are not indexed by nodes."""
    target: Shape
    """Shape of the tensor with a row for each target; the same if one tensor serves both."""


def trace(
    function: Callable[..., Any], arguments: Mapping[str, ArgumentShape], constants: Mapping[str, Any]
) -> tuple[Program, tuple[Domain, ...], int]:
    """Return the program of ``function``, the domains of its results, and their number (0: one, not in a tuple).

    ``arguments`` are its tensors by name; ``constants`` are its other arguments, passed unchanged.
    """
    tracer = Tracer()
    symbols = {name: Argument(tracer, name, shape) for name, shape in arguments.items()}
    returned = function(LayerGraph(tracer), **symbols, **constants)
    values = list(returned) if isinstance(returned, tuple) else [returned]
    for value in values:
        if not isinstance(value, Value):
            name = getattr(function, "__name__", "the layer")
            raise TypeError(
                f"{name} must return values of nodes or edges, such as `return n.sum(message)`, got "
                f"{type(value).__name__}"
            )
    program = tracer.builder.program(value.place for value in values)
    domains = tuple(_OF_SCOPES[value.scope] for value in values)
    return program, domains, len(values) if isinstance(returned, tuple) else 0


class Tracer:
    """A recorder of operations."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.num_dropouts = 0

    def value(self, operation: Operation, scope: Scope) -> "Value":
        """Return a new value."""
        return Value(self, self.builder.add(operation), scope)

    def lift(self, other: Any) -> "Value":  # any: an operand of an operator
        """Return a value from a number, from a tensor that is used without a look-up, or from a value."""
        if isinstance(other, Value):
            return other
        if isinstance(other, Argument):
            return other.whole()
        if isinstance(other, int | float):
            return self.value(Constant(domain=Domain.ONE, shape=(), value=float(other)), "all")
        return refuse(f"expected a value, a tensor of the layer or a number, got {type(other).__name__}")

    def scope(self, values: Sequence["Value"]) -> Scope:
        """Return whether an operation on ``values`` belongs to edges, to nodes, or to all."""
        scopes = {value.scope for value in values} - {"all"}
        if len(scopes) > 1:
            refuse(
                "cannot combine a value of an edge with a value of a node: choose an end of the edge, as in z[e.src] "
                "or z[e.dst]"
            )
        return scopes.pop() if scopes else "all"

    def domain(self, values: Sequence["Value"], scope: Scope) -> Domain:
        """Return the domain of a result: that of edges if an operand belongs to an edge or to one of its ends."""
        narrow = common(self.builder[value.place].domain for value in values)
        return Domain.EDGE if scope == "edge" and narrow not in OF_TYPES else narrow

    def map(self, function: str, *others: Any, parameter: float = 0.0) -> "Value":  # any: whatever `lift` accepts
        """Return an element-wise function of values."""
        values = [self.lift(operand) for operand in others]
        scope = self.scope(values)
        try:
            place = self.builder.map(
                function,
                *(operand.place for operand in values),
                domain=self.domain(values, scope),
                parameter=parameter,
            )
        except ValueError as error:
            refuse(f"{error}; shapes are aligned from the right, so give one of them a size of 1: a.unsqueeze(-1)")
        return Value(self, place, scope)

    def at_sources(self, place: int) -> int:
        """Return the value of targets computed for sources."""
        operation = self.builder[place]
        if operation.domain not in _MIRROR:
            return place
        domain = _MIRROR[operation.domain]
        if isinstance(operation, Reduce | Count):  # a sum over edges: sources that are targets have it too
            return self.builder.add(SameRows(domain=domain, shape=operation.shape, operands=(place,)))
        mirrored = replace(operation, domain=domain)
        return self.builder.add(
            rewritten(mirrored, {operand: self.at_sources(operand) for operand in operation.operands})
        )


class LayerGraph:
    """The graph that a layer iterates over."""

    def __init__(self, tracer: Tracer):
        self.tracer = tracer

    def __iter__(self) -> NoReturn:
        refuse(
            "a layer must loop over `g.edges()` or `g.nodes()`, not over the graph itself: `for e in g.edges(): ...`"
        )

    def edges(self) -> "Iterator[Edge]":
        """Yield one edge, which stands for all."""
        yield Edge(self.tracer)

    def nodes(self) -> "Iterator[Node]":
        """Yield one node, which stands for all."""
        yield Node(self.tracer)


class Index:
    """An index that a tensor is looked up by."""

    def __init__(self, domain: Domain, what: str, scope: Scope):
        self.domain, self.what, self.scope = domain, what, scope


class Edge(Index):
    """An edge: ``src`` and ``dst`` are its ends, ``etype`` its type."""

    def __init__(self, tracer: Tracer):
        super().__init__(Domain.EDGE, "an edge", "edge")
        self.tracer = tracer
        self.src = End(Domain.SOURCE, Domain.SOURCE_TYPE, "the source of an edge")
        self.dst = End(Domain.TARGET, Domain.TARGET_TYPE, "the target of an edge")
        self.etype = Index(Domain.EDGE_TYPE, "an edge type", "edge")

    def siblings(self) -> "Value":
        """Return the number of edges of this type that enter the target, including this one."""
        return self.tracer.value(Count(domain=Domain.TARGET_AND_TYPE, shape=(), over=Domain.EDGE), "edge")


class End(Index):
    """An end of an edge; ``ntype`` is its node type."""

    def __init__(self, domain: Domain, node_type: Domain, what: str):
        super().__init__(domain, what, "edge")
        self.ntype = Index(node_type, "a node type", "edge")


class Node(Index):
    """A node that edges enter; ``ntype`` is its type."""

    def __init__(self, tracer: Tracer):
        super().__init__(Domain.TARGET, "a node", "node")
        self.ntype = Index(Domain.TARGET_TYPE, "a node type", "node")
        self.tracer = tracer

    def sum(self, value: "Value") -> "Value":
        """Return the sum of an edge's value over the edges that enter the node; 0 if there are none."""
        return self._reduce(value, "sum")

    def max(self, value: "Value") -> "Value":
        """Return the largest value, element by element; 0 if no edge enters."""
        return self._reduce(value, "max")

    def mean(self, value: "Value") -> "Value":
        """Return the mean; 0 if no edge enters."""
        return self.sum(value) / maximum(self.degree(), 1)

    def degree(self) -> "Value":
        """Return the number of edges that enter the node."""
        return self.tracer.value(Count(domain=Domain.TARGET, shape=(), over=Domain.EDGE), "node")

    def _reduce(self, value: "Value", kind: Literal["sum", "max"]) -> "Value":
        value = self.tracer.lift(value)
        if value.scope == "node":
            refuse("cannot reduce a value of a node; reduce values of edges, as in n.sum(x[e.src])")
        operation = Reduce(
            domain=Domain.TARGET, shape=value.shape, operands=(value.place,), over=Domain.EDGE, kind=kind
        )
        return self.tracer.value(operation, "node")


class _Arithmetic:
    """The operators that values and tensors share."""

    tracer: Tracer
    """The tracer that records operations."""

    def _compared(self, _: object) -> NoReturn:
        refuse("values cannot be compared or branched on; use maximum(a, b), relu(a) or products with a mask")

    __lt__ = __le__ = __gt__ = __ge__ = _compared

    def __bool__(self) -> NoReturn:  # noqa: PLE0304  # it raises
        self._compared(None)

    def __add__(self, other: Any) -> "Value":
        return self.tracer.map("add", self, other)

    def __radd__(self, other: Any) -> "Value":
        return self.tracer.map("add", other, self)

    def __sub__(self, other: Any) -> "Value":
        return self.tracer.map("subtract", self, other)

    def __rsub__(self, other: Any) -> "Value":
        return self.tracer.map("subtract", other, self)

    def __mul__(self, other: Any) -> "Value":
        return self.tracer.map("multiply", self, other)

    def __rmul__(self, other: Any) -> "Value":
        return self.tracer.map("multiply", other, self)

    def __truediv__(self, other: Any) -> "Value":
        return self.tracer.map("divide", self, other)

    def __rtruediv__(self, other: Any) -> "Value":
        return self.tracer.map("divide", other, self)

    def __neg__(self) -> "Value":
        return self.tracer.map("negate", self)

    def __matmul__(self, other: Any) -> "Value":
        tracer = self.tracer
        left, right = tracer.lift(self), tracer.lift(other)
        scope = tracer.scope([left, right])
        if len(right.shape) < 2 or not left.shape:
            refuse(
                f"cannot compute a row of shape {left.shape} @ a row of shape {right.shape}: the left one needs at "
                "least one dimension and the right one at least two; dot(a, b) multiplies two vectors"
            )
        try:
            shape = matmul_shape(left.shape, right.shape, transposed=False)
        except ValueError as error:
            refuse(f"{error}: rows have shape {left.shape} and {right.shape}")
        domain = tracer.domain([left, right], scope)
        return tracer.value(Matmul(domain=domain, shape=shape, operands=(left.place, right.place)), scope)


class Argument(_Arithmetic):
    """A tensor argument of the layer.

    Looked up by an index, it has a row for each; otherwise it is the same for all.
    """

    def __init__(self, tracer: Tracer, name: str, shape: ArgumentShape):
        self.tracer, self._name, self._shape = tracer, name, shape
        self._used_by: tuple[str, str] | None = None

    def __getitem__(self, index: Any) -> "Value":
        if isinstance(index, tuple) and len(index) == 2 and all(isinstance(part, Index) for part in index):
            if [part.domain for part in index] != [Domain.SOURCE, Domain.EDGE_TYPE]:
                refuse(f"{self._name} can be looked up by two indexes only if they are [e.src, e.etype], in this order")
            self._note("a source and an edge type")
            return self.tracer.value(
                Input(domain=Domain.SOURCE_AND_TYPE, shape=self._shape.source[1:], name=self._name), "edge"
            )
        if not isinstance(index, Index):
            refuse(
                f"{self._name}[{index!r}]: a tensor must be looked up by an edge, an end of an edge, a node or a type: "
                f"{self._name}[e.src], {self._name}[n], {self._name}[e.etype]"
            )
        self._note(_KINDS[index.domain])
        shape = self._shape.source if index.domain is Domain.SOURCE else self._shape.target
        if not shape:
            refuse(f"{self._name} is a number and has no rows to look up")
        return self.tracer.value(Input(domain=index.domain, shape=shape[1:], name=self._name), index.scope)

    def whole(self) -> "Value":
        """Return the tensor itself, the same for every edge and node."""
        self._note("nothing")
        return self.tracer.value(Input(domain=Domain.ONE, shape=self._shape.source, name=self._name), "all")

    def _note(self, kind: str) -> None:
        if self._used_by is not None and self._used_by[0] != kind:
            refuse(
                f"{self._name} is looked up by {kind} here, but by {self._used_by[0]} at {self._used_by[1]}; all "
                "look-ups of a tensor must be of one kind"
            )
        self._used_by = (kind, _user_line()[0])


class Value(_Arithmetic):
    """A value of an edge, a node, or the whole graph; ``shape`` is that of a row."""

    def __init__(self, tracer: Tracer, place: int, scope: Scope):
        self.tracer, self.place, self.scope = tracer, place, scope

    @property
    def shape(self) -> Shape:
        """Shape of one row."""
        return self.tracer.builder[self.place].shape

    def __getitem__(self, index: Any) -> "Value":
        if isinstance(index, Index):
            return self._looked_up(index)
        if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice):
            start, stop, step = index[1].indices(self.shape[-1])
            if step == 1 and stop > start:
                shape = (*self.shape[:-1], stop - start)
                operation = Slice(domain=self.domain, shape=shape, operands=(self.place,), start=start)
                return self.tracer.value(operation, self.scope)
        return refuse(
            "values of nodes must be looked up by an end of an edge, as in z[e.src]; for columns use z[..., 2:5]"
        )

    def reshape(self, *shape: int) -> "Value":
        """Return a row's elements in another shape; one size may be -1."""
        sizes = list(shape)
        size = math.prod(self.shape)
        if sizes.count(-1) == 1:
            known = -math.prod(sizes)
            sizes[sizes.index(-1)] = size // known if known else 0
        if math.prod(sizes) != size or -1 in sizes:
            refuse(f"a row of shape {self.shape} cannot be reshaped to {shape}")
        return self.tracer.value(Reshape(domain=self.domain, shape=tuple(sizes), operands=(self.place,)), self.scope)

    view = reshape

    def unsqueeze(self, dimension: int) -> "Value":
        """Insert a dimension of size 1, like ``torch.unsqueeze`` on a row's dimensions."""
        position = dimension if dimension >= 0 else dimension + len(self.shape) + 1
        return self.reshape(*self.shape[:position], 1, *self.shape[position:])

    def sum(self, dimension: int) -> "Value":
        """Sum over a dimension of the row."""
        shape = list(self.shape)
        shape[dimension] = 1
        kept = SumTo(domain=self.domain, shape=tuple(shape), operands=(self.place,))
        del shape[dimension]
        return self.tracer.value(kept, self.scope).reshape(*shape)

    @property
    def domain(self) -> Domain:
        """The domain of its rows."""
        return self.tracer.builder[self.place].domain

    def _looked_up(self, index: Index) -> "Value":
        if self.scope != "node" or index.domain not in (Domain.SOURCE, Domain.TARGET):
            refuse(
                f"a value of {_a(self.scope)} cannot be looked up by {index.what}; only values of nodes can be looked "
                "up, by e.src or e.dst"
            )
        place = self.tracer.at_sources(self.place) if index.domain is Domain.SOURCE else self.place
        return Value(self.tracer, place, index.scope)


def dot(left: Any, right: Any) -> Value:  # any: values or tensors
    """Return the sum over the last dimension of ``left * right``."""
    tracer = _tracer(left, right)
    first, second = tracer.lift(left), tracer.lift(right)
    scope = tracer.scope([first, second])
    if not first.shape or not second.shape or first.shape[-1] != second.shape[-1]:
        refuse(f"dot of rows of shape {first.shape} and {second.shape}: their last sizes must be equal")
    try:
        shape = broadcast(first.shape, second.shape)[:-1]
    except ValueError as error:
        refuse(str(error))
    return tracer.value(
        Dot(domain=tracer.domain([first, second], scope), shape=shape, operands=(first.place, second.place)), scope
    )


def concat(*values: Value) -> Value:
    """Concatenate values along the last dimension."""
    tracer = _tracer(*values)
    lifted = [tracer.lift(value) for value in values]
    scope = tracer.scope(lifted)
    if len({value.shape[:-1] for value in lifted}) > 1 or not all(value.shape for value in lifted):
        refuse(f"rows must differ only in their last size, got shapes {[value.shape for value in lifted]}")
    shape = (*lifted[0].shape[:-1], sum(value.shape[-1] for value in lifted))
    places = tuple(value.place for value in lifted)
    return tracer.value(Concat(domain=tracer.domain(lifted, scope), shape=shape, operands=places), scope)


def softmax(score: Value, *, per_type: bool = False) -> Value:
    """Return the softmax over the edges that enter a node, element by element.

    It goes over edges of all types together, or with ``per_type`` over each type separately. It is numerically
    stabilized.
    """
    tracer = _tracer(score)
    if not isinstance(per_type, bool):
        refuse(f"`per_type` must be True or False, got {per_type!r}")
    if score.scope != "edge":
        refuse(
            "softmax is computed over the edges that enter a node and expects a value of an edge, got a value of "
            f"{_a(score.scope)}"
        )
    domain = Domain.TARGET_AND_TYPE if per_type else Domain.TARGET

    def over_group(value: Value, kind: Literal["sum", "max"]) -> Value:
        operation = Reduce(domain=domain, shape=value.shape, operands=(value.place,), over=Domain.EDGE, kind=kind)
        return tracer.value(operation, "edge")

    largest = tracer.value(
        Map(domain=domain, shape=score.shape, operands=(over_group(score, "max").place,), function="stop_gradient"),
        "edge",
    )
    raised = exp(score - largest)
    return raised / over_group(raised, "sum")


def dropout(value: Value, probability: float) -> Value:
    """Set elements to zero with this probability and scale up the rest.

    Backward uses the same zeros, later calls others.
    """
    if not isinstance(probability, int | float) or not 0 <= probability < 1:
        refuse(f"`probability` of a dropout must be in [0, 1), got {probability!r}")
    if probability == 0:
        return value
    tracer = _tracer(value)
    value = tracer.lift(value)
    seed = tracer.builder.add(Input(domain=Domain.ONE, shape=(), name=SEED))
    tracer.num_dropouts += 1
    domain = Domain.EDGE if value.scope == "edge" else value.domain
    operation = Dropout(
        domain=domain,
        shape=value.shape,
        operands=(value.place, seed),
        probability=probability,
        stream=tracer.num_dropouts,
    )
    return tracer.value(operation, value.scope)


def exp(value: Value) -> Value:
    """Return ``e`` to the power of the value."""
    return _tracer(value).map("exp", value)


def log(value: Value) -> Value:
    """Return the natural logarithm."""
    return _tracer(value).map("log", value)


def sqrt(value: Value) -> Value:
    """Return the square root."""
    return _tracer(value).map("sqrt", value)


def tanh(value: Value) -> Value:
    """Return the hyperbolic tangent."""
    return _tracer(value).map("tanh", value)


def sigmoid(value: Value) -> Value:
    """Return ``1 / (1 + exp(-x))``."""
    return _tracer(value).map("sigmoid", value)


def relu(value: Value) -> Value:
    """Return the value where it is above 0, else 0."""
    return _tracer(value).map("relu", value)


def leaky_relu(value: Value, slope: float = 0.01) -> Value:
    """Return the value where it is above 0, else the value times ``slope``."""
    if isinstance(slope, bool) or not isinstance(slope, int | float):
        refuse(f"`slope` must be a number, got {slope!r}")
    return _tracer(value).map("leaky_relu", value, parameter=float(slope))


def elu(value: Value) -> Value:
    """Return the value where it is above 0, else ``exp(x) - 1``."""
    return _tracer(value).map("elu", value)


def gelu(value: Value) -> Value:
    """Return ``x`` times the cumulative normal distribution at ``x``."""
    return _tracer(value).map("gelu", value)


def maximum(left: Any, right: Any) -> Value:  # any: values, tensors or numbers
    """Return the larger value, element by element."""
    return _tracer(left, right).map("maximum", left, right)


def refuse(message: str) -> NoReturn:
    """Raise ``ValueError`` that names the user's line."""
    where, text = _user_line()
    raise ValueError(f"{where}: `{text}`: {message}" if text else message)


def _user_line() -> tuple[str, str]:
    here = str(Path(__file__).parent)
    frame = sys._getframe(1)
    while frame.f_back is not None and str(Path(frame.f_code.co_filename).parent) == here:
        frame = frame.f_back
    (summary,) = traceback.StackSummary.extract([(frame, frame.f_lineno)])
    return f"{Path(summary.filename).name}:{summary.lineno}", (summary.line or "").strip()


def _tracer(*values: Any) -> Tracer:
    for value in values:
        if isinstance(value, Value | Argument):
            return value.tracer
    refuse("functions of penstock.relational expect values of a layer; pass tensors to the layer when you call it")


def _a(scope: Scope) -> str:
    return {"edge": "an edge", "node": "a node", "all": "no edge or node"}[scope]


_OF_SCOPES: dict[Scope, Domain] = {"edge": Domain.EDGE, "node": Domain.TARGET, "all": Domain.ONE}
_MIRROR = {Domain.TARGET: Domain.SOURCE, Domain.TARGET_TYPE: Domain.SOURCE_TYPE}
_KINDS = {
    Domain.EDGE: "an edge",
    Domain.SOURCE: "a node",
    Domain.TARGET: "a node",
    Domain.EDGE_TYPE: "an edge type",
    Domain.SOURCE_TYPE: "a node type",
    Domain.TARGET_TYPE: "a node type",
}
