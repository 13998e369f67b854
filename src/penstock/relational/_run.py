"""Layers as users see them: a traced function, compiled per set of shapes.

A call finds the program for its arguments' shapes (traced once) and what it is compiled to for its graph (row counts
decide which sums come first), and runs it through the one operator of all layers (`_operator`).
"""

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from penstock.arguments import check_fields, checked, must_be
from penstock.relational import _eager, _passes
from penstock.relational._cost import Cost, cost
from penstock.relational._cover import PAYS, cover
from penstock.relational._differentiate import SplitDerivative, differentiate, split
from penstock.relational._domain import Domain
from penstock.relational._fuse import column_parts, has_room_for_outers
from penstock.relational._graph import RelationalGraph
from penstock.relational._ir import Input, Program, SameRows
from penstock.relational._language import SEED, ArgumentShape, trace
from penstock.relational._lower import lower
from penstock.relational._native import DTYPES as C_DTYPES
from penstock.relational._native import CompiledC
from penstock.relational._operator import run_layer
from penstock.relational._registry import Guard, register, registered
from penstock.relational._reuse import reuse_sums
from penstock.relational._steps import Compiled
from penstock.relational._stream_graph import StreamedGraph

Emitter = Literal["auto", "c", "triton", "eager"]


def constant_while_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function like ``torch.compiler.assume_constant_result``, which would import all of Dynamo here."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a layer's compilation; the defaults are the fastest, the others are for comparison."""

    compact: bool = True
    """Whether to compute values of an end and a type once per pair, not per edge."""
    reorder: bool = True
    """Whether to replace dots with transformed rows by dots with transformed vectors."""
    sum_first: bool = True
    """Whether to sum before products if that leaves fewer rows."""
    reuse_sums: bool = True
    """Whether backward derives sums over edges from the layer's results where it can, as for a softmax."""
    shares_results: bool = False
    """Whether backward may read the layer's results instead of copies, where it needs them.

    Then results must not be written in place before backward, as with PyTorch's own operators that need theirs.
    """
    cover: bool = True
    """Whether each edge of a sum of products chooses an end for its product, on a CPU and if rows are fewer so."""
    fuse: bool = True
    """Whether rows of pairs are computed, multiplied and summed a block at a time on a CPU, not stored as a table."""
    emitter: Emitter = "auto"
    """The code generator.

    ``c`` needs a CPU with a compiler and float32 or float64; ``triton`` needs CUDA with Triton and float32, float16 or
    bfloat16; ``eager`` is PyTorch, operation by operation. ``auto`` takes the first of them that works. If an emitter
    cannot compute in half precision, results are float32.
    """

    def __post_init__(self) -> None:
        check_fields(self, "Options(emitter='eager')")


def layer(function: Callable[..., Any]) -> "Layer":
    """Compile a relational layer of your own, a function of a graph and tensors.

    The function is written in the language of `penstock.relational`.

    >>> @layer
    ... def mean_of_neighbours(g, x, weight):
    ...     for n in g.nodes():
    ...         for e in g.edges():
    ...             return n.mean(x[e.src] @ weight[e.etype])
    >>> graph = RelationalGraph(torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1]))
    >>> mean_of_neighbours(graph, torch.ones(2, 3), torch.ones(2, 3, 4)).shape
    torch.Size([2, 4])
    """
    return Layer(function)


class Layer:
    """A compiled layer: call it with a graph and the function's arguments.

    Tensors are ``[rows, ...]`` with a row for each item of the index by which the function looks them up; a pair of
    tensors has the rows of sources and of targets. The call returns what the function returns, ``[num_targets, ...]``
    or ``[num_edges, ...]``. Numbers and other arguments that are not tensors are part of the layer: new values compile
    it again.
    """

    @checked("Layer(function, Options(emitter='eager'))")
    def __init__(self, function: Callable[..., Any], options: Options | None = None):
        functools.update_wrapper(self, function)
        self.options = options or Options()
        self.function = function
        """The function that was compiled."""
        parameters = list(inspect.signature(function).parameters.values())[1:]
        self._names = tuple(parameter.name for parameter in parameters)
        self._defaults = {
            parameter.name: parameter.default
            for parameter in parameters
            if parameter.default is not inspect.Parameter.empty
        }
        self._traced: dict[Any, Traced] = {}
        self._whole: dict[Any, frozenset[str]] = {}

    def with_options(self, **changes: Any) -> "Layer":  # any: fields of Options
        """Return the same layer with other options: ``layer.with_options(compact=False)``."""
        fields = {name: getattr(self.options, name) for name in Options.__slots__}
        return Layer(self.function, Options(**{**fields, **changes}))

    def __call__(self, graph: RelationalGraph, *args: Any, **kwargs: Any) -> Any:  # any: tensors and constants
        tensors, constants = self._sorted(graph, args, kwargs)
        if isinstance(graph, StreamedGraph):
            from penstock.relational._stream_run import run_streamed  # it calls layers

            return run_streamed(self, graph, tensors, constants)
        return self.compute(graph, tensors, constants)

    def compute(
        self, graph: RelationalGraph, tensors: "dict[str, Ends]", constants: dict[str, Any], seed: int | None = None
    ) -> Any:
        """Return a call's results from its sorted arguments; ``seed`` is that of dropout, drawn if it is not given."""
        descriptions = tuple((name, *(_description(tensor) for tensor in pair)) for name, pair in tensors.items())
        for name, pair in tensors.items():
            for tensor in pair:
                if tensor.device != graph.device:
                    raise ValueError(
                        f"{name} and the graph must be on one device, got {tensor.device} and {graph.device}"
                    )
        is_unified = not graph.is_block and all(source is target for source, target in tensors.values())
        # torch.compile treats a concatenated string as a constant, never as a symbol, as it may treat a number
        program, number, inputs, num_results, num_outputs, dtype = self._prepare(
            graph.name + "", descriptions, tuple(constants.items()), torch.is_grad_enabled(), is_unified
        )
        flat = []
        for name, end, has_rows in inputs:
            if name == SEED:
                drawn = torch.randint(2**31, (1,), device="cpu") if seed is None else torch.tensor([seed], device="cpu")
                flat.append(drawn)
            else:
                tensor = tensors[name][end]
                flat.append((tensor if has_rows else tensor.unsqueeze(0)).to(dtype))
        results = run_layer(flat, program, number, num_results)
        return results[0] if num_outputs == 0 else tuple(results[:num_outputs])

    def explain(self, graph: RelationalGraph, *args: Any, **kwargs: Any) -> str:  # any: as in a call
        """Return the compiled layer as text.

        The text has the program after every pass, then those of forward and backward, and their steps for the graph.
        """
        traced, descriptions, is_unified = self._asked(graph, args, kwargs)
        program, parts = traced.program, [f"traced\n{traced.program}"]
        is_trained = bool(_wanted(program, descriptions))
        dtype = _dtype(descriptions, self.options.emitter, graph.device)
        choices = _choices(self.options, graph, traced, dtype, is_trained=is_trained)
        for name, rewrite in _pipeline(self.options, graph, traced.domains, choices, is_unified=is_unified):
            program = rewrite(program)
            parts.append(f"{name}\n{program}")
        compiled = _compiled_program(self, graph, traced, descriptions, is_grad_enabled=True, is_unified=is_unified)
        for name, executor in (("forward", compiled.forward), ("backward", compiled.backward)):
            parts += [f"{name}\n{executor.program}", f"{name}, step by step\n{executor.describe(graph)}"]
        return "\n\n".join(parts)

    def costs(self, graph: RelationalGraph, *args: Any, **kwargs: Any) -> list[Cost]:  # any: as in a call
        """Return the operations and bytes of each step of forward and backward, without computing any.

        Tensors may be on ``meta``.
        """
        if self.options.emitter != "eager":  # which compiles nothing
            return self.with_options(emitter="eager").costs(graph, *args, **kwargs)
        traced, descriptions, is_unified = self._asked(graph, args, kwargs)
        compiled = _compiled_program(self, graph, traced, descriptions, is_grad_enabled=True, is_unified=is_unified)
        halves = [lower(half.program, blocked=False) for half in (compiled.forward, compiled.backward)]
        item = compiled.dtype.itemsize
        return [cost(half, number, graph, item) for half in halves for number in range(len(half.steps))]

    def source(self, graph: RelationalGraph, *args: Any, **kwargs: Any) -> str:  # any: as in a call
        """Return the C or Triton code of the traversals of forward and backward; empty if PyTorch runs them."""
        traced, descriptions, is_unified = self._asked(graph, args, kwargs)
        compiled = _compiled_program(self, graph, traced, descriptions, is_grad_enabled=True, is_unified=is_unified)
        parts = [executor.compiled for executor in (compiled.forward, compiled.backward)]
        return "\n\n".join(part.source for part in parts if part is not None)

    def trace_of(self, tensors: "Mapping[str, Ends]", constants: dict[str, Any]) -> "Traced":
        """Return the layer's program for tensors with rows of these shapes."""
        return self._trace(_descriptions(tensors), constants)

    def program_of(
        self, graph: RelationalGraph, tensors: "Mapping[str, Ends]", constants: dict[str, Any], *, is_trained: bool
    ) -> "CompiledProgram":
        """Return what the layer is compiled to for a graph; the tensors' numbers of rows do not matter."""
        descriptions, traced = _descriptions(tensors), self.trace_of(tensors, constants)
        return _compiled_program(self, graph, traced, descriptions, is_grad_enabled=is_trained, is_unified=False)

    def _asked(
        self, graph: RelationalGraph, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple["Traced", dict[str, tuple["Description", "Description"]], bool]:
        """Return the program of a call, its arguments' shapes, and whether both ends read the same tensors."""
        tensors, constants = self._sorted(graph, args, kwargs)
        descriptions = {
            name: (_description(source), _description(target)) for name, (source, target) in tensors.items()
        }
        is_unified = not graph.is_block and all(source is target for source, target in tensors.values())
        return self._trace(descriptions, constants), descriptions, is_unified

    def _sorted(
        self, graph: RelationalGraph, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, Any]]:
        """Return the tensor arguments, for sources and for targets, and the other arguments."""
        if not isinstance(graph, RelationalGraph):
            raise must_be("graph", "a penstock.relational.RelationalGraph", graph, "layer(graph, x)")
        arguments = {**self._defaults, **dict(zip(self._names, args, strict=False)), **kwargs}
        if len(args) > len(self._names) or arguments.keys() != set(self._names):
            raise TypeError(
                f"{self.function.__name__} expects a graph and {', '.join(self._names)}, got {', '.join(arguments)}"
            )
        tensors, constants = {}, {}
        for name in self._names:
            value = arguments[name]
            if isinstance(value, torch.Tensor):
                tensors[name] = (value, _of_targets(value, graph))
            elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.Tensor):
                tensors[name] = value
            else:
                constants[name] = value
        return tensors, constants

    @constant_while_traced
    def _prepare(
        self,
        graph_name: str,
        descriptions: tuple[tuple[str, "Description", "Description"], ...],
        constants: tuple[tuple[str, Any], ...],
        is_grad_enabled: bool,
        is_unified: bool,
    ) -> tuple[int, int, tuple[tuple[str, int, bool], ...], int, int, torch.dtype]:
        """Return the operator's arguments: the program's and the graph's number, inputs by name and end, and counts.

        The counts are those of results and outputs; the last element is the dtype. Under `torch.compile` this runs
        during tracing, on plain numbers.
        """
        graph = registered(int(graph_name))
        shapes = {name: (source, target) for name, source, target in descriptions}
        traced = self._trace(shapes, dict(constants))
        compiled = _compiled_program(
            self, graph, traced, shapes, is_grad_enabled=is_grad_enabled, is_unified=is_unified
        )
        inputs = []
        for name, domain, shape in zip(compiled.names, compiled.domains, compiled.shapes, strict=True):
            end = int(domain in _OF_TARGETS)
            if domain is Domain.TARGET_TYPE and shapes[name][1][0][0] != graph.num_node_types:
                end = 0  # a table by type that was taken for one by source, and cut to the targets
            inputs.append((name, end, domain is not Domain.ONE))
            if name != SEED and domain is not Domain.ONE:
                _check_rows(name, shapes[name][end], domain, shape, graph)
        num_results = len(compiled.forward.program.outputs)
        return compiled.number, graph.number, tuple(inputs), num_results, traced.num_returned, compiled.dtype

    def _trace(
        self, descriptions: Mapping[str, tuple["Description", "Description"]], constants: Mapping[str, Any]
    ) -> "Traced":
        shapes = {name: ArgumentShape(source[0], target[0]) for name, (source, target) in descriptions.items()}
        use = (tuple(descriptions), tuple(constants.items()))
        whole = self._whole.get(use)
        if whole is None:
            program, _, _ = trace(self.function, shapes, constants)
            whole = frozenset(argument.name for argument in program.inputs.values() if argument.domain is Domain.ONE)
            self._whole[use] = whole
        rows = tuple(
            (name, *(shape if name in whole else shape[1:] for shape, _, _ in pair))
            for name, pair in descriptions.items()
        )
        key = (rows, tuple(constants.items()))
        traced = self._traced.get(key)
        if traced is None:
            traced = self._traced.setdefault(key, Traced(*trace(self.function, shapes, constants)))
        return traced


Description = tuple[tuple[int, ...], torch.dtype, bool]
"""A tensor's shape, dtype, and whether it needs a gradient."""
Ends = tuple[torch.Tensor, torch.Tensor]
"""A tensor for sources and one for targets; the same if one serves both."""


class Traced:
    """A layer's program for one set of shapes, and what it is compiled to."""

    def __init__(self, program: Program, domains: tuple[Domain, ...], num_returned: int):
        self.program, self.domains, self.num_returned = program, domains, num_returned
        self.programs: dict[Any, CompiledProgram] = {}
        self.choices: dict[Any, GraphChoices] = {}
        """Choices for the blocks of a graph, which are those for its first."""
        self.lock = Guard()

    @functools.cached_property
    def can_cover(self) -> bool:
        """Whether edges may choose an end for a product."""
        compacted = _passes.compact(self.program)
        return cover(compacted) != compacted


class Executor:
    """A runner of a program, by generated code or by PyTorch."""

    def __init__(
        self,
        program: Program,
        num_results: int,
        dtype: torch.dtype,
        options: Options,
        device: torch.device,
        choices: "GraphChoices",
    ):
        self.program, self.dtype, self.device = program, dtype, device
        self.compiled: Compiled | None = None
        match _chosen(options.emitter, dtype, device):
            case "c":
                self.compiled = CompiledC(
                    program, dtype, choices.num_parts, is_fused=options.fuse, with_outers=choices.with_outers
                )
            case "triton":
                from penstock.relational._triton import CompiledTriton

                self.compiled = CompiledTriton(program, dtype, num_results)

    def dtype_of(self, place: int) -> torch.dtype:
        """Return the dtype of an output."""
        return self.dtype if self.compiled is None else self.compiled.dtype_of(place)

    def run(self, graph: RelationalGraph, inputs: Callable[[Input], torch.Tensor]) -> list[torch.Tensor]:
        """Return the values of the outputs."""
        if self.compiled is not None:
            return self.compiled.run(graph, inputs)
        results = _eager.run(self.program, graph.indexes, inputs, self.dtype, self.device)
        rows = [graph.indexes.count(self.program[place].domain) for place in self.program.outputs]
        return [
            result.expand(count, *result.shape[1:]).contiguous() if len(result) != count else result
            for result, count in zip(results, rows, strict=True)
        ]

    def describe(self, graph: RelationalGraph) -> str:
        """Return the steps as text, or a line that says that PyTorch runs the operations."""
        if self.compiled is None:
            return "operation by operation, by PyTorch"
        return self.compiled.describe(graph)


def _chosen(emitter: Emitter, dtype: torch.dtype, device: torch.device) -> Emitter:
    """Return the emitter that runs, out of those that can. Raises ``ValueError`` if the requested one cannot."""
    if emitter == "c" and device.type != "cpu":
        raise ValueError(
            f"emitter='c' works only on the CPU, but the tensors are on {device}: layer.with_options(emitter='auto')"
        )
    if device.type == "cpu" and dtype in C_DTYPES and emitter in ("auto", "c") and CompiledC.is_available():
        return "c"
    if emitter == "triton" or (emitter == "auto" and device.type == "cuda"):
        if _has_triton(device, dtype):
            return "triton"
        if emitter == "triton":
            raise ValueError(
                f"emitter='triton' cannot compute in {dtype} on {device}: it needs Triton (pip install triton), a CUDA "
                "device that supports the dtype (x.cuda() and graph.to('cuda')), and float32, float16 or bfloat16; "
                "layer.with_options(emitter='auto') uses what is available"
            )
    return "eager"


@functools.cache
def _has_triton(device: torch.device, dtype: torch.dtype) -> bool:
    from penstock.relational._triton import CompiledTriton

    return CompiledTriton.is_available(device, dtype)


class CompiledProgram:
    """A program compiled for one kind of graph, one set of inputs with gradients, and one dtype."""

    def __init__(
        self,
        program: Program,
        wanted: tuple[int, ...],
        dtype: torch.dtype,
        options: Options,
        device: torch.device,
        choices: "GraphChoices",
    ):
        self.program, self.wanted, self.dtype = program, wanted, dtype
        inputs = list(program.inputs)
        self.names = [program.inputs[place].name for place in inputs]
        self.domains = [program.inputs[place].domain for place in inputs]
        derivative = differentiate(program, [inputs[number] for number in wanted])
        if options.reuse_sums:
            derivative = replace(derivative, program=reuse_sums(derivative.program))
        halves: SplitDerivative = split(derivative, shares_results=options.shares_results)
        self.num_outputs, self.kept = halves.num_outputs, halves.kept
        self.shapes = [program.inputs[place].shape for place in inputs]
        backward = _passes.compact(halves.backward) if options.compact else halves.backward
        self._backward_program = _passes.thin(_passes.widened(backward, [self.domains[number] for number in wanted]))
        self._make = functools.partial(Executor, dtype=dtype, options=options, device=device, choices=choices)
        self.forward = self._make(_passes.thin(halves.forward), halves.num_outputs)
        self.number = register(self)

    @functools.cached_property
    def backward(self) -> Executor:
        """The backward program, compiled when it is first needed."""
        return self._make(self._backward_program, len(self._backward_program.outputs))


def _check_rows(
    name: str, description: Description, domain: Domain, shape: tuple[int, ...], graph: RelationalGraph
) -> None:
    wanted = graph.indexes.count(domain)
    if description[0][0] != wanted:
        raise ValueError(
            f"{name} has {description[0][0]} rows, but it is looked up by {domain.value}, of which {graph} has {wanted}"
        )
    if description[0][1:] != shape:
        raise ValueError(
            f"{name} has rows of shape {list(description[0][1:])} here and of {list(shape)} at the other end; rows "
            "must have one shape at both ends if nodes compute with them and both ends read the result"
        )


def _compiled_program(
    layer: Layer,
    graph: RelationalGraph,
    traced: Traced,
    descriptions: Mapping[str, tuple[Description, Description]],
    *,
    is_grad_enabled: bool,
    is_unified: bool,
) -> CompiledProgram:
    if graph.is_block and any(isinstance(operation, SameRows) for operation in traced.program.operations):
        raise ValueError(
            f"{layer.function.__name__} reads at sources what was reduced at targets, but in a block sources and "
            "targets are different nodes"
        )
    dtype = _dtype(descriptions, layer.options.emitter, graph.device)
    wanted = _wanted(traced.program, descriptions) if is_grad_enabled else ()
    choices = _choices(layer.options, graph, traced, dtype, is_trained=bool(wanted))
    key = (wanted, dtype, graph.is_block, is_unified, graph.device, choices)
    with traced.lock:
        compiled = traced.programs.get(key)
        if compiled is None:
            program = traced.program
            for _, rewrite in _pipeline(layer.options, graph, traced.domains, choices, is_unified=is_unified):
                program = rewrite(program)
            wanted = _moved(traced.program, program, wanted)
            compiled = CompiledProgram(program, wanted, dtype, layer.options, graph.device, choices)
            traced.programs[key] = compiled
    return compiled


@dataclass(frozen=True, slots=True)
class GraphChoices:
    """Choices for a program that depend on the graph."""

    pays: float
    """Up to which ratio of rows summing first pays."""
    ratio: int
    """How often rows of sources are there for one of a target, as far as it matters."""
    num_parts: int
    """Number of parts that columns are divided into, as `fuse` takes it."""
    with_outers: bool
    """Whether sums of outer products are fused, as `fuse` takes it."""
    is_covered: bool
    """Whether each edge chooses an end."""
    has_dots_at_targets: bool
    """Whether there are so few pairs of targets that dots take products there."""


def _choices(
    options: Options, graph: RelationalGraph, traced: Traced, dtype: torch.dtype, *, is_trained: bool
) -> GraphChoices:
    indexes, num_threads = graph.indexes, torch.get_num_threads()
    of_family = (indexes.family, options, dtype, is_trained, num_threads)
    if indexes.family is not None and of_family in traced.choices:
        return traced.choices[of_family]
    at_source, at_target = (indexes.count(domain) for domain in (Domain.SOURCE_AND_TYPE, Domain.TARGET_AND_TYPE))
    # Training keeps the sums for backward; in inference they never exist.
    pays = 0.9 if is_trained else 1.25
    ratio = min(64, int(options.sum_first and pays * at_source / max(1, at_target)))
    num_pairs = at_target if ratio else at_source
    is_on_cpu = indexes.has_cover and _chosen(options.emitter, dtype, graph.device) != "triton"
    may_cover = options.cover and options.compact and is_on_cpu and traced.can_cover
    is_covered = may_cover and indexes.cover().num_rows <= PAYS * num_pairs
    choices = GraphChoices(
        pays,
        ratio,
        num_parts=column_parts(graph.num_edges, num_pairs, num_threads),
        with_outers=has_room_for_outers(num_pairs, graph.num_edge_types, num_threads),
        is_covered=is_covered,
        has_dots_at_targets=options.reorder and at_target <= _FEWER * at_source,
    )
    return choices if indexes.family is None else traced.choices.setdefault(of_family, choices)


def _pipeline(
    options: Options, graph: RelationalGraph, domains: Sequence[Domain], choices: GraphChoices, *, is_unified: bool
) -> list[tuple[str, Callable[[Program], Program]]]:
    """Return the passes by name, in order."""
    passes: list[tuple[str, Callable[[Program], Program]]] = []
    passes.append(("compact", _passes.compact) if options.compact else ("materialise", _passes.materialise))
    if choices.is_covered:
        passes.append(("cover", cover))
    if options.sum_first:  # before `reorder`, since it needs products whose other readers are dots still
        passes.append(("sum first", lambda program: _passes.sum_first(program, graph.indexes.count, choices.pays)))
    if options.reorder:
        passes.append(("reorder", _passes.reorder))
    if choices.has_dots_at_targets:
        passes.append(("dots at targets", _passes.dot_at_targets))
    if is_unified:  # not for blocks, whose ends are different nodes
        passes.append(("unify", _passes.unify))
    passes.append(("outputs' rows", lambda program: _passes.widened(program, domains)))
    return passes


def _wanted(program: Program, descriptions: Mapping[str, tuple[Description, Description]]) -> tuple[int, ...]:
    """Return which inputs, in the program's order, need gradients."""
    inputs = enumerate(program.inputs.values())
    return tuple(
        number
        for number, argument in inputs
        if argument.name in descriptions and descriptions[argument.name][argument.domain in _OF_TARGETS][2]
    )


def _moved(before: Program, after: Program, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Return the same inputs in a program that passes have rewritten; several may have become one."""
    names = {(argument.name, argument.domain): number for number, argument in enumerate(after.inputs.values())}
    inputs = list(before.inputs.values())
    moved = []
    for number in wanted:
        argument = inputs[number]
        place = names.get(
            (argument.name, argument.domain), names.get((argument.name, _TWIN.get(argument.domain, argument.domain)))
        )
        if place is not None:
            moved.append(place)
    return tuple(sorted(set(moved)))


def _dtype(
    descriptions: Mapping[str, tuple[Description, Description]], emitter: Emitter, device: torch.device
) -> torch.dtype:
    dtypes = {
        description[1] for pair in descriptions.values() for description in pair if description[1].is_floating_point
    }
    if not dtypes:
        return torch.get_default_dtype()
    promoted = functools.reduce(torch.promote_types, dtypes)
    if len(dtypes) > 1 and promoted is torch.float64:
        raise ValueError(f"the layer's tensors must have one dtype, got {sorted(map(str, dtypes))}: x.to(weight.dtype)")
    is_half = promoted in (torch.float16, torch.bfloat16)
    return torch.float32 if is_half and _chosen(emitter, promoted, device) != "triton" else promoted


def _description(tensor: torch.Tensor) -> Description:
    shape = tuple(operator.index(size) for size in tensor.shape)  # torch.compile's symbols become numbers
    return shape, tensor.dtype, tensor.requires_grad


def _descriptions(tensors: Mapping[str, Ends]) -> dict[str, tuple[Description, Description]]:
    return {name: (_description(source), _description(target)) for name, (source, target) in tensors.items()}


def _of_targets(tensor: torch.Tensor, graph: RelationalGraph) -> torch.Tensor:
    """Return the tensor's rows for targets; in a block, these are the first sources."""
    if graph.is_block and tensor.dim() and tensor.shape[0] == graph.num_sources > graph.num_targets:
        return tensor[: graph.num_targets]
    return tensor


_FEWER = 0.8
"""Share of the pairs of sources up to which pairs of targets are few enough to take products there instead."""
_OF_TARGETS = frozenset({Domain.TARGET, Domain.TARGET_TYPE})
_TWIN = {Domain.TARGET: Domain.SOURCE, Domain.TARGET_TYPE: Domain.SOURCE_TYPE}
