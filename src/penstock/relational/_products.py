"""The structures and functions of `native/relational.c` for products of rows with the matrix of their type."""

import ctypes
from collections.abc import Sequence

import torch

from penstock import native
from penstock.storages import address


class CRows(ctypes.Structure):
    """Rows ``[.., heads or 1, width]``, and which of them are meant."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class CTyped(ctypes.Structure):
    """Sizes of products whose rows lie type by type."""

    _fields_ = (
        ("num_types", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("outer", ctypes.c_int64),
        ("element_bytes", ctypes.c_int64),
        ("segments", ctypes.c_void_p),
    )


class CMaps(ctypes.Structure):
    """A linear map for each type, of rows to several tables, and the gradients of these."""

    _fields_ = (
        ("typed", CTyped),
        ("num_parts", ctypes.c_int64),
        ("gradients", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("of_x", ctypes.c_void_p),
    )


class CMatrices(ctypes.Structure):
    """Matrices ``[types, heads or 1, inner, outer]``, and rows that are added to products."""

    _fields_ = (
        ("matrices", ctypes.c_void_p),
        ("head_stride", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("transposed", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("bias_stride", ctypes.c_int64),
    )


def library() -> ctypes.CDLL | None:
    """Return the compiled functions; ``None`` on a machine that has none."""
    return native.load("relational", openmp=True)


class Typed:
    """Rows of equal width that lie type by type, ``segments`` (``int64 [types + 1]``): products with one head."""

    def __init__(self, segments: torch.Tensor, dtype: torch.dtype, num_threads: int):
        self._segments, self._dtype, self._num_threads = segments, dtype, num_threads
        compiled = library()
        assert compiled is not None, "callers ask library() first"
        self._library = compiled

    def multiply(
        self,
        left: torch.Tensor,
        matrices: torch.Tensor,
        results: torch.Tensor,
        *,
        transposed: bool,
        bias: torch.Tensor | None = None,
        adds: bool = False,
    ) -> None:
        """Write the product of each row with the matrix of its type, plus ``bias``, or add it to what is there.

        ``left [rows, inner]`` and ``results [rows, outer]`` are contiguous; ``matrices [types, inner, outer]``
        (``[types, outer, inner]`` if ``transposed``) and ``bias [types, outer]`` are in each type.
        """
        typed = self._sizes(left.shape[1], results.shape[1])
        rows = CRows(address(left), None, left.shape[1], 0)
        right = CMatrices(address(matrices), 0, matrices.stride(0), transposed)
        if bias is not None:
            right.bias, right.bias_stride = address(bias), bias.stride(0)
        status = self._library.penstock_typed_matmul(
            ctypes.byref(typed), ctypes.byref(rows), ctypes.byref(right), None, ctypes.c_void_p(address(results)),
            ctypes.c_int64(adds), ctypes.c_int64(self._num_threads),
        )  # fmt: skip
        check(status)

    def differentiate(
        self, gradients: Sequence[torch.Tensor], x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of ``x``, ``weight`` and bias from those of each part, ``[rows, outer]``.

        ``x [rows, inner]`` is contiguous, as are ``gradients``, and ``weight [types, parts * outer, inner]``.
        """
        of_x, of_weight, of_bias = torch.empty_like(x), torch.empty_like(weight), weight.new_empty(weight.shape[:2])
        addresses = (ctypes.c_void_p * len(gradients))(*(address(gradient) for gradient in gradients))
        maps = CMaps(
            self._sizes(x.shape[1], gradients[0].shape[1]), len(gradients), ctypes.addressof(addresses), address(x),
            address(weight), address(of_x),
        )  # fmt: skip
        results = (ctypes.c_void_p(address(tensor)) for tensor in (of_weight, of_bias))
        check(
            self._library.penstock_differentiate_maps(ctypes.byref(maps), *results, ctypes.c_int64(self._num_threads))
        )
        return of_x, of_weight, of_bias

    def sum_outer(self, left: torch.Tensor, right: torch.Tensor, results: torch.Tensor) -> None:
        """Write for each type the sum of its rows' outer products, ``[types, inner, outer]``; all are contiguous."""
        typed = self._sizes(left.shape[1], right.shape[1])
        rows = [CRows(address(side), None, side.shape[1], 0) for side in (left, right)]
        status = self._library.penstock_typed_outer(
            ctypes.byref(typed), ctypes.byref(rows[0]), ctypes.byref(rows[1]), ctypes.c_void_p(address(results)),
            ctypes.c_int64(self._num_threads),
        )  # fmt: skip
        check(status)

    def _sizes(self, inner: int, outer: int) -> CTyped:
        return CTyped(len(self._segments) - 1, 1, inner, outer, self._dtype.itemsize, address(self._segments))


def check(status: int) -> None:
    """Raise ``MemoryError`` if a function of `native/relational.c` did not succeed."""
    if status:
        raise MemoryError("not enough memory for the partial sums of a relational layer")
