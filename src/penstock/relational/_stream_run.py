"""Layers on a streamed graph: block by block, in one step of autograd.

Forward computes the results of each block's targets and keeps nothing but the layer's inputs. Backward reads each block
again, computes it again, and adds up the gradients of all blocks.
"""

import math
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from penstock.errors import DoubleBackwardError
from penstock.relational._domain import Domain
from penstock.relational._dropout import MASK, hashed
from penstock.relational._ir import Count, Dropout, Input, Program, SameRows
from penstock.relational._language import SEED
from penstock.relational._operator import NO_SECOND_DERIVATIVE
from penstock.relational._run import Ends, Layer, Traced
from penstock.relational._stages import Stage, is_max, stages_at_sources, stages_over_parts
from penstock.relational._stream_blocks import LayerBlocks, item_bytes_of
from penstock.relational._stream_graph import Cut, StreamBlock, StreamedGraph
from penstock.relational._stream_sums import GradientSums, GradientSumsOfParts, PassClock, waited
from penstock.tiers import HeapKeeper

_layers: "weakref.WeakKeyDictionary[Traced, Any]" = weakref.WeakKeyDictionary()
"""The stages of programs, as layers."""
_STREAM = 1
"""Number of a layer's first dropout."""
_SAMPLE_EDGES = 2**16
"""Most edges of the block by which programs are chosen."""
_SAMPLE_BYTES = 256
"""Bytes of the budget for each of them."""


def run_streamed(
    layer: Layer, graph: StreamedGraph, tensors: dict[str, Ends], constants: dict[str, Any]
) -> Any:  # any: what the layer returns
    """Return a layer's results on a streamed graph, ``[num_targets, ...]``.

    Under `torch.compile` this breaks the graph: threads and files cannot be traced.
    """
    is_compiling = "torch._dynamo" in sys.modules
    run = torch.compiler.disable(_run_streamed) if is_compiling else _run_streamed
    return run(layer, graph, tensors, constants)


# Dynamo reads this attribute. Its own decorators would load it, and 70 MiB, in programs that do not compile.
run_streamed._torchdynamo_disable = True  # type: ignore[attr-defined]


def _run_streamed(layer: Layer, graph: StreamedGraph, tensors: dict[str, Ends], constants: dict[str, Any]) -> Any:
    traced = layer.trace_of(tensors, constants)
    if any(domain is not Domain.TARGET for domain in traced.domains):
        raise ValueError(
            f"{layer.function.__name__} returns values of edges, but on a streamed graph a layer must return values of "
            "nodes, such as `return n.sum(message)`, since all edges together do not fit into memory"
        )
    _check_dropout(layer, traced.program)
    seed = int(torch.randint(2**31, (1,), device="cpu")) if SEED in _names(traced.program) else 0
    if any(isinstance(operation, SameRows) for operation in traced.program.operations):
        results: Sequence[torch.Tensor] = _by_stages(layer, graph, traced, tensors, seed)
    else:
        call = _Pass(layer, graph, traced.program, tensors, constants, seed)
        call.check()
        results = _streamed(call)
    return results[0] if traced.num_returned == 0 else tuple(results)


def _check_dropout(layer: Layer, program: Program) -> None:
    """Raise ``ValueError`` for dropouts whose zeros would depend on the blocks."""
    dropouts = [operation for operation in program.operations if isinstance(operation, Dropout)]
    if len({operation.stream for operation in dropouts}) > 1 or any(
        operation.domain is not Domain.EDGE for operation in dropouts
    ):
        raise ValueError(
            f"{layer.function.__name__} drops values of nodes, or more than once; on a streamed graph a layer may have "
            "one dropout, of values of edges. For nodes, use torch.nn.functional.dropout on x before the layer"
        )


def _names(program: Program) -> set[str]:
    return {argument.name for argument in program.inputs.values()}


def _by_stages(
    layer: Layer, graph: StreamedGraph, traced: Traced, tensors: dict[str, Ends], seed: int
) -> list[torch.Tensor]:
    """Return the results of a layer that reads sums at sources: each stage goes through all blocks."""
    if graph.is_block:
        raise ValueError(
            f"{layer.function.__name__} reads at sources what was reduced at targets, but here sources and targets are "
            "different nodes"
        )
    stages = _remembered(traced, "at sources", lambda: stages_at_sources(traced.program))
    values: dict[str, torch.Tensor] = {}
    for number, stage in enumerate(stages.stages):
        part = _remembered(traced, ("at sources", number), lambda: _StageLayer(layer, stage))  # noqa: B023  # made now
        more = {name: (value, value) for name, value in values.items()}
        read = {name: pair for name, pair in {**tensors, **more}.items() if name in _names(stage.program) - {SEED}}
        call = _Pass(part, graph, stage.program, read or tensors, {}, seed)
        call.check()
        values |= dict(zip(stage.names, _streamed(call), strict=True))
    return [values[name] for name in stages.outputs]


def _remembered(traced: Traced, key: Any, make: Any) -> Any:
    made_for = _layers.setdefault(traced, {})
    if key not in made_for:
        made_for[key] = make()
    return made_for[key]


class _StageLayer(Layer):
    """A stage of a layer's program, called by names of tensors."""

    def __init__(self, layer: Layer, stage: Stage):
        super().__init__(layer.function, layer.options)
        self.stage = stage
        domains = tuple(stage.program[place].domain for place in stage.program.outputs)
        self.traced = Traced(stage.program, domains, len(domains))

    def _trace(self, descriptions: Any, constants: Any) -> Traced:
        del descriptions, constants
        return self.traced


class _Pass:
    """One call of a layer on the blocks of a graph.

    It is wide because it holds a call's arguments and how each is looked up.
    """

    def __init__(
        self,
        layer: Layer,
        graph: StreamedGraph,
        program: Program,
        tensors: Mapping[str, Ends],
        constants: dict[str, Any],
        seed: int,
    ):
        self.layer, self.graph, self.constants, self.seed = layer, graph, constants, seed
        self.program = program
        self.inputs = [argument for argument in program.inputs.values() if argument.name != SEED]
        self.tables: list[torch.Tensor] = []
        """The tensors that the call reads, each once."""
        self._numbers: dict[tuple[str, bool], int] = {}
        for name, pair in tensors.items():
            for at_target, table in enumerate(pair):
                numbers = [number for number, other in enumerate(self.tables) if other is table]
                self._numbers[name, bool(at_target)] = numbers[0] if numbers else len(self.tables)
                self.tables += [] if numbers else [table]
        self._ends = dict(tensors)
        self._blocks: LayerBlocks | None = None
        self.is_trained = torch.is_grad_enabled() and any(table.requires_grad for table in self.tables)
        """Whether backward may follow."""

    def let_go(self) -> None:
        """Keep shapes instead of tensors, which autograd saves, so that hooks may offload them until backward."""
        stand_ins = {id(table): table if _is_fixed(table) else _stand_in(table) for table in self.tables}
        self._ends = {name: (stand_ins[id(pair[0])], stand_ins[id(pair[1])]) for name, pair in self._ends.items()}
        self.tables = [stand_ins[id(table)] for table in self.tables]

    def check(self) -> None:
        """Raise ``ValueError`` for tensors on another device, or with other rows than the graph has."""
        graph = self.graph
        num_rows = {
            Domain.SOURCE: graph.num_sources,
            Domain.TARGET: graph.num_targets,
            Domain.EDGE: graph.num_edges,
            Domain.SOURCE_AND_TYPE: graph.num_edge_types * graph.num_sources,
            Domain.EDGE_TYPE: graph.num_edge_types,
            Domain.SOURCE_TYPE: graph.num_node_types,
            Domain.TARGET_TYPE: graph.num_node_types,
        }
        for argument in self.inputs:
            table = self.tables[self.number_of(argument)]
            if table.device != graph.device:
                raise ValueError(
                    f"{argument.name} and the graph must be on one device, got {table.device} and {graph.device}: "
                    f"RelationalGraph.stream(path, budget=..., device={str(table.device)!r})"
                )
            wanted = num_rows.get(argument.domain)
            if wanted is not None and len(table) != wanted:
                raise ValueError(
                    f"{argument.name} has {len(table)} rows, but it is looked up by {argument.domain.value}, of which "
                    f"{graph} has {wanted}"
                )

    def number_of(self, argument: Input) -> int:
        """Return the number of the tensor that an input reads."""
        return self._numbers[_end_of(argument)]

    def with_fixed(self, values: Sequence[Any], fixed: Any = None) -> list[Any]:
        """Return values for the tensors of autograd, with ``fixed``, or the tables themselves, for the others."""
        rest = iter(values)
        return [(table if fixed is None else fixed) if _is_fixed(table) else next(rest) for table in self.tables]

    def without_gradients(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results that have no gradients."""
        outputs = [self.program[place] for place in self.program.outputs]
        return [rows for rows, operation in zip(results, outputs, strict=True) if isinstance(operation, Count)]

    def cuts(self, *, is_trained: bool) -> LayerBlocks:
        """Return the blocks of this call: the same for all calls like it, and for forward and backward."""
        if self._blocks is not None:
            return self._blocks
        wanted = tuple(is_trained and table.requires_grad for table in self.tables)
        shapes = tuple((table.shape[1:], table.dtype) for table in self.tables)
        key = (
            self.layer,
            tuple(self.constants.items()),
            wanted,
            shapes,
            self.graph.limit_bytes,
            torch.get_num_threads(),
        )
        known: dict[Any, LayerBlocks] = self.graph.work.blocks
        if key not in known:
            with_positions = any(argument.domain is Domain.EDGE for argument in self.inputs)
            size = min(_SAMPLE_EDGES, self.graph.limit_bytes // _SAMPLE_BYTES)
            first = self.graph.read(self.graph.sample(size), with_positions=False)
            compiled = self.layer.program_of(first.graph, self._ends, self.constants, is_trained=is_trained)
            known[key] = LayerBlocks(self.graph, compiled, item_bytes_of(self._ends), with_positions=with_positions)
        self._blocks = known[key]
        return self._blocks

    def results(self, tables: Sequence[torch.Tensor], *, is_trained: bool) -> list[torch.Tensor]:
        """Return the results for all targets, without gradients."""
        results: list[torch.Tensor] | None = None
        cuts = self.cuts(is_trained=is_trained)
        keeper = HeapKeeper(self.graph.limit_bytes + self._result_bytes())
        clock = PassClock(self.graph, is_backward=False)
        for cut, block in waited(self.graph, cuts.blocks()):
            start_s = time.perf_counter()
            if block is None:
                rows_of_block = self._results_of_parts(cuts, cut, tables, None)
            else:
                rows_of_block = self.compute(block, {key: rows for key, rows, *_ in self.rows(block, tables)})
                cuts.learn(block)
            if results is None:
                make = torch.empty if self.graph.num_sampled is None else torch.zeros
                sizes = [(self.graph.num_targets, *rows.shape[1:]) for rows in rows_of_block]
                results = [make(*size, out=rows.new_empty(0)) for size, rows in zip(sizes, rows_of_block, strict=True)]
            for result, rows in zip(results, rows_of_block, strict=True):
                result[cut.first_target : cut.last_target] = rows
            del block, rows_of_block
            clock.add(cut, start_s)
            keeper.look()
        clock.stop()
        return self._empty_results() if results is None else results

    def gradients(
        self, tables: Sequence[torch.Tensor], wanted: Sequence[bool], of_results: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the tables that want them, from those of the results."""
        sums = GradientSums(tables, wanted)
        cuts = self.cuts(is_trained=True)
        keeper = HeapKeeper(self.graph.limit_bytes + sums.nbytes)
        clock = PassClock(self.graph, is_backward=True)
        for cut, block in waited(self.graph, cuts.blocks(backwards=True)):
            start_s = time.perf_counter()
            of_rows = [None if rows is None else rows[cut.first_target : cut.last_target] for rows in of_results]
            if block is not None:
                self.add_gradients(block, tables, of_rows, sums)
                cuts.learn(block)
            else:
                leaves = [
                    table if _is_fixed(table) else table.detach().requires_grad_(wants)
                    for table, wants in zip(tables, wanted, strict=True)
                ]
                with torch.enable_grad():
                    _backward(self._results_of_parts(cuts, cut, leaves, sums), of_rows)
            del block
            clock.add(cut, start_s)
            keeper.look()
        clock.stop()
        return sums.finished(tables)

    def add_gradients(
        self,
        block: StreamBlock,
        tables: Sequence[torch.Tensor],
        of_results: Sequence[torch.Tensor | None],
        sums: "GradientSums",
    ) -> None:
        """Compute a block again, with gradients, and add those of its rows."""
        if all(rows is None for rows in of_results):
            return
        leaves: dict[_End, torch.Tensor] = {}
        goals: list[tuple[torch.Tensor, int, Any]] = []
        for key, rows, number, where in self.rows(block, tables):
            leaves[key] = rows.detach().requires_grad_(sums.wants(number))
            goals.append((leaves[key], number, where))
        with torch.enable_grad():
            _backward(self.compute(block, leaves), of_results)
        for leaf, number, where in goals:
            if leaf.grad is not None:
                sums.add(number, where, leaf.grad)
                leaf.grad = None

    def compute(self, block: StreamBlock, rows: Mapping["_End", torch.Tensor]) -> list[torch.Tensor]:
        """Return a block's results from the rows of its inputs."""
        # zeros depend on an edge's place in the file, and not on blocks: `dropped` hashes the row plus (seed ^ stream)
        stream = int(hashed(_STREAM))
        seed = (((self.seed ^ stream) + block.cut.first_edge) & MASK) ^ stream
        ends: dict[str, Ends] = {}
        for name, pair in self._ends.items():
            read = [rows[name, end] for end in (False, True) if (name, end) in rows]
            if not read:  # then it does not matter
                read = [torch.empty(0, *pair[0].shape[1:], dtype=pair[0].dtype, device=self.graph.device)]
            ends[name] = (rows.get((name, False), read[0]), rows.get((name, True), read[0]))
        results = self.layer.compute(block.graph, ends, self.constants, seed)
        return list(results) if isinstance(results, tuple) else [results]

    def rows(
        self, block: StreamBlock, tables: Sequence[torch.Tensor]
    ) -> Iterator[tuple["_End", torch.Tensor, int, Any]]:
        """Yield, for each input, its name and end, its rows for a block, its table's number, and their place in it."""
        for argument in self.inputs:
            number, where = self.number_of(argument), self.where(argument, block)
            yield _end_of(argument), _rows_at(tables[number], where), number, where

    def where(self, argument: Input, block: StreamBlock) -> Any:
        """Return the index of a block's rows in an input's table; ``None`` for all of them."""
        match argument.domain:
            case Domain.SOURCE:
                return block.sources
            case Domain.TARGET:
                return slice(block.cut.first_target, block.cut.last_target)
            case Domain.EDGE:
                return block.positions
            case Domain.SOURCE_AND_TYPE:
                nodes, types = block.graph.pairs()
                return types * self.graph.num_sources + block.sources[nodes]
            case _:
                return None

    def _results_of_parts(
        self, cuts: LayerBlocks, cut: Cut, tables: Sequence[torch.Tensor], sums: "GradientSums | None"
    ) -> list[torch.Tensor]:
        """Return the results of one target whose edges are read in parts, a stage after the other.

        Backward adds the gradients of the tables to ``sums``.
        """
        traced = self.layer.trace_of(self._ends, self.constants)
        stages = _remembered(traced, "over parts", lambda: stages_over_parts(self.program))
        values: dict[str, torch.Tensor] = {}
        for number, stage in enumerate(stages.stages):
            layer = _remembered(traced, ("over parts", number), lambda: _StageLayer(self.layer, stage))  # noqa: B023
            ends = {name: tuple(tables[self._numbers[name, end]] for end in (False, True)) for name in self._ends}
            call = _PartsPass(layer, self.graph, ends, values, self.seed, cuts, cut, sums, tables)
            values |= dict(zip(stage.names, _streamed(call), strict=True))
        return [values[name] for name in stages.outputs]

    def _result_bytes(self) -> int:
        widths = sum(math.prod(self.program[place].shape) for place in self.program.outputs)
        return self.graph.num_targets * widths * item_bytes_of(self._ends)

    def _empty_results(self) -> list[torch.Tensor]:
        program = self.program
        dtype = next((table.dtype for table in self.tables if table.is_floating_point()), torch.get_default_dtype())
        shapes = [program[place].shape for place in program.outputs]
        size = self.graph.num_targets
        return [torch.zeros(size, *shape, dtype=dtype, device=self.graph.device) for shape in shapes]


class _PartsPass(_Pass):
    """One stage of a layer on one target, over the parts of its edges."""

    def __init__(
        self,
        layer: _StageLayer,
        graph: StreamedGraph,
        ends: Mapping[str, Any],
        values: Mapping[str, torch.Tensor],
        seed: int,
        cuts: LayerBlocks,
        cut: Cut,
        sums: "GradientSums | None",
        outer: Sequence[torch.Tensor],
    ):
        more = {name: (value, value) for name, value in values.items()}
        super().__init__(layer, graph, layer.stage.program, {**ends, **more}, {}, seed)
        self.stage, self._values, self._cuts, self._cut = layer.stage, frozenset(values), cuts, cut
        self._sums = sums
        self._outer = {
            number: other
            for number, table in enumerate(self.tables)
            for other, from_outside in enumerate(outer)
            if table is from_outside
        }
        """Numbers of tables among those of the call on all targets."""
        self.operations = [self.program[place] for place in self.program.outputs]

    def cuts(self, *, is_trained: bool) -> LayerBlocks:
        """Return the blocks of the call on all targets."""
        del is_trained
        return self._cuts

    def where(self, argument: Input, block: StreamBlock) -> Any:
        """Return the index of a block's rows in an input's table; ``None`` for all of them."""
        if argument.name not in self._values:
            return super().where(argument, block)
        return _types_of(block) if argument.domain is Domain.TARGET_AND_TYPE else None

    def results(self, tables: Sequence[torch.Tensor], *, is_trained: bool) -> list[torch.Tensor]:
        """Return each result for the target, or for the target and every type, over all parts."""
        del is_trained
        totals: list[torch.Tensor] = []
        has_edges: list[torch.Tensor] = []
        for block in self._parts():
            rows_of_block = self.compute(block, {key: rows for key, rows, *_ in self.rows(block, tables)})
            for number, (operation, rows) in enumerate(zip(self.operations, rows_of_block, strict=True)):
                if len(totals) == number:
                    count = 1 if operation.domain is Domain.TARGET else self.graph.num_edge_types
                    start = -math.inf if is_max(operation) else 0.0
                    totals.append(rows.new_full((count, *rows.shape[1:]), start))
                    has_edges.append(torch.zeros(count, dtype=torch.bool, device=rows.device))
                where = slice(None) if operation.domain is Domain.TARGET else _types_of(block)
                before = totals[number][where]
                totals[number][where] = torch.maximum(before, rows) if is_max(operation) else before + rows
                has_edges[number][where] = True
        for total, has in zip(totals, has_edges, strict=True):
            total[~has] = 0.0
        return totals

    def without_gradients(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results that have no gradients: counts, and maxima, which are only compared with."""
        pairs = zip(results, self.operations, strict=True)
        return [rows for rows, operation in pairs if isinstance(operation, Count) or is_max(operation)]

    def gradients(
        self, tables: Sequence[torch.Tensor], wanted: Sequence[bool], of_results: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of values of earlier stages; add those of the other tables to the call's sums."""
        assert self._sums is not None
        sums = GradientSumsOfParts(tables, wanted, self._sums, self._outer)
        # maxima are only compared with
        of_results = [None if is_max(op) else rows for op, rows in zip(self.operations, of_results, strict=True)]
        for block in self._parts():
            of_part = [
                rows if rows is None or operation.domain is Domain.TARGET else rows[_types_of(block)]
                for operation, rows in zip(self.operations, of_results, strict=True)
            ]
            self.add_gradients(block, tables, of_part, sums)
        return sums.finished(tables)

    def _parts(self) -> Iterator[StreamBlock]:
        """Yield the parts; only the first if the stage reads nothing but what was combined over all of them."""
        for block in self._cuts.parts(self._cut):
            yield block
            if not self.stage.is_combined:
                return


class _Streamed(torch.autograd.Function):
    """A call on a streamed graph as one step of autograd."""

    @staticmethod
    def forward(ctx: Any, call: _Pass, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tables)
        results = call.results(call.with_fixed(tables), is_trained=call.is_trained)
        ctx.mark_non_differentiable(*call.without_gradients(results))
        call.let_go()
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *of_results: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():  # with create_graph=True
            raise DoubleBackwardError(NO_SECOND_DERIVATIVE)
        call, wanted = ctx.call, ctx.needs_input_grad[1:]
        tables = call.with_fixed(ctx.saved_tensors)
        gradients = call.gradients(tables, call.with_fixed(wanted, False), of_results)
        return (
            None,
            *(gradient for gradient, table in zip(gradients, call.tables, strict=True) if not _is_fixed(table)),
        )


def _streamed(call: _Pass) -> tuple[torch.Tensor, ...]:
    plain = [table for table in call.tables if not _is_fixed(table)]
    results: tuple[torch.Tensor, ...] = _Streamed.apply(call, *plain)  # type: ignore[no-untyped-call]
    return results


def _stand_in(table: torch.Tensor) -> torch.Tensor:
    """Return a tensor like another, without memory."""
    return torch.empty_like(table, device="meta").requires_grad_(table.requires_grad)


def _is_fixed(table: torch.Tensor) -> bool:
    """Return whether a table is one of rows on tiers, which no step of autograd can save."""
    return type(table) not in (torch.Tensor, torch.nn.Parameter) and not table.requires_grad


def _backward(results: Sequence[torch.Tensor], of_results: Sequence[torch.Tensor | None]) -> None:
    pairs = [
        (result, gradient)
        for result, gradient in zip(results, of_results, strict=True)
        if gradient is not None and result.requires_grad
    ]
    if pairs:
        torch.autograd.backward([result for result, _ in pairs], [gradient for _, gradient in pairs])


def _rows_at(table: torch.Tensor, where: Any) -> torch.Tensor:
    """Return the rows of a block."""
    if where is None:
        return table
    # on a CPU, this operator is several times as fast as indexing
    is_plain = isinstance(where, torch.Tensor) and not _is_fixed(table)
    return table.index_select(0, where) if is_plain else table[where]


def _types_of(block: StreamBlock) -> torch.Tensor:
    """Return the types of the edges of a block with one target, each once."""
    return block.graph.indexes.pairs(Domain.TARGET_AND_TYPE).types


_End = tuple[str, bool]
"""An argument's name, and whether it is read at targets."""


def _end_of(argument: Input) -> _End:
    return argument.name, argument.domain in (Domain.TARGET, Domain.TARGET_TYPE)
