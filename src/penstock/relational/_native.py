"""Runs lowered programs on a CPU: generated C for traversals, `native/relational.c` for products.

The BLAS is the one inside of PyTorch, found by its Fortran name in PyTorch's library.
"""

import ctypes
import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from penstock import native
from penstock.errors import InternalError
from penstock.relational import _eager
from penstock.relational._domain import Domain
from penstock.relational._emit_c import Kernel, emit
from penstock.relational._graph import RelationalGraph
from penstock.relational._ir import Input, Matmul, OuterSum, Program, Reduce, SameRows
from penstock.relational._language import SEED
from penstock.relational._lower import Lowered, Outer, Product, Step, Traversal, Whole, lower

_PAIRS = (Domain.SOURCE_AND_TYPE, Domain.TARGET_AND_TYPE)
_PROCESS = os.getpid()
"""OpenMP's threads do not survive a fork: children stay with one."""
DTYPES = {torch.float32: "float32", torch.float64: "float64"}


class _Context(ctypes.Structure):
    _fields_ = (
        ("num_positions", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("seed", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("indexes", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class _Typed(ctypes.Structure):
    _fields_ = (
        ("num_types", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("outer", ctypes.c_int64),
        ("element_bytes", ctypes.c_int64),
        ("segments", ctypes.c_void_p),
        ("gemm", ctypes.c_void_p),
    )


class Compiled:
    """A program compiled for the CPU in one dtype; good for any graph."""

    def __init__(self, program: Program, dtype: torch.dtype):
        self.lowered: Lowered = lower(program)
        self.dtype = dtype
        self.source, self.kernels = emit(self.lowered, DTYPES[dtype])
        library = native.compile_source(self.source, "relational-layer", openmp=True)
        products = native.load("relational", openmp=True)
        if library is None or products is None:
            raise InternalError("no compiler: callers ask is_available() first")
        self._library, self._products = library, products
        self._functions = {kernel.name: library[kernel.name] for kernel in self.kernels.values()}
        self._last_use = self._uses()

    @staticmethod
    def is_available() -> bool:
        """Whether this machine has a C compiler that knows OpenMP, and PyTorch a BLAS that can be called."""
        try:
            return native.load("relational", openmp=True) is not None and gemm(torch.float32) is not None
        except InternalError:
            return False

    def run(self, graph: RelationalGraph, inputs: Callable[[Input], torch.Tensor]) -> list[torch.Tensor]:
        """Values of the outputs, ``[rows, *shape]`` each."""
        program = self.lowered.program
        run = _Run(self, graph)
        for at, one in program.inputs.items():
            run.values[at] = inputs(one).contiguous()
            if one.name == SEED:
                run.seed = int(run.values[at].item()) & 0xFFFFFFFF
        for number, step in enumerate(self.lowered.steps):
            match step:
                case Traversal():
                    run.traverse(self.kernels[number])
                case Product():
                    run.multiply(step.place)
                case Outer():
                    run.sum_outer(step.place)
                case _:
                    run.whole(step.place)
            for at in self._last_use.get(number, ()):
                run.forget(at)
        return [run.value(at) for at in program.outputs]

    def describe(self, graph: RelationalGraph) -> str:
        """The steps with their rows, and the floating-point operations of products."""
        program, lines = self.lowered.program, []
        for step in self.lowered.steps:
            match step:
                case Traversal():
                    by = "" if step.by is None else f" by {step.by.value}"
                    roots = ", ".join(f"%{at}" for at in step.roots)
                    lines.append(f"C traversal of {graph.count(step.over):,} {step.over.value} rows{by}: {roots}")
                case Product():
                    one = program[step.place]
                    count = graph.count(one.domain)
                    inner = program[one.operands[0]].shape[-1]
                    flops = 2 * count * inner * math.prod(one.shape)
                    lines.append(
                        f"BLAS product of {count:,} {one.domain.value} rows: %{step.place}, {flops / 1e6:,.1f} MFLOP"
                    )
                case Outer():
                    one = program[step.place]
                    assert isinstance(one, OuterSum)
                    count = graph.count(one.over)
                    flops = 2 * count * math.prod(one.shape)
                    lines.append(
                        f"BLAS sum of outer products of {count:,} {one.over.value} rows: %{step.place}, "
                        f"{flops / 1e6:,.1f} MFLOP"
                    )
                case _:
                    lines.append(f"PyTorch: %{step.place}")
        return "\n".join(lines)

    def _uses(self) -> dict[int, list[int]]:
        """After which step each value may go."""
        program = self.lowered.program
        last: dict[int, int] = {}
        for number, step in enumerate(self.lowered.steps):
            reads = self.kernels[number].inputs if isinstance(step, Traversal) else program[step.place].operands
            for at in reads:
                last[at] = number
                while isinstance(program[at], SameRows):
                    (at,) = program[at].operands
                    last[at] = number
        kept = set(program.outputs)
        for at in program.outputs:
            while isinstance(program[at], SameRows):
                (at,) = program[at].operands
                kept.add(at)
        found: dict[int, list[int]] = {}
        for at, number in last.items():
            if at not in kept:
                found.setdefault(number, []).append(at)
        return found


class _Run:
    """One call's tensors."""

    def __init__(self, compiled: Compiled, graph: RelationalGraph):
        self.compiled, self.graph = compiled, graph
        self.program = compiled.lowered.program
        self.values: dict[int, torch.Tensor] = {}
        self.seed = 0
        self._own: set[int] = set()
        self._free: dict[int, list[torch.Tensor]] = {}
        """Memory of values that are gone, by numbers: fresh memory costs page faults."""
        self._to_make = Counter(self._size(at) for step in compiled.lowered.steps for at in _made(step))
        """How many values of each size are still to come."""
        self.num_threads = 1 if os.getpid() != _PROCESS else torch.get_num_threads()

    def value(self, at: int) -> torch.Tensor:
        """Of a stored value, or of what goes by another name."""
        one = self.program[at]
        while at not in self.values and isinstance(one, SameRows):
            (at,) = one.operands
            one = self.program[at]
        return self.values[at]

    def forget(self, at: int) -> None:
        """No later step reads the value."""
        value = self.values.pop(at, None)
        if value is not None and at in self._own:
            free = self._free.setdefault(value.numel(), [])
            if len(free) < self._to_make[value.numel()]:
                free.append(value.view(-1))

    def make(self, at: int, *, zeros: bool) -> torch.Tensor:
        """Memory for a value."""
        one = self.program[at]
        shape = (self.graph.count(one.domain), *one.shape)
        free = self._free.get(math.prod(shape))
        self._to_make[math.prod(shape)] -= 1
        self._own.add(at)
        if free:
            found = free.pop().view(shape)
            self.values[at] = found.zero_() if zeros else found
        else:
            self.values[at] = (torch.zeros if zeros else torch.empty)(shape, dtype=self.compiled.dtype)
        return self.values[at]

    def _size(self, at: int) -> int:
        one = self.program[at]
        return self.graph.count(one.domain) * math.prod(one.shape)

    def traverse(self, kernel: Kernel) -> None:
        graph, step = self.graph, kernel.traversal
        for root in step.roots:
            one = self.program[root]
            may_lack_rows = isinstance(one, Reduce) and one.domain not in _PAIRS  # a pair has edges, a node may not
            self.make(root, zeros=may_lack_rows)
        buffers = [self.value(at) for at in (*kernel.inputs, *step.roots)]
        indexes = [graph.index_in_order(step.over, step.by, domain) for domain in kernel.indexes]
        context = _Context(
            num_positions=graph.count(step.over), num_threads=self.num_threads, seed=self.seed,
            indexes=_pointers(indexes), buffers=_pointers(buffers),
        )  # fmt: skip
        if step.by is not None:
            positions, starts = graph.order(step.over, step.by)
            context.num_groups = graph.count(step.by)
            context.starts = starts.data_ptr()
            context.positions = None if positions is None else positions.data_ptr()
        if context.num_positions:
            _check(self.compiled._functions[kernel.name](ctypes.byref(context)))

    def multiply(self, place: int) -> None:
        one = self.program[place]
        assert isinstance(one, Matmul)
        left, matrix = one.operands
        shape = self.program[matrix].shape
        num_heads = math.prod(one.shape[:-1])
        inner, outer = (shape[-1], shape[-2]) if one.transposed else (shape[-2], shape[-1])
        segments = self._segments(one.domain, self.program[matrix].domain)
        typed = self._typed(segments, num_heads, inner, outer)
        found = self.make(place, zeros=False)
        has_heads = math.prod(shape[:-2]) > 1
        rows = self._rows(left, one.domain, inner, num_heads)
        matrices = self.value(matrix).contiguous()
        _check(
            self.compiled._products.penstock_typed_matmul(
                ctypes.byref(typed), ctypes.byref(rows), ctypes.c_void_p(matrices.data_ptr()),
                ctypes.c_int64(inner * outer if has_heads else 0), ctypes.c_int64(math.prod(shape)),
                ctypes.c_int(one.transposed), ctypes.c_void_p(found.data_ptr()), ctypes.c_int64(self.num_threads),
            )
        )  # fmt: skip

    def sum_outer(self, place: int) -> None:
        one = self.program[place]
        assert isinstance(one, OuterSum)
        left, right = one.operands
        inner, outer = one.shape[-2:]
        num_heads = math.prod(one.shape[:-2])
        typed = self._typed(self._segments(one.over, one.domain), num_heads, inner, outer)
        found = self.make(place, zeros=False)
        rows = [self._rows(at, one.over, size, num_heads) for at, size in ((left, inner), (right, outer))]
        _check(
            self.compiled._products.penstock_typed_outer(
                ctypes.byref(typed), ctypes.byref(rows[0]), ctypes.byref(rows[1]), ctypes.c_void_p(found.data_ptr()),
                ctypes.c_int64(self.num_threads),
            )
        )  # fmt: skip

    def whole(self, place: int) -> None:
        machine = _eager.Machine(self.program, self.graph, self.compiled.dtype, torch.device("cpu"))
        one = self.program[place]
        for at in one.operands:
            operand = self.program[at]
            is_stored = at in self.compiled.lowered.stored
            machine.values[at] = self.value(at) if is_stored else machine.compute(operand)
        found = machine.compute(one).expand(self.graph.count(one.domain), *one.shape).contiguous()
        is_view = any(_share_memory(found, other) for other in machine.values.values())
        self.values[place] = found.clone() if is_view else found  # an operand's memory may be used again

    def _segments(self, of: Domain, to: Domain) -> torch.Tensor:
        return self.graph.order(of, to)[1]

    def _typed(self, segments: torch.Tensor, num_heads: int, inner: int, outer: int) -> _Typed:
        pointer = gemm(self.compiled.dtype)
        found = _Typed(
            num_types=len(segments) - 1, num_heads=num_heads, inner=inner, outer=outer,
            element_bytes=self.compiled.dtype.itemsize, segments=segments.data_ptr(), gemm=pointer,
        )  # fmt: skip
        found.keeps = segments  # type: ignore[attr-defined]  # alive as long as its address is used
        return found

    def _rows(self, at: int, over: Domain, width: int, num_heads: int) -> _Rows:
        value, one = self.value(at), self.program[at]
        index = None
        if one.domain is Domain.ONE:
            value = value.expand(self.graph.count(over), *one.shape).contiguous()
        elif one.domain is not over:
            index = self.graph.index_in_order(over, None, one.domain)
        size = math.prod(one.shape)
        found = _Rows(
            rows=value.data_ptr(), index=None if index is None else index.data_ptr(), row_stride=size,
            head_stride=width if num_heads > 1 and size > width else 0,
        )  # fmt: skip
        found.keeps = value, index  # type: ignore[attr-defined]
        return found


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() > 0 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _made(step: Step) -> Sequence[int]:
    """Values that take memory of `_Run.make`."""
    if isinstance(step, Traversal):
        return step.roots
    return () if isinstance(step, Whole) else (step.place,)


@functools.cache
def gemm(dtype: torch.dtype) -> int | None:
    """The address of ``sgemm_`` or ``dgemm_`` in PyTorch's library; ``None`` where it has none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
    for name in ("sgemm_", "sgemm") if dtype is torch.float32 else ("dgemm_", "dgemm"):
        try:
            return ctypes.cast(library[name], ctypes.c_void_p).value
        except AttributeError:
            continue
    return None


def _pointers(tensors: Sequence[torch.Tensor]) -> ctypes.c_void_p:
    array = (ctypes.c_void_p * max(1, len(tensors)))(*(one.data_ptr() for one in tensors))
    found = ctypes.cast(array, ctypes.c_void_p)
    found.keeps = array, tensors  # type: ignore[attr-defined]
    return found


def _check(status: int) -> None:
    if status:
        raise MemoryError("no memory for the partial sums of a relational layer")
