"""Sums over edges that follow from sums that exist already.

The gradient of a softmax over the edges of a node needs, per node, the sum over its edges of ``share * dot(gradient,
message)``. The gradient has one row per node, so this is ``dot(gradient, sum of share * message)``, and the layer has
computed that sum: it is its result. One traversal of all edges, in which every edge would have needed the sum before
it, becomes a dot product per node (FlashAttention, Dao et al., 2022, appendix B.2, for dense attention).
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.relational._domain import Domain
from penstock.relational._ir import (
    Builder,
    Dot,
    Dropout,
    Map,
    Operation,
    Program,
    Reduce,
    Reshape,
    Shape,
    SumTo,
    rewritten,
)

_ROW_BY_ROW = (Map, Dot, Reshape, SumTo, Dropout)


def reuse_sums(program: Program) -> Program:
    """Rewrite ``sum(c * dot(t, m))`` as ``dot(t, sum(c * m))`` if that sum exists and ``t`` has a row per result.

    Both sums may have further factors with a row per result. The new value comes as early as its operands allow, so
    that whatever reads it can share a traversal with other sums. For nodes without edges it may be any number, even
    NaN, so it replaces only sums that nothing but edges read.
    """
    sums = [place for place, operation in enumerate(program.operations) if _is_sum(operation)]
    readers = program.readers()
    after: dict[int, list[tuple[int, _Rewritten]]] = {}
    for place in sums:
        if _is_read_by_edges_only(program, readers, place):
            match = _match(program, place, [other for other in sums if other < place])
            if match is not None:
                after.setdefault(max(match.operands), []).append((place, match))
    builder, replaced = Builder(), dict[int, int]()
    places: list[int] = []
    for place, operation in enumerate(program.operations):
        places.append(replaced[place] if place in replaced else builder.add(rewritten(operation, places)))
        for sum_place, match in after.get(place, ()):
            replaced[sum_place] = match.build(builder, places, program[sum_place])
    return builder.program(places[output] for output in program.outputs)


@dataclass(slots=True)
class _Product:
    """A value as a product: its factors, with those that have a row per result apart."""

    sign: int = 1
    inner: Counter[int] = field(default_factory=Counter)
    """Factors with a row per edge, by place and how often they occur; negative: as divisors."""
    outer: Counter[int] = field(default_factory=Counter)
    """Factors with a row per result, likewise."""


@dataclass(frozen=True, slots=True)
class _Rewritten:
    """A sum as the dot of two values with a row per result, times a product of such values."""

    left: int
    """Place of ``t``."""
    total: int
    """Place of the sum that exists."""
    shape: Shape
    """Shape of the dot products."""
    sign: int
    """1 or -1."""
    factors: Mapping[int, int]
    """Places of further factors, and how often each occurs; negative: as divisors."""

    @property
    def operands(self) -> list[int]:
        """The places of all values that it reads."""
        return [self.left, self.total, *self.factors]

    def build(self, builder: Builder, places: list[int], operation: Operation) -> int:
        """Add the value that replaces ``operation``; return its place."""
        domain = operation.domain
        products = builder.map("multiply", places[self.left], places[self.total], domain=domain)
        result = builder.add(SumTo(domain=domain, shape=self.shape, operands=(products,)))
        result = _shaped(builder, result, operation.shape)
        for factor, power in self.factors.items():
            value = _shaped(builder, places[factor], operation.shape)
            for _ in range(abs(power)):
                result = builder.map("multiply" if power > 0 else "divide", result, value, domain=domain)
        return builder.map("negate", result, domain=domain) if self.sign < 0 else result


def _shaped(builder: Builder, place: int, shape: Shape) -> int:
    operation = builder[place]
    if operation.shape == shape:
        return place
    wanted = shape if math.prod(operation.shape) == math.prod(shape) else ()
    return builder.add(Reshape(domain=operation.domain, shape=wanted, operands=(place,)))


def _is_sum(operation: Operation) -> bool:
    return isinstance(operation, Reduce) and operation.kind == "sum" and operation.over is Domain.EDGE


def _is_read_by_edges_only(program: Program, readers: list[list[int]], place: int) -> bool:
    domain = program[place].domain
    return place not in program.outputs and all(
        isinstance(program[reader], _ROW_BY_ROW) and not domain.tells(program[reader].domain)
        for reader in readers[place]
    )


def _match(program: Program, place: int, sums: list[int]) -> _Rewritten | None:
    """Return what replaces the sum at ``place``, by one of the ``sums`` before it."""
    operation = program[place]
    product = _factors(program, operation.operands[0], operation.domain, _essence(operation.shape))
    if product is None:
        return None
    dots = [factor for factor, power in product.inner.items() if power == 1 and _dot_operands(program, factor)]
    if len(dots) != 1:
        return None
    (dot,) = dots
    del product.inner[dot]
    for left, row in _dot_operands(program, dot):
        if not operation.domain.tells(program[left].domain):
            continue
        for other in sums:
            summed = program[other]
            if summed.domain is not operation.domain or summed.shape != _of_rows(program, dot):
                continue
            scale = _scale(program, summed, row, _essence(operation.shape))
            if scale is None or scale.inner != product.inner:
                continue
            factors = {
                factor: product.outer[factor] - scale.outer[factor] for factor in {**product.outer, **scale.outer}
            }
            if all(power >= min(0, product.outer[factor]) for factor, power in factors.items()):  # no new divisors
                shape = program[dot].shape if isinstance(program[dot], SumTo) else (*program[dot].shape, 1)
                return _Rewritten(left, other, shape, product.sign * scale.sign, factors)
    return None


def _dot_operands(program: Program, place: int) -> list[tuple[int, int]]:
    """Return the operands of a dot product over the last dimension, in both orders; none if it is no such product."""
    operation = program[place]
    if isinstance(operation, SumTo):
        (place,) = operation.operands
        whole, product = program[place].shape, program[place]
        is_last = operation.shape == (*whole[:-1], 1)
        if not is_last or not isinstance(product, Map) or product.function != "multiply":
            return []
        operation = product
    elif not isinstance(operation, Dot):
        return []
    left, right = operation.operands
    return [(left, right), (right, left)]


def _of_rows(program: Program, dot: int) -> Shape:
    """Return the shape of the products that a dot product sums."""
    operation = program[dot]
    if isinstance(operation, SumTo):
        return program[operation.operands[0]].shape
    return (*operation.shape, program[operation.operands[0]].shape[-1])


def _scale(program: Program, summed: Operation, row: int, essence: Shape) -> _Product | None:
    """Return the factors of ``row`` in what is summed, if that is ``row`` times a number for each of its vectors."""
    (place,) = summed.operands
    if place == row:
        return _Product()
    operation = program[place]
    if not isinstance(operation, Map) or operation.function != "multiply" or row not in operation.operands:
        return None
    left, right = operation.operands
    scale = right if left == row else left
    shape = program[scale].shape
    return _factors(program, scale, summed.domain, essence) if not shape or shape[-1] == 1 else None


def _factors(program: Program, place: int, domain: Domain, essence: Shape) -> _Product | None:
    """Return a value's factors; ``None`` if one has another shape, up to dimensions of size 1, and is no number."""
    product = _Product()
    stack = [(place, 1)]
    while stack:
        place, power = stack.pop()
        operation = program[place]
        if _essence(operation.shape) not in ((), essence):
            return None
        if domain.tells(operation.domain):
            product.outer[place] += power
            continue
        match operation:
            case Map(function="multiply"):
                stack += [(operand, power) for operand in operation.operands]
            case Map(function="divide"):
                stack += [(operation.operands[0], power), (operation.operands[1], -power)]
            case Map(function="negate"):
                product.sign = -product.sign
                stack.append((operation.operands[0], power))
            case Reshape():
                stack.append((operation.operands[0], power))
            case _:
                product.inner[place] += power
    return product


def _essence(shape: Shape) -> Shape:
    """Return a shape without dimensions of size 1."""
    return tuple(size for size in shape if size != 1)
