"""The part that all compiled programs share: the order of steps, the memory of values, and operations for PyTorch.

Each emitter's runner computes traversals, products and sums of outer products.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from penstock.devices import want_huge_pages
from penstock.errors import InternalError
from penstock.relational import _eager
from penstock.relational._cost import cost
from penstock.relational._domain import ENDS, Domain
from penstock.relational._fuse import reads
from penstock.relational._graph import RelationalGraph
from penstock.relational._ir import Input, OuterSum, Reduce
from penstock.relational._language import SEED
from penstock.relational._lower import BlockedPass, Kernel, Lowered, Outer, Product, ScatteredProduct, Step, Traversal


class Compiled(ABC):
    """A program compiled in one dtype; works for any graph."""

    emitter: ClassVar[str]
    """Name of the language of its traversals, for display."""
    source: str
    """Source code of all traversals."""
    kernels: dict[int, Kernel]
    """Kernels of traversals by step number."""

    def __init__(self, lowered: Lowered, dtype: torch.dtype):
        self.lowered, self.dtype = lowered, dtype

    @abstractmethod
    def start(self, graph: RelationalGraph) -> "ProgramCall":
        """Return the state of one call."""

    def dtype_of(self, place: int) -> torch.dtype:
        """Return the dtype of a stored value."""
        del place
        return self.dtype

    def run(self, graph: RelationalGraph, inputs: Callable[[Input], torch.Tensor]) -> list[torch.Tensor]:
        """Return the values of the outputs, ``[rows, *shape]`` each."""
        program = self.lowered.program
        call = self.start(graph)
        for place, argument in program.inputs.items():
            call.values[place] = inputs(argument).contiguous()
            if argument.name == SEED:
                _check_not_captured(graph)
                call.seed = int(call.values[place].item()) & 0xFFFFFFFF
        for number, step in enumerate(self.lowered.steps):
            match step:
                case Traversal():
                    call.traverse(self.kernels[number])
                case Product():
                    call.multiply(step)
                case Outer():
                    call.sum_outer(step.place)
                case BlockedPass():
                    call.pass_blocks(step, self.kernels.get(number))
                case ScatteredProduct():
                    call.scatter(step, self.kernels[number])
                case _:
                    call.whole(step.place)
            for place in self.last_uses.get(number, ()):
                call.forget(place)
        return [call.value(place) for place in program.outputs]

    def describe(self, graph: RelationalGraph) -> str:
        """Return the steps with their rows, bytes and floating-point operations, as text."""
        return "\n".join(
            f"{self._title(step, graph)}; {cost(self.lowered, number, graph, self.dtype.itemsize)}"
            for number, step in enumerate(self.lowered.steps)
        )

    def _title(self, step: Step, graph: RelationalGraph) -> str:
        program, count = self.lowered.program, graph.indexes.count
        match step:
            case Traversal():
                by = "" if step.by is None else f" by {step.by.value}"
                roots = ", ".join(f"%{root}" for root in step.roots)
                return f"{self.emitter} traversal of {count(step.over):,} {step.over.value} rows{by}: {roots}"
            case BlockedPass():
                parts = [f"products summed to %{part.place}" for part in step.sums]
                parts += [f"outer products summed to %{place}" for place in step.outers]
                if step.rows is not None:
                    roots = ", ".join(f"%{root}" for root in step.rows.roots)
                    parts.insert(0, f"{roots} from {count(step.rows.over):,} {step.rows.over.value} rows")
                return f"blocks of {count(step.over):,} {step.over.value} rows: {'; '.join(parts)}"
            case ScatteredProduct():
                product = f"products of {count(step.over):,} {step.over.value} rows"
                by = f"added up by {count(step.rows.over):,} {step.rows.over.value} rows"
                return f"{product}, {by}, columns in {step.num_parts} parts: %{step.place}"
            case Product():
                domain = program[step.place].domain
                onto = "" if step.onto is None else f" added to %{step.onto}"
                return f"product of {count(domain):,} {domain.value} rows{onto}: %{step.place}"
            case Outer():
                operation = program[step.place]
                assert isinstance(operation, OuterSum)
                return f"sum of outer products of {count(operation.over):,} {operation.over.value} rows: %{step.place}"
            case _:
                return f"PyTorch: %{step.place}"

    def find_last_uses(self) -> None:
        """Determine after which step each value may be dropped."""
        program = self.lowered.program
        last: dict[int, int] = {}
        for number, step in enumerate(self.lowered.steps):
            for place in reads(program, step):
                last[place] = number
        kept = {name for place in program.outputs for name in program.names(place)}
        self.last_uses: dict[int, list[int]] = {}
        """Values that may be dropped after each step."""
        for place, number in last.items():
            if place not in kept:
                self.last_uses.setdefault(number, []).append(place)


class ProgramCall(ABC):
    """The tensors of one call."""

    def __init__(self, compiled: Compiled, graph: RelationalGraph):
        self.indexes, self.device = graph.indexes, graph.device
        self.program, self.stored = compiled.lowered.program, compiled.lowered.stored
        self.values: dict[int, torch.Tensor] = {}
        self.seed = 0
        self._dtype, self._dtype_of = compiled.dtype, compiled.dtype_of
        self._own: set[int] = set()
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        """Memory of dropped values by size and dtype, for reuse: new memory costs page faults."""
        results = (place for step in compiled.lowered.steps for place in results_of(step) if place in self.stored)
        self._to_make = Counter(map(self._size, results))
        """Number of values of each size that are still to be made."""

    @abstractmethod
    def traverse(self, kernel: Kernel) -> None:
        """Compute the roots of a traversal."""

    @abstractmethod
    def multiply(self, step: Product) -> None:
        """Compute a `Matmul`, or add it to a value."""

    @abstractmethod
    def sum_outer(self, place: int) -> None:
        """Compute an `OuterSum`."""

    def value(self, place: int) -> torch.Tensor:
        """Return a stored value, or the one that it is an alias of."""
        return next(self.values[name] for name in self.program.names(place) if name in self.values)

    def forget(self, place: int) -> None:
        """Drop a value that no later step reads, and keep its memory for reuse."""
        value = self.values.pop(place, None)
        if value is not None and place in self._own:
            free = self._free.setdefault((value.numel(), value.dtype), [])
            if len(free) < self._to_make[value.numel(), value.dtype]:
                free.append(value.view(-1))

    def make(self, place: int, *, writes_all: bool = False) -> torch.Tensor:
        """Return memory for a value; zeros unless every row has a part, or the caller writes those that have none."""
        operation = self.program[place]
        shape = (self.indexes.count(operation.domain), *operation.shape)
        size = self._size(place)
        free = self._free.get(size)
        self._to_make[size] -= 1
        self._own.add(place)
        # Every pair has edges, but a node may have none.
        zeros = isinstance(operation, Reduce) and operation.domain not in ENDS and not writes_all
        if free:
            memory = free.pop().view(shape)
        else:
            memory = torch.empty(shape, dtype=size[1], device=self.device)
            if self.device.type == "cpu":
                want_huge_pages(memory)
        self.values[place] = memory.zero_() if zeros else memory
        return memory

    def pass_blocks(self, step: BlockedPass, kernel: Kernel | None) -> None:
        """Compute sums of products and of outer products; ``kernel`` computes the rows of a block."""
        raise InternalError(f"{type(self).__name__} cannot compute {step}, {kernel}, in blocks")

    def scatter(self, step: ScatteredProduct, kernel: Kernel) -> None:
        """Compute a sum over edges of products; ``kernel`` adds a block of them."""
        raise InternalError(f"{type(self).__name__} cannot compute {step}, {kernel}, in blocks")

    def take(self, source: int, place: int) -> torch.Tensor:
        """Give the memory of one value to another, with its contents."""
        operation = self.program[place]
        self._own.add(place)
        self.values[place] = self.values.pop(source).view(self.indexes.count(operation.domain), *operation.shape)
        return self.values[place]

    def lookup(self, place: int, over: Domain, by: Domain) -> torch.Tensor | None:
        """Return the value's row for each row of ``over`` in order of ``by``, ``int32``.

        ``None`` if it is the same row, or the only one.
        """
        domain = self.program[place].domain
        positions = self.indexes.order(over, by)[0]
        if domain in (over, Domain.ONE):
            return None if domain is Domain.ONE else positions
        return self.indexes.index_in_order(over, None if positions is None else by, domain)

    def whole(self, place: int) -> None:
        """Compute an operation with PyTorch."""
        dtype = torch.promote_types(self._dtype, torch.float32)
        interpreter = _eager.Interpreter(self.program, self.indexes, dtype, self.device)
        operation = self.program[place]
        for source in operation.operands:
            operand = self.program[source]
            value = self.value(source) if source in self.stored else interpreter.compute(operand)
            interpreter.values[source] = value.to(dtype) if value.is_floating_point() else value
        num_rows = self.indexes.count(operation.domain)
        result = interpreter.compute(operation).expand(num_rows, *operation.shape).contiguous()
        result = result.to(self._dtype_of(place))
        is_view = any(_share_memory(result, tensor) for tensor in interpreter.values.values())
        self.values[place] = result.clone() if is_view else result  # an operand's memory may be reused

    def _size(self, place: int) -> tuple[int, torch.dtype]:
        operation = self.program[place]
        return self.indexes.count(operation.domain) * math.prod(operation.shape), self._dtype_of(place)


def _check_not_captured(graph: RelationalGraph) -> None:
    if graph.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph would replay a relational layer's dropout with the same zeros; capture it after layer.eval()"
        )


def _share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.numel() > 0 and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def results_of(step: Step) -> Sequence[int]:
    """Return the values that take memory from `ProgramCall.make`, if they are stored."""
    match step:
        case Traversal():
            return step.roots
        case BlockedPass():
            rows = () if step.rows is None else step.rows.roots
            return (*rows, *(part.place for part in step.sums if part.onto is None), *step.outers)
        case Product():
            return (step.place,) if step.onto is None else ()
        case Outer() | ScatteredProduct():
            return (step.place,)
        case _:
            return ()


def taken_over(step: Step) -> Sequence[tuple[int, int]]:
    """Return the values whose memory a step gives to others, with the latter."""
    match step:
        case BlockedPass():
            return [(part.onto, part.place) for part in step.sums if part.onto is not None]
        case Product(onto=int(onto)):
            return [(onto, step.place)]
        case _:
            return ()
