"""Running lowered programs with Triton: generated kernels for traversals, `_triton_kernels` for products.

On CUDA a few schedules of every kernel are tried when it first meets a graph of a new shape. A thread compiles them
while training goes on, and then a call times them. The fastest is kept in the cache folder, so that results are
bit-identical from then on. With ``torch.use_deterministic_algorithms`` nothing is timed, and results are bit-identical
on all machines of the same kind. Under Triton's interpreter (``TRITON_INTERPRET=1``) the same kernels run on CPU
tensors, very slowly.
"""

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from penstock import native
from penstock.relational._domain import Domain
from penstock.relational._emit_triton import TritonKernel, emit
from penstock.relational._graph import RelationalGraph
from penstock.relational._indexes import Indexes
from penstock.relational._ir import Input, Matmul, OuterSum, Program, Reduce
from penstock.relational._lower import Kernel, Product, lower
from penstock.relational._steps import Compiled, ProgramCall
from penstock.relational._tune import BACKGROUND, Choices, RowSchedule, schedules

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""Dtypes that it can compute in, with Triton's names."""
_TILE_NUMBERS = 4096
"""The most numbers in a traversal's tile, including rows."""
_SPLIT_ROWS = 1024
"""Number of rows in one partial sum of outer products."""
_PARTS_BLOCK = 256
"""Numbers of a row that an instance combines parts of; one size for all rows, because each is a kernel."""
_MOST_IN_GRID = 65_535
"""The most instances along the second dimension of a grid on CUDA."""
_NARROW = 16
"""Row size below which values (scores, their sums and maxima) stay in float32 in layers of half precision."""


class CompiledTriton(Compiled):
    """A program compiled for CUDA in one dtype; works for any graph."""

    emitter = "Triton"
    kernels: dict[int, TritonKernel]  # type: ignore[assignment]

    def __init__(self, program: Program, dtype: torch.dtype, num_results: int):
        super().__init__(lower(program, blocked=False), dtype)
        self._results = set(program.outputs[:num_results])
        self.source, self.kernels = emit(self.lowered, DTYPES[dtype])
        self.find_last_uses()
        self.module = _module(self.source)
        self.compiling: dict[tuple[object, ...], dict[RowSchedule, Future[None]]] = {}
        """Schedules that are compiled beside the training, by kernel, shape of the graph, and device."""

    def choices(self, device: torch.device) -> Choices:
        """Return the schedules that were the fastest on devices of this kind."""
        return _choices(self.module.__name__, f"{torch.cuda.get_device_name(device)} {_triton_version()}")

    @staticmethod
    def is_available(device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether Triton is installed, can reach the device and supports the dtype there."""
        if importlib.util.find_spec("triton") is None or dtype not in DTYPES:
            return False
        if device.type == "cuda":
            return torch.cuda.get_device_capability(device) >= ((8, 0) if dtype is torch.bfloat16 else (7, 0))
        return os.environ.get("TRITON_INTERPRET") == "1"

    def dtype_of(self, place: int) -> torch.dtype:
        is_narrow = math.prod(self.lowered.program[place].shape) < _NARROW
        return torch.float32 if is_narrow and place not in self._results else self.dtype

    def run(self, graph: RelationalGraph, inputs: Callable[[Input], torch.Tensor]) -> list[torch.Tensor]:
        """Return the values of the outputs, ``[rows, *shape]`` each."""
        with _on(graph.device):
            return super().run(graph, inputs)

    def start(self, graph: RelationalGraph) -> "_TritonCall":
        return _TritonCall(self, graph)


class _TritonCall(ProgramCall):
    """The tensors of one call."""

    def __init__(self, compiled: CompiledTriton, graph: RelationalGraph):
        super().__init__(compiled, graph)
        self.compiled = compiled
        self.fixed = _fixed_kernels()

    def traverse(self, kernel: Kernel) -> None:
        assert isinstance(kernel, TritonKernel)
        step = kernel.traversal
        for root in step.roots:
            self.make(root)
        if not self.indexes.count(step.over):
            return
        buffers = [self.value(place) for place in (*kernel.inputs, *step.roots)]
        rows = [self.indexes.index_in_order(step.over, step.by, domain) for domain in kernel.indexes]
        arguments = [*rows, *buffers]
        function = getattr(self.compiled.module, kernel.name)
        if step.by is None:
            count, size = self.indexes.count(step.over), _rows_of(kernel.tile)
            launch(function, (_ceil(count, size),), [count, self.seed, *arguments], {"ROWS": size}, warps=4)
            return
        self._go_through(kernel, function, arguments, self._schedule(kernel, function, arguments))

    def _go_through(self, kernel: TritonKernel, function: Any, arguments: Sequence[Any], chosen: RowSchedule) -> None:
        launched = self._launched(kernel, arguments, chosen)
        launch(function, launched.grid, launched.arguments, launched.constants, warps=chosen.warps)
        for place, part in launched.parts.items():
            operation = self.program[place]
            assert isinstance(operation, Reduce)
            self._add_parts(
                launched.split, part, self.value(place), math.prod(operation.shape), is_max=operation.kind == "max"
            )

    def _launched(self, kernel: TritonKernel, arguments: Sequence[Any], chosen: RowSchedule) -> "_Launch":
        step = kernel.traversal
        assert step.by is not None
        tasks = tasks_of(self.indexes, step.over, step.by, chosen.split)
        positions, _ = self.indexes.order(step.over, step.by)
        parts = {
            place: torch.empty(tasks.num_parts, math.prod(self.program[place].shape), device=self.device)
            for place in step.roots
            if isinstance(self.program[place], Reduce)
        }
        grid = (_ceil(len(tasks.groups), chosen.rows) if chosen.lanes else len(tasks.groups),)
        all_arguments = [
            tasks.groups, tasks.begins, tasks.ends, tasks.part_numbers, _or_any(positions, tasks.groups),
            len(tasks.groups), self.seed, *arguments, *parts.values(),
        ]  # fmt: skip
        flags = {"HAS_POSITIONS": positions is not None, "LANES": chosen.lanes, "ROWS": chosen.rows}
        return _Launch(grid, all_arguments, flags, parts, tasks.split)

    def _schedule(self, kernel: TritonKernel, function: Any, arguments: Sequence[Any]) -> RowSchedule:
        step, count = kernel.traversal, self.indexes.count
        assert step.by is not None
        mean = count(step.over) / max(1, count(step.by))
        tried = schedules(_rows_of(kernel.tile), mean)
        if torch.are_deterministic_algorithms_enabled() or not _is_timed(self.device):
            return tried[0]
        shape = tuple(count(domain).bit_length() for domain in (step.over, step.by))
        choices = self.compiled.choices(self.device)
        chosen = choices.find(kernel.name, shape, tried)
        key = (kernel.name, *step.roots, shape, self.device)
        compiling = self.compiled.compiling
        if chosen is not None:
            compiling.pop(key, None)  # an alike traversal was measured
            return chosen
        others = compiling.get(key)
        if others is None:
            compiling[key] = {}  # the first call compiles the likeliest, and nothing beside it
            return tried[0]
        if not others:
            for schedule in tried[1:]:
                others[schedule] = BACKGROUND.submit(self._compiler(kernel, function, arguments, schedule))
        if not all(future.done() for future in others.values()) or torch.cuda.is_current_stream_capturing():
            return tried[0]  # measured at a later call
        compiled = [tried[0], *(schedule for schedule, future in others.items() if future.exception() is None)]
        # This call's own buffers serve to measure, because every kernel writes all of its result.
        chosen = min(
            compiled, key=lambda schedule: _mean_ms(lambda: self._go_through(kernel, function, arguments, schedule))
        )
        choices.keep(kernel.name, shape, chosen)
        compiling.pop(key, None)  # unless another thread was as fast
        return chosen

    def _compiler(
        self, kernel: TritonKernel, function: Any, arguments: Sequence[Any], schedule: RowSchedule
    ) -> Callable[[], object]:
        """Return a function that compiles a kernel, and holds none of the call's tensors."""
        launched = self._launched(kernel, arguments, schedule)
        kinds = [value.dtype if isinstance(value, torch.Tensor) else value for value in launched.arguments]
        grid, constants, device = launched.grid, launched.constants, self.device

        def compile_it() -> None:
            with _on(device):
                function.warmup(*kinds, grid=grid, **constants, num_warps=schedule.warps)

        return compile_it

    def multiply(self, step: Product) -> None:
        operation = self.program[step.product]
        assert isinstance(operation, Matmul)
        left, matrix = operation.operands
        shape = self.program[matrix].shape
        heads = math.prod(operation.shape[:-1])
        inner, outer = (shape[-1], shape[-2]) if operation.transposed else (shape[-2], shape[-1])
        by = self.program[matrix].domain
        result = self.make(step.place) if step.onto is None else self.take(step.onto, step.place)
        rows, index, strides = self._rows(left, operation.domain, by, inner, heads)
        places = self.indexes.order(operation.domain, by)[0]
        matrices = self.value(matrix).contiguous()
        block_rows, block_outer = 64, min(64, _block_of(outer))
        blocks = blocks_of(self.indexes, operation.domain, by, block_rows)
        if not len(blocks.types):
            return
        launch(
            self.fixed.typed_matmul,
            (len(blocks.types), _ceil(outer, block_outer), heads),
            [
                blocks.types, blocks.starts, blocks.segments, rows, _or_any(index, blocks.types), matrices,
                _or_any(places, blocks.types), result, int(index is not None), int(places is not None),
                int(step.onto is not None),
            ],
            {
                "row_stride": strides[0], "head_stride": strides[1], "matrix_stride": math.prod(shape),
                "matrix_head_stride": inner * outer if math.prod(shape[:-2]) > 1 else 0, "HEADS": heads,
                "INNER": inner, "OUTER": outer, "TRANSPOSED": operation.transposed,
                "IS_HALF": _is_half(rows, matrices), "PRECISION": _precision(),
                "BLOCK_ROWS": block_rows, "BLOCK_INNER": min(32, _block_of(inner)), "BLOCK_OUTER": block_outer,
            },
            warps=4,
        )  # fmt: skip

    def sum_outer(self, place: int) -> None:
        operation = self.program[place]
        assert isinstance(operation, OuterSum)
        inner, outer = operation.shape[-2:]
        heads = math.prod(operation.shape[:-2])
        result = self.make(place).zero_()
        blocks = blocks_of(self.indexes, operation.over, operation.domain, _SPLIT_ROWS)
        if not len(blocks.types):
            return
        (left, left_index, left_strides), (right, right_index, right_strides) = (
            self._rows(operand, operation.over, operation.domain, size, heads)
            for operand, size in zip(operation.operands, (inner, outer), strict=True)
        )
        width = heads * inner * outer
        parts = torch.empty(len(blocks.types), width, device=self.device, dtype=torch.float32)
        block_inner, block_outer = min(64, _block_of(inner)), min(64, _block_of(outer))
        launch(
            self.fixed.typed_outer,
            (len(blocks.types), _ceil(inner, block_inner) * _ceil(outer, block_outer), heads),
            [
                blocks.types, blocks.starts, blocks.segments, left, _or_any(left_index, blocks.types),
                right, _or_any(right_index, blocks.types), parts, int(left_index is not None),
                int(right_index is not None),
            ],
            {
                "left_stride": left_strides[0], "left_head_stride": left_strides[1], "right_stride": right_strides[0],
                "right_head_stride": right_strides[1], "HEADS": heads, "INNER": inner, "OUTER": outer,
                "IS_HALF": _is_half(left, right), "PRECISION": _precision(), "SPLIT": _SPLIT_ROWS, "BLOCK_ROWS": 32,
                "BLOCK_INNER": block_inner, "BLOCK_OUTER": block_outer,
            },
            warps=4,
        )  # fmt: skip
        self._add_parts(blocks.split, parts, result, width, is_max=False)

    def _add_parts(
        self, split: "Split", parts: torch.Tensor, results: torch.Tensor, width: int, *, is_max: bool
    ) -> None:
        if not len(split.groups):
            return
        block = _PARTS_BLOCK if _ceil(width, _PARTS_BLOCK) <= _MOST_IN_GRID else 16 * _PARTS_BLOCK
        launch(
            self.fixed.add_parts,
            (len(split.groups), _ceil(width, block)),
            [split.groups, split.firsts, split.counts, parts, results, width],
            {"IS_MAX": is_max, "BLOCK": block},
            warps=4,
        )

    def _rows(
        self, place: int, over: Domain, by: Domain, width: int, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, int]]:
        """Return a product's rows: the tensor, the index of its rows, and strides between rows and heads."""
        value, operation = self.value(place), self.program[place]
        size = math.prod(operation.shape)
        strides = (0 if operation.domain is Domain.ONE else size, width if heads > 1 and size > width else 0)
        return value, self.lookup(place, over, by), strides


@dataclass(frozen=True, slots=True)
class _Launch:
    """A traversal's kernel with all its arguments."""

    grid: tuple[int, ...]
    arguments: list[Any]
    constants: dict[str, Any]
    parts: dict[int, torch.Tensor]
    """Partial results of each sum, ``[num_parts, numbers of a row]``."""
    split: "Split"
    """How partial results are combined."""


@dataclass(frozen=True, slots=True)
class Split:
    """Results that have several parts; all tensors are ``int32``."""

    groups: torch.Tensor
    """Rows of the result."""
    firsts: torch.Tensor
    """The first part of each."""
    counts: torch.Tensor
    """Number of parts of each."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """Groups cut into tasks of bounded length, the longest first; all tensors are ``int32``.

    Groups without rows have none.
    """

    groups: torch.Tensor
    """Group of each task."""
    begins: torch.Tensor
    """First position of each task."""
    ends: torch.Tensor
    """Position after the last one of each task."""
    part_numbers: torch.Tensor
    """Part number of each task, -1 if it is the whole group."""
    num_parts: int
    """Number of parts of all groups that are split."""
    split: Split
    """How parts are combined."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows in blocks of one type; all tensors are ``int32``."""

    types: torch.Tensor
    """Type of each block."""
    starts: torch.Tensor
    """First row of each block."""
    segments: torch.Tensor
    """Start of each type's rows, and the end of the last one's."""
    split: Split
    """The blocks of each type."""


def tasks_of(indexes: Indexes, over: Domain, by: Domain, split: int) -> Tasks:
    """Return the graph's tasks, which are built once."""
    key, device = ("tasks", over, by, split), indexes.edges.device
    return indexes.remember(key, lambda: _tasks(indexes.order(over, by).starts, split, device))


def blocks_of(indexes: Indexes, of: Domain, to: Domain, size: int) -> Blocks:
    """Return the graph's blocks, which are built once."""
    key, device = ("blocks", of, to, size), indexes.edges.device
    return indexes.remember(key, lambda: _blocks(indexes.order(of, to).starts, size, device))


def _tasks(starts: torch.Tensor, split: int, device: torch.device) -> Tasks:
    starts = starts.cpu()
    groups, ranks, chunks = _pieces(starts, split)
    begins = starts[:-1][groups] + ranks * split
    ends = torch.minimum(begins + split, starts[1:][groups])
    is_part = chunks[groups] > 1
    numbers = torch.where(is_part, is_part.cumsum(0) - 1, -1)
    order = (begins - ends).argsort(stable=True)  # the longest first, so that none is left over at the end
    owners = (chunks > 1).nonzero().squeeze(1)
    parts = Split(*_int32(device, owners, chunks[owners].cumsum(0) - chunks[owners], chunks[owners]))
    groups, begins, ends, numbers = _int32(device, *(column[order] for column in (groups, begins, ends, numbers)))
    return Tasks(groups, begins, ends, numbers, num_parts=int(is_part.sum()), split=parts)


def _blocks(segments: torch.Tensor, size: int, device: torch.device) -> Blocks:
    segments = segments.cpu()
    types, ranks, chunks = _pieces(segments, size)
    owners = chunks.nonzero().squeeze(1)
    split = Split(*_int32(device, owners, (chunks.cumsum(0) - chunks)[owners], chunks[owners]))
    types, starts, segments = _int32(device, types, segments[:-1][types] + ranks * size, segments)
    return Blocks(types, starts, segments, split)


def _pieces(starts: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the group of each piece and its rank there, and the number of pieces of each group."""
    chunks = (starts.diff() + size - 1) // size
    groups = torch.arange(len(chunks), device=starts.device).repeat_interleave(chunks)
    ranks = torch.arange(len(groups), device=starts.device) - (chunks.cumsum(0) - chunks)[groups]
    return groups, ranks, chunks


def _int32(device: torch.device, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(device, torch.int32).contiguous() for tensor in tensors]


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: dict[str, Any], *, warps: int
) -> None:
    """Start a kernel on the current device, or under the interpreter."""
    kernel[grid](*arguments, **constants, num_warps=warps)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which Triton compiles for a CUDA device and launches on it."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _is_timed(device: torch.device) -> bool:
    """Return whether kernels run on the device, not in the interpreter."""
    return device.type == "cuda"


def _mean_ms(run: Callable[[], None]) -> float:
    """Return the mean milliseconds of ten runs on the device, after one that compiles.

    The device waits until all are queued, because Python takes longer to launch small kernels than they run.
    """
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)  # about 5 ms
    start.record()
    for _ in range(10):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 10


@functools.lru_cache(maxsize=256)
def _module(source: str) -> ModuleType:
    """Return the source as a module; Triton reads kernels from a file."""
    name = "relational_layer_" + hashlib.sha256(source.encode()).hexdigest()[:24]
    file = native.keep_source(source, f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.lru_cache(maxsize=1024)
def _choices(source: str, device: str) -> Choices:
    return Choices(source, device)


def _triton_version() -> str:
    """Return Triton's version, since another version compiles other kernels."""
    import triton

    return str(triton.__version__)


@functools.cache
def _fixed_kernels() -> Any:  # any: a module of Triton kernels
    return importlib.import_module("penstock.relational._triton_kernels")


def _is_half(*tensors: torch.Tensor) -> bool:
    """Return whether tensor cores can multiply these tensors without conversion."""
    pairs = itertools.pairwise(tensor.dtype for tensor in tensors)
    return tensors[0].dtype is not torch.float32 and all(left is right for left, right in pairs)


def _or_any(index: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """Return the index, or any other pointer for an argument that is not read without an index."""
    return stand_in if index is None else index


def _precision() -> str:
    """Return the precision that the user set for float32 products, by PyTorch's new name or its old one."""
    of_products = torch.backends.cuda.matmul
    if hasattr(of_products, "fp32_precision"):
        return "tf32" if of_products.fp32_precision == "tf32" else "ieee"
    return "tf32" if of_products.allow_tf32 else "ieee"


def _rows_of(tile: int) -> int:
    return max(1, min(64, _TILE_NUMBERS // tile))


def _block_of(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
