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
from penstock.relational._graph import RelationalGraph
from penstock.relational._ir import Input, OuterSum, Program, Reduce, SameRows
from penstock.relational._language import SEED
from penstock.relational._lower import BlockedSum, Kernel, Lowered, Outer, Product, Step, Traversal


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
                    call.multiply(step.place)
                case Outer():
                    call.sum_outer(step.place)
                case BlockedSum():
                    call.sum_blocks(step, self.kernels.get(number))
                case _:
                    call.whole(step.place)
            for place in self._last_use.get(number, ()):
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
            case BlockedSum():
                domain = program[step.product].domain
                how = "stored" if step.rows is None else f"summed over {step.rows.over.value} rows"
                how += "" if step.onto is None else f", onto %{step.onto}"
                return f"blocked sum of products of {count(domain):,} {domain.value} rows, {how}: %{step.place}"
            case Product():
                domain = program[step.place].domain
                return f"product of {count(domain):,} {domain.value} rows: %{step.place}"
            case Outer():
                operation = program[step.place]
                assert isinstance(operation, OuterSum)
                return f"sum of outer products of {count(operation.over):,} {operation.over.value} rows: %{step.place}"
            case _:
                return f"PyTorch: %{step.place}"

    def find_last_uses(self) -> None:
        """Determine after which step each value may be dropped. Call this once kernels are known."""
        program = self.lowered.program
        last: dict[int, int] = {}
        for number, step in enumerate(self.lowered.steps):
            for place in self._reads(number, step):
                for name in _names(program, place):
                    last[name] = number
        kept = {name for place in program.outputs for name in _names(program, place)}
        self._last_use: dict[int, list[int]] = {}
        for place, number in last.items():
            if place not in kept:
                self._last_use.setdefault(number, []).append(place)

    def _reads(self, number: int, step: Step) -> Sequence[int]:
        """Return the stored values that a step reads."""
        program = self.lowered.program
        match step:
            case Traversal():
                return self.kernels[number].inputs
            case BlockedSum():
                left, matrix = program[step.product].operands
                rows = (left,) if step.rows is None else self.kernels[number].inputs
                return (*rows, matrix) if step.onto is None else (*rows, matrix, step.onto)
            case _:
                return program[step.place].operands


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
        self._to_make = Counter(self._size(place) for step in compiled.lowered.steps for place in _made(step))
        """Number of values of each size that are still to be made."""

    @abstractmethod
    def traverse(self, kernel: Kernel) -> None:
        """Compute the roots of a traversal."""

    @abstractmethod
    def multiply(self, place: int) -> None:
        """Compute a `Matmul`."""

    @abstractmethod
    def sum_outer(self, place: int) -> None:
        """Compute an `OuterSum`."""

    def value(self, place: int) -> torch.Tensor:
        """Return a stored value, or the one that it is an alias of."""
        return next(self.values[name] for name in _names(self.program, place) if name in self.values)

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

    def sum_blocks(self, step: BlockedSum, kernel: Kernel | None) -> None:
        """Compute a sum of products; ``kernel`` computes the rows of a block if they are not stored."""
        raise InternalError(f"{type(self).__name__} cannot compute %{step.place}, {kernel}, in blocks")

    def take(self, source: int, place: int) -> torch.Tensor:
        """Give the memory of one value to another, with its contents."""
        self._own.add(place)
        self.values[place] = self.values.pop(source)
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


def _names(program: Program, place: int) -> list[int]:
    """Return the value, and those whose rows it shares."""
    names = [place]
    while isinstance(alias := program[names[-1]], SameRows):
        names.append(alias.operands[0])
    return names


def _share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.numel() > 0 and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _made(step: Step) -> Sequence[int]:
    """Return the values that take memory from `ProgramCall.make`."""
    if isinstance(step, Traversal):
        return step.roots
    is_made = isinstance(step, Product | Outer) or (isinstance(step, BlockedSum) and step.onto is None)
    return (step.place,) if is_made else ()
