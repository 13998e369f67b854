"""The rate of our products of rows with the matrix of their type, beside PyTorch's batched products of the same."""

import ctypes
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.common import Row, show
from penstock import native
from penstock.relational._native import _CMatrices, _CRows, _CTyped

_FLOPS = 2e8
"""Floating-point operations of a call, about."""
_WIDTHS, _COUNTS = (16, 32, 64, 128, 256), (16, 64, 256, 2048)


class Typed:
    """``float32`` rows ``[types, rows, width]`` and a square matrix for each type."""

    def __init__(self, width: int, count: int):
        num_types = max(1, round(_FLOPS / (2 * count * width * width)))
        self.left, self.right = torch.randn(num_types, count, width), torch.randn(num_types, count, width)
        self.matrices = torch.randn(num_types, width, width)
        self.products, self.sums = torch.empty_like(self.left), torch.empty_like(self.matrices)
        self.flops = 2 * num_types * count * width * width
        self._segments = torch.arange(num_types + 1) * count
        self._typed = _CTyped(num_types, 1, width, width, 4, self._segments.data_ptr())
        self._rows = [_CRows(rows.data_ptr(), None, width, 0) for rows in (self.left, self.right)]
        self._matrices = [_CMatrices(self.matrices.data_ptr(), 0, width * width, is_turned) for is_turned in (0, 1)]
        library = native.load("relational", openmp=True)
        assert library is not None, "this needs a C compiler"
        self._library = library

    def multiply(self, *, transposed: bool = False) -> torch.Tensor:
        """Return the product of each row with the matrix of its type, by our loops."""
        self._library.penstock_typed_matmul(
            ctypes.byref(self._typed), ctypes.byref(self._rows[0]), ctypes.byref(self._matrices[transposed]), None,
            ctypes.c_void_p(self.products.data_ptr()), ctypes.c_int64(torch.get_num_threads()),
        )  # fmt: skip
        return self.products

    def sum_outer(self) -> torch.Tensor:
        """Return for each type the sum of its outer products, by our loops."""
        self._library.penstock_typed_outer(
            ctypes.byref(self._typed), ctypes.byref(self._rows[0]), ctypes.byref(self._rows[1]),
            ctypes.c_void_p(self.sums.data_ptr()), ctypes.c_int64(torch.get_num_threads()),
        )  # fmt: skip
        return self.sums

    def calls(self) -> dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]]:
        """Return our call and PyTorch's, of each kind of product."""
        turned = self.left.transpose(1, 2)
        return {
            "product": (self.multiply, lambda: torch.bmm(self.left, self.matrices, out=self.products)),
            "transposed": (
                lambda: self.multiply(transposed=True),
                lambda: torch.bmm(self.left, self.matrices.transpose(1, 2), out=self.products),
            ),
            "outer": (self.sum_outer, lambda: torch.bmm(turned, self.right, out=self.sums)),
        }


def products(rows: list[Row], rounds: int, *, is_quick: bool) -> None:
    """Measure ours and PyTorch's in turn, for matrices of several widths and numbers of rows of each type."""
    lines = []
    for width in (16,) if is_quick else _WIDTHS:
        for count in (16,) if is_quick else _COUNTS:
            name, cells = f"products {width} x {width}, {count} rows", []
            typed = Typed(width, count)
            for kind, calls in typed.calls().items():
                rates = [typed.flops / seconds / 1e9 for seconds in medians(calls, 5 * rounds)]
                ratio = rates[0] / rates[1]
                rows.append(Row(name=name, metric=kind, value=rates[0], unit="GFLOP/s"))
                rows.append(Row(name=name, metric=f"{kind}, of PyTorch's", value=ratio, unit="", ratio=ratio))
                cells += [f"{rates[0]:.0f}", f"{rates[1]:.0f}", f"{ratio:.2f}"]
            lines.append([name, *cells])
    header = ["GFLOP/s", "product", "PyTorch", "", "transposed", "PyTorch", "", "outer", "PyTorch", ""]
    show("products of rows with the matrix of their type", header, lines)


def best_rate() -> float:
    """Return floating-point operations per second of our products of large blocks."""
    typed = Typed(128, 2048)
    taken = []
    for _ in range(20):
        start_s = time.perf_counter()
        typed.multiply()
        taken.append(time.perf_counter() - start_s)
    return typed.flops / min(taken)


def medians(calls: tuple[Callable[[], torch.Tensor], ...], rounds: int) -> list[float]:
    """Return each call's median seconds; they take turns."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, seconds in zip(calls, taken, strict=True):
            start_s = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start_s)
    return [median(seconds[1:]) for seconds in taken]
