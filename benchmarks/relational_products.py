"""The rate of our products of rows with the matrix of their type, beside PyTorch's batched products of the same."""

from collections.abc import Callable
from statistics import median

import torch

from benchmarks.common import Row, show
from penstock.probe import in_rounds
from penstock.relational._products import Typed

_FLOPS = 2e8
"""Floating-point operations of a call, about."""
_WIDTHS, _COUNTS = (16, 32, 64, 128, 256), (16, 64, 256, 2048)


class Products:
    """``float32`` rows ``[types * rows, width]``, and a square matrix for each type."""

    def __init__(self, width: int, count: int):
        num_types = max(1, round(_FLOPS / (2 * count * width * width)))
        self.left, self.right = torch.randn(num_types * count, width), torch.randn(num_types * count, width)
        self.matrices = torch.randn(num_types, width, width)
        self.products, self.sums = torch.empty_like(self.left), torch.empty_like(self.matrices)
        self.flops = 2 * num_types * count * width * width
        self._typed = Typed(torch.arange(num_types + 1) * count, torch.float32, torch.get_num_threads())

    def multiply(self, *, transposed: bool = False) -> None:
        """Compute the product of each row with the matrix of its type, by our loops."""
        self._typed.multiply(self.left, self.matrices, self.products, transposed=transposed)

    def calls(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """Return our call and PyTorch's, of each kind of product."""
        shape = (len(self.matrices), -1, self.matrices.shape[1])
        left, right, into = (rows.view(shape) for rows in (self.left, self.right, self.products))
        return {
            "product": (self.multiply, lambda: torch.bmm(left, self.matrices, out=into)),
            "transposed": (
                lambda: self.multiply(transposed=True),
                lambda: torch.bmm(left, self.matrices.transpose(1, 2), out=into),
            ),
            "outer": (
                lambda: self._typed.sum_outer(self.left, self.right, self.sums),
                lambda: torch.bmm(left.transpose(1, 2), right, out=self.sums),
            ),
        }


def products(rows: list[Row], rounds: int, *, is_quick: bool) -> None:
    """Measure ours and PyTorch's in turn, for matrices of several widths and numbers of rows of each type."""
    lines = []
    for width in (16,) if is_quick else _WIDTHS:
        for count in (16,) if is_quick else _COUNTS:
            name, cells = f"products {width} x {width}, {count} rows", []
            measured = Products(width, count)
            for kind, calls in measured.calls().items():
                taken = in_rounds(dict(zip(("ours", "PyTorch's"), calls, strict=True)), rounds=5 * rounds, device="cpu")
                rates = [measured.flops / median(seconds) / 1e9 for seconds in taken.values()]
                ratio = rates[0] / rates[1]
                rows.append(Row(name=name, metric=kind, value=rates[0], unit="GFLOP/s"))
                rows.append(Row(name=name, metric=f"{kind}, of PyTorch's", value=ratio, unit="", ratio=ratio))
                cells += [f"{rates[0]:.0f}", f"{rates[1]:.0f}", f"{ratio:.2f}"]
            lines.append([name, *cells])
    header = ["GFLOP/s", "product", "PyTorch", "", "transposed", "PyTorch", "", "outer", "PyTorch", ""]
    show("products of rows with the matrix of their type", header, lines)


def best_rate() -> float:
    """Return floating-point operations per second of our products of large blocks."""
    large = Products(128, 2048)
    (seconds,) = in_rounds({"ours": large.multiply}, rounds=20, device="cpu").values()
    return large.flops / min(seconds)
