"""The element-wise functions: one record for each, which eager, C, Triton, derivatives and checks read.

To add a function, add a record to `FUNCTIONS`. If users may call it, add a function with its docstring to `_language`
and a line to the map of the room.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

SQRT_HALF = 0.7071067811865476
"""``sqrt(1 / 2)``."""
DENSITY_AT_0 = 0.3989422804014327
"""``1 / sqrt(2 * pi)``, the density of the normal distribution at 0."""
C_MATH = ("exp", "log", "sqrt", "tanh", "erf", "fabs")
"""Functions of C's math library for both dtypes, which C expressions call by their names in capitals."""


class TermRecorder(Protocol):
    """The interface of a program under construction for derivatives."""

    def map(self, function: str, *operands: int, parameter: float = 0.0) -> int:
        """Add an element-wise function; return the value's place."""

    def constant(self, value: float) -> int:
        """Add a constant; return its place."""


@dataclass(frozen=True, slots=True)
class Term:
    """A value in the formula of a derivative; operators and `apply` add operations to the program."""

    recorder: TermRecorder
    """The program."""
    place: int
    """Place of the value in the program."""

    def apply(self, function: str, *others: "Term | float", parameter: float = 0.0) -> "Term":
        """Return an element-wise function of this value and the others."""
        places = [term.place if isinstance(term, Term) else self.recorder.constant(term) for term in others]
        return Term(self.recorder, self.recorder.map(function, self.place, *places, parameter=parameter))

    def __add__(self, other: "Term") -> "Term":
        return self.apply("add", other)

    def __sub__(self, other: "Term") -> "Term":
        return self.apply("subtract", other)

    def __rsub__(self, other: float) -> "Term":
        return Term(self.recorder, self.recorder.constant(other)).apply("subtract", self)

    def __mul__(self, other: "Term | float") -> "Term":
        return self.apply("multiply", other)

    def __truediv__(self, other: "Term") -> "Term":
        return self.apply("divide", other)

    def __neg__(self) -> "Term":
        return self.apply("negate")


@dataclass(frozen=True, slots=True)
class Application:
    """One use of a function in a program, as its derivative sees it."""

    gradient: Term
    """The gradient of the result."""
    result: Term
    """The result."""
    operands: tuple[Term, ...]
    """The operands."""
    parameter: float
    """The function's parameter; 0 if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """An element-wise function.

    In the C and Triton expressions ``{0}`` and ``{1}`` stand for operands, each a name, a number or an expression in
    parentheses, and ``{p}`` for the parameter.
    """

    name: str
    """Name in programs."""
    num_operands: int
    """Number of operands."""
    eager: Callable[[Sequence[torch.Tensor], float], torch.Tensor]
    """The function of operands and parameter in PyTorch; operands have the same rank."""
    c: str
    """Expression in C, of type ``real``; in parentheses unless it is a call."""
    c_helper: str = ""
    """A C function that the expression calls."""
    triton: str
    """Expression in Triton, on tiles of float32; it is assigned to a name, so it needs no parentheses."""
    triton_helper: str = ""
    """Name of the function of `_triton_kernels` that the expression calls."""
    derivative: Callable[[Application], Sequence[Term]] | None
    """The gradients of the operands; empty if they are zero.

    ``None``: the function occurs only in gradients, which are not differentiated again.
    """


def _gelu_slope(value: torch.Tensor) -> torch.Tensor:
    density = torch.exp(-0.5 * value * value) * DENSITY_AT_0
    return 0.5 * (1 + torch.erf(value * SQRT_HALF)) + value * density


def _zero(use: Application) -> Sequence[Term]:
    del use
    return ()


def _of_quotient(use: Application) -> Sequence[Term]:
    share = use.gradient / use.operands[1]
    return share, -(share * use.result)


def _of_maximum(use: Application) -> Sequence[Term]:
    """Give the gradient to the larger operand, and half of it to each of two equal ones, as PyTorch does."""
    left, right = use.operands
    share = left.apply("greater", right) + left.apply("equal", right) * 0.5
    rest = 1.0 - share
    return use.gradient * share, use.gradient * rest


def _slope(function: str) -> Callable[[Application], Sequence[Term]]:
    """Return a derivative that is another function of the operand, so that backward needs no result of forward."""
    return lambda use: (use.gradient * use.operands[0].apply(function, parameter=use.parameter),)


_RECORDS = (
    Elementwise(
        name="add", num_operands=2,
        eager=lambda x, _: x[0] + x[1], c="({0} + {1})", triton="{0} + {1}",
        derivative=lambda use: (use.gradient, use.gradient),
    ),
    Elementwise(
        name="subtract", num_operands=2,
        eager=lambda x, _: x[0] - x[1], c="({0} - {1})", triton="{0} - {1}",
        derivative=lambda use: (use.gradient, -use.gradient),
    ),
    Elementwise(
        name="multiply", num_operands=2,
        eager=lambda x, _: x[0] * x[1], c="({0} * {1})", triton="{0} * {1}",
        derivative=lambda use: (use.gradient * use.operands[1], use.gradient * use.operands[0]),
    ),
    Elementwise(
        name="divide", num_operands=2,
        eager=lambda x, _: x[0] / x[1], c="({0} / {1})", triton="{0} / {1}",
        derivative=_of_quotient,
    ),
    Elementwise(
        name="negate", num_operands=1,
        eager=lambda x, _: -x[0], c="(-{0})", triton="-{0}",
        derivative=lambda use: (-use.gradient,),
    ),
    Elementwise(
        name="maximum", num_operands=2,
        eager=lambda x, _: torch.maximum(x[0], x[1]),
        c="({0} > {1} || {0} != {0} ? {0} : {1})",  # NaN if either is NaN, unlike fmax
        triton="larger({0}, {1})", triton_helper="larger",
        derivative=_of_maximum,
    ),
    Elementwise(
        name="exp", num_operands=1,
        eager=lambda x, _: x[0].exp(), c="EXP({0})", triton="tl.exp({0})",
        derivative=lambda use: (use.gradient * use.result,),
    ),
    Elementwise(
        name="log", num_operands=1,
        eager=lambda x, _: x[0].log(), c="LOG({0})", triton="tl.log({0})",
        derivative=lambda use: (use.gradient / use.operands[0],),
    ),
    Elementwise(
        name="sqrt", num_operands=1,
        eager=lambda x, _: x[0].sqrt(), c="SQRT({0})", triton="tl.sqrt_rn({0})",
        derivative=lambda use: (use.gradient * 0.5 / use.result,),
    ),
    Elementwise(
        name="tanh", num_operands=1,
        eager=lambda x, _: x[0].tanh(), c="TANH({0})", triton="tanh({0})", triton_helper="tanh",
        derivative=lambda use: (use.gradient * (1.0 - use.result * use.result),),
    ),
    Elementwise(
        name="sigmoid", num_operands=1,
        eager=lambda x, _: x[0].sigmoid(), c="(1 / (1 + EXP(-{0})))", triton="1.0 / (1.0 + tl.exp(-{0}))",
        derivative=lambda use: (use.gradient * (use.result - use.result * use.result),),
    ),
    Elementwise(
        name="relu", num_operands=1,
        eager=lambda x, _: x[0].relu(),
        c="({0} < 0 ? 0 : {0})", triton="tl.where({0} < 0, 0.0, {0})",  # keeps NaN, as PyTorch does
        derivative=lambda use: (use.gradient * use.operands[0].apply("greater", 0.0),),
    ),
    Elementwise(
        name="leaky_relu", num_operands=1,
        eager=lambda x, slope: functional.leaky_relu(x[0], slope),
        c="({0} > 0 ? {0} : (real){p} * {0})", triton="tl.where({0} > 0, {0}, {p} * {0})",
        derivative=_slope("leaky_relu_slope"),
    ),
    Elementwise(
        name="leaky_relu_slope", num_operands=1,
        eager=lambda x, slope: torch.ones_like(x[0]).masked_fill_(x[0] <= 0, slope),
        c="({0} > 0 ? (real)1 : (real){p})", triton="tl.where({0} > 0, 1.0, {p})",
        derivative=None,
    ),
    Elementwise(
        name="elu", num_operands=1,
        eager=lambda x, _: functional.elu(x[0]),
        c="({0} > 0 ? {0} : EXP({0}) - 1)", triton="tl.where({0} > 0, {0}, tl.exp({0}) - 1.0)",
        derivative=_slope("elu_slope"),
    ),
    Elementwise(
        name="elu_slope", num_operands=1,
        eager=lambda x, _: torch.where(x[0] > 0, 1.0, x[0].exp()).to(x[0].dtype),
        c="({0} > 0 ? (real)1 : EXP({0}))", triton="tl.where({0} > 0, 1.0, tl.exp({0}))",
        derivative=None,
    ),
    Elementwise(
        name="gelu", num_operands=1,
        eager=lambda x, _: functional.gelu(x[0]),
        c=f"((real)0.5 * {{0}} * (1 + ERF({{0}} * (real){SQRT_HALF})))",
        triton="gelu({0})", triton_helper="gelu",
        derivative=_slope("gelu_slope"),
    ),
    Elementwise(
        name="gelu_slope", num_operands=1,
        eager=lambda x, _: _gelu_slope(x[0]),
        c="gelu_slope({0})",
        c_helper=f"""\
static inline real gelu_slope(real x) {{
    return (real)0.5 * (1 + ERF(x * (real){SQRT_HALF})) + x * EXP((real)-0.5 * x * x) * (real){DENSITY_AT_0};
}}
""",
        triton="gelu_slope({0})", triton_helper="gelu_slope",
        derivative=None,
    ),
    Elementwise(
        name="equal", num_operands=2,
        eager=lambda x, _: (x[0] == x[1]).to(x[0].dtype),
        c="((real)({0} == {1}))", triton="tl.where({0} == {1}, 1.0, 0.0)",
        derivative=_zero,
    ),
    Elementwise(
        name="is_largest", num_operands=2,  # `equal` for a maximum, which may have been rounded when it was stored
        eager=lambda x, _: (x[0] == x[1]).to(x[0].dtype),
        c="((real)({0} == {1}))",
        triton="tl.where({0}.to(STORED).to(tl.float32) == {1}.to(STORED).to(tl.float32), 1.0, 0.0)",
        derivative=_zero,
    ),
    Elementwise(
        name="greater", num_operands=2,
        eager=lambda x, _: (x[0] > x[1]).to(x[0].dtype),
        c="((real)({0} > {1}))", triton="tl.where({0} > {1}, 1.0, 0.0)",
        derivative=_zero,
    ),
    Elementwise(
        name="stop_gradient", num_operands=1,
        eager=lambda x, _: x[0], c="{0}", triton="{0}",
        derivative=_zero,
    ),
)  # fmt: skip
FUNCTIONS: Mapping[str, Elementwise] = {record.name: record for record in _RECORDS}
"""The functions by name."""
