"""The part that all compiled programs share: the order of steps, the memory of values, and operations for PyTorch.

Each emitter's runner computes traversals, products and sums of outer products.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

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
    def start(self, graph: RelationalGraph) -> "Run":
        """Return the state of one call."""

    def dtype_of(self, at: int) -> torch.dtype:
        """Return the dtype of a stored value."""
        del at
        return self.dtype

    def run(self, graph: RelationalGraph, inputs: Callable[[Input], torch.Tensor]) -> list[torch.Tensor]:
        """Return the values of the outputs, ``[rows, *shape]`` each."""
        program = self.lowered.program
        run = self.start(graph)
        for at, one in program.inputs.items():
            run.values[at] = inputs(one).contiguous()
            if one.name == SEED:
                _check_not_captured(graph)
                run.seed = int(run.values[at].item()) & 0xFFFFFFFF
        for number, step in enumerate(self.lowered.steps):
            match step:
                case Traversal():
                    run.traverse(self.kernels[number])
                case Product():
                    run.multiply(step.place)
                case Outer():
                    run.sum_outer(step.place)
                case BlockedSum():
                    run.sum_blocks(step, self.kernels.get(number))
                case _:
                    run.whole(step.place)
            for at in self._last_use.get(number, ()):
                run.forget(at)
        return [run.value(at) for at in program.outputs]

    def describe(self, graph: RelationalGraph) -> str:
        """Return the steps with their rows, bytes and floating-point operations, as text."""
        return "\n".join(
            f"{self._title(step, graph)}; {cost(self.lowered, number, graph, self.dtype.itemsize)}"
            for number, step in enumerate(self.lowered.steps)
        )

    def _title(self, step: Step, graph: RelationalGraph) -> str:
        program = self.lowered.program
        match step:
            case Traversal():
                by = "" if step.by is None else f" by {step.by.value}"
                roots = ", ".join(f"%{at}" for at in step.roots)
                return f"{self.emitter} traversal of {graph.count(step.over):,} {step.over.value} rows{by}: {roots}"
            case BlockedSum():
                domain = program[step.product].domain
                how = "stored" if step.rows is None else f"summed over {step.rows.over.value} rows"
                how += "" if step.onto is None else f", onto %{step.onto}"
                return f"blocked sum of products of {graph.count(domain):,} {domain.value} rows, {how}: %{step.place}"
            case Product():
                domain = program[step.place].domain
                return f"product of {graph.count(domain):,} {domain.value} rows: %{step.place}"
            case Outer():
                one = program[step.place]
                assert isinstance(one, OuterSum)
                return f"sum of outer products of {graph.count(one.over):,} {one.over.value} rows: %{step.place}"
            case _:
                return f"PyTorch: %{step.place}"

    def find_last_uses(self) -> None:
        """Determine after which step each value may be dropped. Call this once kernels are known."""
        program = self.lowered.program
        last: dict[int, int] = {}
        for number, step in enumerate(self.lowered.steps):
            for at in self._reads(number, step):
                for name in _names(program, at):
                    last[name] = number
        kept = {name for at in program.outputs for name in _names(program, at)}
        self._last_use: dict[int, list[int]] = {}
        for at, number in last.items():
            if at not in kept:
                self._last_use.setdefault(number, []).append(at)

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


class Run(ABC):
    """The tensors of one call."""

    def __init__(self, compiled: Compiled, graph: RelationalGraph):
        self.graph, self.program, self.stored = graph, compiled.lowered.program, compiled.lowered.stored
        self.values: dict[int, torch.Tensor] = {}
        self.seed = 0
        self._dtype, self._dtype_of = compiled.dtype, compiled.dtype_of
        self._own: set[int] = set()
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        """Memory of dropped values by size and dtype, for reuse: new memory costs page faults."""
        self._to_make = Counter(self._size(at) for step in compiled.lowered.steps for at in _made(step))
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

    def value(self, at: int) -> torch.Tensor:
        """Return a stored value, or the one that it is an alias of."""
        return next(self.values[name] for name in _names(self.program, at) if name in self.values)

    def forget(self, at: int) -> None:
        """Drop a value that no later step reads, and keep its memory for reuse."""
        value = self.values.pop(at, None)
        if value is not None and at in self._own:
            free = self._free.setdefault((value.numel(), value.dtype), [])
            if len(free) < self._to_make[value.numel(), value.dtype]:
                free.append(value.view(-1))

    def make(self, at: int) -> torch.Tensor:
        """Return memory for a value; zeros if not every row is written."""
        one = self.program[at]
        shape = (self.graph.count(one.domain), *one.shape)
        size = self._size(at)
        free = self._free.get(size)
        self._to_make[size] -= 1
        self._own.add(at)
        zeros = isinstance(one, Reduce) and one.domain not in ENDS  # every pair has edges, but a node may have none
        if free:
            found = free.pop().view(shape)
            self.values[at] = found.zero_() if zeros else found
        else:
            make = torch.zeros if zeros else torch.empty
            self.values[at] = make(shape, dtype=size[1], device=self.graph.device)
        return self.values[at]

    def sum_blocks(self, step: BlockedSum, kernel: Kernel | None) -> None:
        """Compute a sum of products; ``kernel`` computes the rows of a block if they are not stored."""
        raise InternalError(f"{type(self).__name__} cannot compute %{step.place}, {kernel}, in blocks")

    def take(self, at: int, place: int) -> torch.Tensor:
        """Give the memory of one value to another, with its contents."""
        self._own.add(place)
        self.values[place] = self.values.pop(at)
        return self.values[place]

    def lookup(self, at: int, over: Domain, by: Domain) -> torch.Tensor | None:
        """Return the value's row for each row of ``over`` in order of ``by``, ``int32``.

        ``None`` if it is the same row, or the only one.
        """
        domain = self.program[at].domain
        positions = self.graph.order(over, by)[0]
        if domain in (over, Domain.ONE):
            return None if domain is Domain.ONE else positions
        return self.graph.index_in_order(over, None if positions is None else by, domain)

    def whole(self, place: int) -> None:
        """Compute an operation with PyTorch."""
        dtype = torch.promote_types(self._dtype, torch.float32)
        machine = _eager.Machine(self.program, self.graph, dtype, self.graph.device)
        one = self.program[place]
        for at in one.operands:
            operand = self.program[at]
            value = self.value(at) if at in self.stored else machine.compute(operand)
            machine.values[at] = value.to(dtype) if value.is_floating_point() else value
        found = machine.compute(one).expand(self.graph.count(one.domain), *one.shape).contiguous()
        found = found.to(self._dtype_of(place))
        is_view = any(_share_memory(found, other) for other in machine.values.values())
        self.values[place] = found.clone() if is_view else found  # an operand's memory may be reused

    def _size(self, at: int) -> tuple[int, torch.dtype]:
        one = self.program[at]
        return self.graph.count(one.domain) * math.prod(one.shape), self._dtype_of(at)


def _check_not_captured(graph: RelationalGraph) -> None:
    if graph.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph would replay a relational layer's dropout with the same zeros; capture it after layer.eval()"
        )


def _names(program: Program, at: int) -> list[int]:
    """Return the value, and those whose rows it shares."""
    found = [at]
    while isinstance(one := program[found[-1]], SameRows):
        found.append(one.operands[0])
    return found


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() > 0 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _made(step: Step) -> Sequence[int]:
    """Return the values that take memory from `Run.make`."""
    if isinstance(step, Traversal):
        return step.roots
    is_made = isinstance(step, Product | Outer) or (isinstance(step, BlockedSum) and step.onto is None)
    return (step.place,) if is_made else ()
