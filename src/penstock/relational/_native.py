"""Running lowered programs on a CPU: generated C for traversals, `native/relational.c` for products."""

import ctypes
import math
import os
from collections.abc import Sequence

import torch

from penstock import native
from penstock.errors import InternalError
from penstock.relational._domain import EDGES, ENDS, Domain
from penstock.relational._emit_c import emit
from penstock.relational._fuse import fuse
from penstock.relational._graph import RelationalGraph
from penstock.relational._indexes import Indexes
from penstock.relational._ir import Matmul, OuterSum, Program
from penstock.relational._lower import BlockedPass, BlockedSum, Kernel, Product, ScatteredProduct, lower
from penstock.relational._narrow import is_narrow_outer, is_narrow_score, is_narrow_sum, narrow
from penstock.relational._products import CMatrices, CRows, CTyped, check, library
from penstock.relational._steps import Compiled, ProgramCall
from penstock.storages import address

_PROCESS = os.getpid()
"""The process that may use OpenMP's threads: they do not survive a fork, so children use one thread."""
_EDGES_A_PRODUCT = 8
"""Number of rows that can be summed in about the time of multiplying one."""
DTYPES = {torch.float32: "float32", torch.float64: "float64"}


def threads() -> int:
    """Return the number of threads that a call may use."""
    return 1 if os.getpid() != _PROCESS else torch.get_num_threads()


class _CContext(ctypes.Structure):
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


class _CTable(ctypes.Structure):
    _fields_ = (("row_bytes", ctypes.c_int64), ("rows", ctypes.c_void_p))


class _COperand(ctypes.Structure):
    _fields_ = (("rows", CRows), ("table", ctypes.c_int64))


class _CSum(ctypes.Structure):
    _fields_ = (
        ("typed", CTyped),
        ("left", _COperand),
        ("right", CMatrices),
        ("results", ctypes.c_void_p),
    )


class _COuterSum(ctypes.Structure):
    _fields_ = (
        ("typed", CTyped),
        ("left", _COperand),
        ("right", _COperand),
        ("results", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
    )


class _CPass(ctypes.Structure):
    _fields_ = (
        ("num_types", ctypes.c_int64),
        ("element_bytes", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("num_tables", ctypes.c_int64),
        ("num_sums", ctypes.c_int64),
        ("num_outers", ctypes.c_int64),
        ("segments", ctypes.c_void_p),
        ("borders", ctypes.c_void_p),
        ("owners", ctypes.c_void_p),
        ("producer", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("outers", ctypes.c_void_p),
    )


class CompiledC(Compiled):
    """A program compiled for the CPU in one dtype; works for any graph."""

    emitter = "C"

    def __init__(self, program: Program, dtype: torch.dtype, num_parts: int, *, is_fused: bool, with_outers: bool):
        lowered = lower(program, blocked=True)
        super().__init__(fuse(lowered, num_parts, with_outers=with_outers) if is_fused else lowered, dtype)
        self.source, self.kernels = emit(self.lowered, DTYPES[dtype])
        self.find_last_uses()
        generated = native.compile_source(self.source, "relational-layer", openmp=True)
        products = library()
        if generated is None or products is None:
            raise InternalError("no compiler: callers ask is_available() first")
        self.products = products
        self.functions = {kernel.name: generated[kernel.name] for kernel in self.kernels.values()}

    @staticmethod
    def is_available() -> bool:
        """Return whether this machine has a C compiler."""
        return library() is not None and native.can_compile()

    def start(self, graph: RelationalGraph) -> "_CCall":
        return _CCall(self, graph)


class _CCall(ProgramCall):
    """The tensors of one call."""

    def __init__(self, compiled: CompiledC, graph: RelationalGraph):
        super().__init__(compiled, graph)
        self.compiled = compiled
        self.num_threads = threads()

    def traverse(self, kernel: Kernel) -> None:
        roots = kernel.traversal.roots
        has_rows = self.indexes.count(kernel.traversal.over) > 0
        for root in roots:
            self.make(root, writes_all=has_rows)
        context = self._context(kernel, roots)
        if context.num_positions:
            check(self.compiled.functions[kernel.name](ctypes.byref(context)))

    def _context(self, kernel: Kernel, roots: Sequence[int]) -> _CContext:
        indexes, step = self.indexes, kernel.traversal
        buffers = [self.value(place) for place in (*kernel.inputs, *roots)]
        rows = [indexes.index_in_order(step.over, step.by, domain) for domain in kernel.indexes]
        tables = _pointers(rows), _pointers(buffers)
        context = _CContext(
            num_positions=indexes.count(step.over), num_threads=self.num_threads, seed=self.seed,
            indexes=tables[0], buffers=tables[1],
        )  # fmt: skip
        context.keeps = tables  # type: ignore[attr-defined]  # alive as long as their addresses are used
        if step.by is not None:
            positions, starts = indexes.order(step.over, step.by)
            context.num_groups = indexes.count(step.by)
            context.starts = address(starts)
            context.positions = address(positions)
            context.keeps = tables, positions, starts  # type: ignore[attr-defined]
        return context

    def multiply(self, step: Product) -> None:
        if self._score(step):
            return
        operation = self.program[step.product]
        assert isinstance(operation, Matmul)
        typed, matrices = self._product(operation)
        by = self.program[operation.operands[1]].domain
        rows = self._rows(operation.operands[0], operation.domain, by, typed.inner, typed.num_heads)
        places = self.indexes.order(operation.domain, by)[0]
        result = self.make(step.place) if step.onto is None else self.take(step.onto, step.place)
        check(
            self.compiled.products.penstock_typed_matmul(
                ctypes.byref(typed), ctypes.byref(rows), ctypes.byref(matrices),
                ctypes.c_void_p(address(places)), ctypes.c_void_p(address(result)),
                ctypes.c_int64(step.onto is not None), ctypes.c_int64(self.num_threads),
            )
        )  # fmt: skip

    def _score(self, step: Product) -> bool:
        """Compute a narrow product node by node; return whether it is one, and that pays."""
        operation = self.program[step.product]
        if step.onto is not None or not is_narrow_score(self.program, step.product):
            return False
        assert isinstance(operation, Matmul)
        row, matrix = operation.operands
        sides = self.program[row].shape[0], operation.shape[0]
        sizes = narrow(self.indexes, operation.domain, sides, self.compiled.dtype.itemsize, self.num_threads)
        if sizes is None:
            return False
        buffers = [self.value(matrix).contiguous(), self.value(row), self.make(step.place)]
        matrices, rows, results = (ctypes.c_void_p(address(buffer)) for buffer in buffers)
        lie_so = ctypes.c_int64(operation.transposed)
        check(self.compiled.products.penstock_narrow_scores(ctypes.byref(sizes), matrices, lie_so, rows, results))
        return True

    def _sum_scores(self, step: BlockedPass) -> bool:
        """Compute sums by node of a narrow product, node by node; return whether it is one, and that pays."""
        part = step.sums[0]
        if len(step.sums) > 1 or step.outers or not is_narrow_sum(self.program, part.product):
            return False
        operation = self.program[part.product]
        assert isinstance(operation, Matmul)
        pair, matrix = operation.operands
        sides = operation.shape[0], self.program[pair].shape[0]
        sizes = narrow(self.indexes, operation.domain, sides, self.compiled.dtype.itemsize, self.num_threads)
        if sizes is None:
            return False
        result = self.make(part.place, writes_all=True) if part.onto is None else self.take(part.onto, part.place)
        buffers = [self.value(matrix).contiguous(), self.value(pair), result]
        matrices, pairs, results = (ctypes.c_void_p(address(buffer)) for buffer in buffers)
        lie_so, adds = ctypes.c_int64(not operation.transposed), ctypes.c_int64(part.onto is not None)
        check(self.compiled.products.penstock_narrow_sums(ctypes.byref(sizes), matrices, lie_so, pairs, results, adds))
        return True

    def _sum_outer_of_scores(self, place: int) -> bool:
        """Compute a sum of narrow outer products node by node; return whether it is one, and that pays."""
        operation = self.program[place]
        if not is_narrow_outer(self.program, place):
            return False
        assert isinstance(operation, OuterSum)
        left, right = operation.operands
        is_row_first = self.program[left].domain is not operation.over
        row, pair = (left, right) if is_row_first else (right, left)
        sides = self.program[row].shape[0], self.program[pair].shape[0]
        sizes = narrow(self.indexes, operation.over, sides, self.compiled.dtype.itemsize, self.num_threads)
        if sizes is None:
            return False
        buffers = [self.value(row), self.value(pair), self.make(place)]
        rows, pairs, results = (ctypes.c_void_p(address(buffer)) for buffer in buffers)
        lie_so = ctypes.c_int64(not is_row_first)
        check(self.compiled.products.penstock_narrow_outers(ctypes.byref(sizes), rows, pairs, results, lie_so))
        return True

    def pass_blocks(self, step: BlockedPass, kernel: Kernel | None) -> None:
        if kernel is None and self._sum_scores(step):
            return
        indexes, end = self.indexes, ENDS[step.over]
        computed = [] if step.rows is None else step.rows.sums(self.program)
        for place in () if step.rows is None else step.rows.roots:
            if place in self.stored:
                self.make(place)
        tables = [self._table_of(place) for place in computed]
        sums = [self._sum_of(part, step.over, computed) for part in step.sums]
        num_threads = self.num_threads
        outers = [self._outer_of(place, computed, num_threads) for place in step.outers]
        borders = indexes.remember(
            ("borders", step.over, num_threads, kernel is None),
            lambda: _borders(indexes, step.over, end, num_threads, sums_edges=kernel is not None),
        )
        segments, owners = self._segments(step.over, Domain.EDGE_TYPE), indexes.index_in_order(step.over, None, end)
        arrays = (_CTable * len(tables))(*tables), (_CSum * len(sums))(*sums), (_COuterSum * len(outers))(*outers)
        blocks = _CPass(
            num_types=len(segments) - 1, element_bytes=self.compiled.dtype.itemsize, num_threads=num_threads,
            num_tables=len(tables), num_sums=len(sums), num_outers=len(outers), segments=address(segments),
            borders=address(borders), owners=address(owners), tables=ctypes.addressof(arrays[0]),
            sums=ctypes.addressof(arrays[1]), outers=ctypes.addressof(arrays[2]),
        )  # fmt: skip
        if kernel is not None:
            context = self._context(kernel, [place for place in kernel.traversal.roots if place not in computed])
            blocks.producer = ctypes.cast(self.compiled.functions[kernel.name], ctypes.c_void_p)
            blocks.context = ctypes.addressof(context)
        check(self.compiled.products.penstock_blocked_pass(ctypes.byref(blocks)))

    def scatter(self, step: ScatteredProduct, kernel: Kernel) -> None:
        operation = self.program[step.product]
        assert isinstance(operation, Matmul)
        typed, matrices = self._product(operation)
        rows = self._rows(operation.operands[0], operation.domain, Domain.EDGE_TYPE, typed.inner, typed.num_heads)
        self.make(step.place)
        context = self._context(kernel, [step.place])
        function = ctypes.cast(self.compiled.functions[kernel.name], ctypes.c_void_p)
        check(
            self.compiled.products.penstock_scattered_product(
                ctypes.byref(typed), ctypes.byref(rows), ctypes.byref(matrices), function, ctypes.byref(context),
                ctypes.c_int64(step.num_parts), ctypes.c_int64(self.num_threads),
            )
        )  # fmt: skip

    def _table_of(self, place: int) -> "_CTable":
        row_bytes = math.prod(self.program[place].shape) * self.compiled.dtype.itemsize
        return _CTable(row_bytes, self.value(place).data_ptr() if place in self.stored else None)

    def _sum_of(self, part: BlockedSum, over: Domain, computed: Sequence[int]) -> "_CSum":
        operation = self.program[part.product]
        assert isinstance(operation, Matmul)
        result = self.make(part.place) if part.onto is None else self.take(part.onto, part.place)
        typed, matrices = self._product(operation)
        left = self._operand(operation.operands[0], over, typed.inner, typed.num_heads, computed)
        filled = _CSum(typed, left, matrices, address(result))
        filled.keeps = typed, left, matrices  # type: ignore[attr-defined]  # alive as long as their addresses are used
        return filled

    def _outer_of(self, place: int, computed: Sequence[int], num_threads: int) -> "_COuterSum":
        operation = self.program[place]
        assert isinstance(operation, OuterSum)
        typed, sizes = self._sizes(operation)
        operands = [
            self._operand(operand, operation.over, size, typed.num_heads, computed)
            for operand, size in zip(operation.operands, sizes, strict=True)
        ]
        result = self.make(place)
        parts = result.new_empty(num_threads - 1, result.numel())
        filled = _COuterSum(typed, *operands, address(result), address(parts))
        filled.keeps = typed, operands, parts  # type: ignore[attr-defined]
        return filled

    def _operand(self, place: int, over: Domain, width: int, num_heads: int, computed: Sequence[int]) -> "_COperand":
        if place not in computed:
            rows = self._rows(place, over, Domain.EDGE_TYPE, width, num_heads)
            table = -1
        else:
            size, table = math.prod(self.program[place].shape), computed.index(place)
            rows = CRows(row_stride=size, head_stride=width if num_heads > 1 and size > width else 0)
        operand = _COperand(rows, table)
        operand.keeps = rows  # type: ignore[attr-defined]
        return operand

    def _product(self, operation: Matmul) -> tuple[CTyped, CMatrices]:
        """Return the sizes and matrices as the C functions for products take them."""
        matrix = operation.operands[1]
        shape = self.program[matrix].shape
        inner, outer = (shape[-1], shape[-2]) if operation.transposed else (shape[-2], shape[-1])
        segments = self._segments(operation.domain, self.program[matrix].domain)
        typed = self._typed(segments, math.prod(operation.shape[:-1]), inner, outer)
        value = self.value(matrix).contiguous()
        stride = inner * outer if math.prod(shape[:-2]) > 1 else 0
        matrices = CMatrices(address(value), stride, math.prod(shape), operation.transposed)
        matrices.keeps = value  # type: ignore[attr-defined]  # alive as long as its address is used
        return typed, matrices

    def sum_outer(self, place: int) -> None:
        if self._sum_outer_of_scores(place):
            return
        operation = self.program[place]
        assert isinstance(operation, OuterSum)
        typed, sizes = self._sizes(operation)
        result = self.make(place)
        rows = [
            self._rows(operand, operation.over, operation.domain, size, typed.num_heads)
            for operand, size in zip(operation.operands, sizes, strict=True)
        ]
        check(
            self.compiled.products.penstock_typed_outer(
                ctypes.byref(typed), ctypes.byref(rows[0]), ctypes.byref(rows[1]), ctypes.c_void_p(address(result)),
                ctypes.c_int64(self.num_threads),
            )
        )  # fmt: skip

    def _sizes(self, operation: OuterSum) -> tuple[CTyped, tuple[int, int]]:
        """Return the sizes as the C functions for outer products take them, and the widths of both operands."""
        inner, outer = operation.shape[-2:]
        segments = self._segments(operation.over, operation.domain)
        return self._typed(segments, math.prod(operation.shape[:-2]), inner, outer), (inner, outer)

    def _segments(self, of: Domain, to: Domain) -> torch.Tensor:
        return self.indexes.order(of, to)[1]

    def _typed(self, segments: torch.Tensor, num_heads: int, inner: int, outer: int) -> CTyped:
        typed = CTyped(
            num_types=len(segments) - 1, num_heads=num_heads, inner=inner, outer=outer,
            element_bytes=self.compiled.dtype.itemsize, segments=address(segments),
        )  # fmt: skip
        typed.keeps = segments  # type: ignore[attr-defined]  # alive as long as its address is used
        return typed

    def _rows(self, place: int, over: Domain, by: Domain, width: int, num_heads: int) -> CRows:
        value, operation = self.value(place), self.program[place]
        if operation.domain is Domain.ONE:
            value = value.expand(self.indexes.count(over), *operation.shape).contiguous()
        index = self.lookup(place, over, by)
        size = math.prod(operation.shape)
        rows = CRows(
            rows=address(value), index=address(index), row_stride=size,
            head_stride=width if num_heads > 1 and size > width else 0,
        )  # fmt: skip
        rows.keeps = value, index  # type: ignore[attr-defined]
        return rows


def _borders(indexes: Indexes, pairs: Domain, end: Domain, num_threads: int, *, sums_edges: bool) -> torch.Tensor:
    """Return the owner at which each thread begins, so that all have equal work: rows to multiply, and edges to sum."""
    starts = indexes.order(pairs, end)[1]
    if sums_edges:
        starts = _EDGES_A_PRODUCT * starts + indexes.order(EDGES[pairs], end)[1]
    # Targets have owners, so the order of additions into one does not depend on the number of threads.
    wanted = torch.arange(num_threads + 1, device=starts.device) * int(starts[-1]) // num_threads
    borders = torch.searchsorted(starts, wanted)
    borders[-1] = len(starts) - 1
    return borders


def _pointers(tensors: Sequence[torch.Tensor]) -> ctypes.c_void_p:
    array = (ctypes.c_void_p * max(1, len(tensors)))(*(address(tensor) for tensor in tensors))
    pointer = ctypes.cast(array, ctypes.c_void_p)
    pointer.keeps = array, tensors  # type: ignore[attr-defined]
    return pointer
