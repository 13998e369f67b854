"""The eager emitter: PyTorch runs every operation of the IR, one after the other.

The other emitters are tested against it, in float64 too, and it runs where there is no compiler. It really gathers
rows, so it takes the memory that the other emitters save.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from penstock.errors import InternalError
from penstock.relational._domain import Domain
from penstock.relational._dropout import dropout_mask
from penstock.relational._elementwise import FUNCTIONS
from penstock.relational._ir import (
    Concat,
    Constant,
    Count,
    Dot,
    Dropout,
    Input,
    Map,
    Matmul,
    Operation,
    OuterSum,
    Program,
    Reduce,
    Reshape,
    SameRows,
    Slice,
    SumTo,
)


class Rows(Protocol):
    """The interface of a graph for emitters."""

    def count(self, domain: Domain) -> int:
        """Return the number of rows of the domain."""

    def index(self, of: Domain, to: Domain) -> torch.Tensor | None:
        """Return the row of ``to`` that each row of ``of`` belongs to, ``int64 [rows of "of"]``.

        ``None`` if all belong to the same row, or each to itself.
        """

    def segments(self, of: Domain, to: Domain) -> Sequence[int] | None:
        """Return where the rows of ``of`` for each row of ``to`` begin, if they are in order, and the last end."""


def run(
    program: Program,
    rows: Rows,
    inputs: Mapping[str, torch.Tensor] | Callable[[Input], torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """Return the values of the outputs, ``[rows, *shape]`` each.

    ``inputs`` are tensors ``[rows, *shape]`` by name, or a function that returns the tensor of an input.
    """
    find = inputs if callable(inputs) else lambda operation: inputs[operation.name]
    interpreter = Interpreter(program, rows, dtype, device)
    for place, operation in enumerate(program.operations):
        interpreter.values[place] = find(operation) if isinstance(operation, Input) else interpreter.compute(operation)
        interpreter.forget(place)
    return [interpreter.values[place] for place in program.outputs]


class Interpreter:
    """The values so far; those that no later operation reads are dropped."""

    def __init__(self, program: Program, rows: Rows, dtype: torch.dtype, device: torch.device):
        self.program, self.rows, self.dtype, self.device = program, rows, dtype, device
        self.values: dict[int, torch.Tensor] = {}
        self._last_use: dict[int, int] = {}
        for place, operation in enumerate(program.operations):
            for operand in operation.operands:
                self._last_use[operand] = place
        for place in program.outputs:
            self._last_use[place] = len(program)

    def forget(self, place: int) -> None:
        for operand in dict.fromkeys(self.program[place].operands):
            if self._last_use[operand] == place:
                del self.values[operand]

    def compute(self, operation: Operation) -> torch.Tensor:
        match operation:
            case Constant():
                return torch.full((1, *operation.shape), operation.value, dtype=self.dtype, device=self.device)
            case Count():
                ones = torch.ones(self.rows.count(operation.over), dtype=self.dtype, device=self.device)
                return self._reduced(ones, operation.over, operation.domain, "sum")
            case Reduce():
                value = self._read(operation.operands[0], operation.over)
                return self._reduced(value, operation.over, operation.domain, operation.kind)
            case OuterSum():
                return self._outer_sum(operation)
            case Matmul():
                return self._matmul(operation)
            case SameRows():
                return self.values[operation.operands[0]]
            case _:
                return self._row_by_row(operation)

    def _row_by_row(self, operation: Operation) -> torch.Tensor:
        operands = [self._read(operand, operation.domain) for operand in operation.operands]
        num_rows = self.rows.count(operation.domain)
        match operation:
            case Map():
                rank = max((value.dim() for value in operands), default=1)
                aligned = [_with_rank(value, rank) for value in operands]
                value = FUNCTIONS[operation.function].eager(aligned, operation.parameter)
                return value.expand(num_rows, *operation.shape)
            case Dot():
                rank = max(value.dim() for value in operands)
                left, right = (_with_rank(value, rank) for value in operands)
                return (left * right).sum(-1).expand(num_rows, *operation.shape)
            case Reshape():
                return operands[0].expand(num_rows, *operands[0].shape[1:]).reshape(num_rows, *operation.shape)
            case SumTo():
                return (
                    operands[0]
                    .sum_to_size(operands[0].shape[0], *_full(operation.shape, operands[0].dim() - 1))
                    .reshape(-1, *operation.shape)
                )
            case Slice():
                return operands[0][..., operation.start : operation.start + operation.shape[-1]]
            case Concat():
                return torch.cat([value.expand(num_rows, *value.shape[1:]) for value in operands], dim=-1)
            case Dropout():
                mask = dropout_mask(
                    num_rows,
                    operation.shape,
                    int(self.values[operation.operands[1]].item()),
                    operation.stream,
                    operation.probability,
                    self.device,
                )
                return operands[0] * mask.to(self.dtype)
            case _:
                raise InternalError(f"the eager emitter does not know {type(operation).__name__}")

    def _read(self, place: int, domain: Domain) -> torch.Tensor:
        """Return the value looked up by rows of ``domain``: ``[rows, *shape]``, or ``[1, *shape]``."""
        value, of = self.values[place], self.program[place].domain
        if of is domain or of is Domain.ONE:
            return value
        index = self.rows.index(domain, of)
        assert index is not None
        return value.index_select(0, index)

    def _reduced(self, value: torch.Tensor, over: Domain, to: Domain, kind: str) -> torch.Tensor:
        num_rows = self.rows.count(over)
        value = value.expand(num_rows, *value.shape[1:])
        if to is Domain.ONE:
            if kind == "sum":
                return value.sum(0, keepdim=True)
            return value.amax(0, keepdim=True) if num_rows else value.new_zeros(1, *value.shape[1:])
        index = self.rows.index(over, to)
        assert index is not None
        result = value.new_zeros(self.rows.count(to), *value.shape[1:])
        if kind == "sum":
            return result.index_add_(0, index, value)
        places = index.view(-1, *[1] * (value.dim() - 1)).expand_as(value)
        return result.scatter_reduce_(0, places, value, "amax", include_self=False)

    def _matmul(self, operation: Matmul) -> torch.Tensor:
        left = self._read(operation.operands[0], operation.domain)
        matrix, of = self.values[operation.operands[1]], self.program[operation.operands[1]].domain
        matrix = matrix.transpose(-1, -2) if operation.transposed else matrix
        num_rows = self.rows.count(operation.domain)
        left = left.expand(num_rows, *left.shape[1:])
        if of is Domain.ONE:
            return _rows_times(left, matrix[0], operation.shape)
        if of is operation.domain:
            rank = max(left.dim(), matrix.dim() - 1)
            left, matrix = _with_rank(left, rank), _with_rank(matrix, rank + 1)
            return (left.unsqueeze(-2) @ matrix).squeeze(-2).expand(num_rows, *operation.shape)
        result = left.new_empty(num_rows, *operation.shape)
        for row, members in self._members(operation.domain, of):
            result[members] = _rows_times(left[members], matrix[row], operation.shape)
        return result

    def _outer_sum(self, operation: OuterSum) -> torch.Tensor:
        num_rows = self.rows.count(operation.over)
        left, right = (self._read(operand, operation.over) for operand in operation.operands)
        left, right = (value.expand(num_rows, *value.shape[1:]) for value in (left, right))
        result = left.new_zeros(self.rows.count(operation.domain), *operation.shape)
        if operation.domain is operation.over:
            rank = max(left.dim(), right.dim())
            return _with_rank(left, rank).unsqueeze(-1) * _with_rank(right, rank).unsqueeze(-2)
        if operation.domain is Domain.ONE:
            result[0] = _outer(left, right, operation.shape)
            return result
        for row, members in self._members(operation.over, operation.domain):
            result[row] = _outer(left[members], right[members], operation.shape)
        return result

    def _members(self, of: Domain, to: Domain) -> list[tuple[int, slice | torch.Tensor]]:
        """Return, for each row of ``to`` that has any, the rows of ``of`` that belong to it."""
        segments = self.rows.segments(of, to)
        if segments is not None:
            pairs = itertools.pairwise(segments)
            return [(row, slice(start, end)) for row, (start, end) in enumerate(pairs) if end > start]
        index = self.rows.index(of, to)
        assert index is not None
        order = index.argsort(stable=True)
        sizes = index.bincount(minlength=self.rows.count(to)).tolist()
        return [(row, members) for row, members in enumerate(order.split(sizes)) if len(members)]


def _rows_times(left: torch.Tensor, matrix: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return ``[rows, ..., inner] @ [..., inner, outer]``."""
    if matrix.dim() == 2:
        return left @ matrix
    left = _with_rank(left, matrix.dim())
    return (left.unsqueeze(-2) @ matrix).squeeze(-2).expand(len(left), *shape)


def _outer(left: torch.Tensor, right: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return ``[..., i, o]`` from ``[rows, ..., i]`` and ``[rows, ..., o]``: the sum over rows of outer products."""
    rank = max(left.dim(), right.dim())
    left, right = _with_rank(left, rank), _with_rank(right, rank)
    if rank > 2 and 1 in (left.shape[-1], right.shape[-1]):  # of many small products, whose calls take longest
        return (left * right).sum(0).unsqueeze(-1 if right.shape[-1] == 1 else -2).expand(shape)
    return torch.einsum("n...i,n...o->...io", left, right).expand(shape)


def _with_rank(value: torch.Tensor, rank: int) -> torch.Tensor:
    """Insert sizes of 1 after the rows dimension, so that rows broadcast from the right."""
    return value.reshape(value.shape[0], *[1] * (rank - value.dim()), *value.shape[1:])


def _full(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (1,) * (rank - len(shape)) + shape
