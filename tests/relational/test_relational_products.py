"""Products of rows with the matrix of their type, and sums of outer products, as the compiled layers call them."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import native
from penstock.relational._products import CMatrices, CRows, CTyped, Typed

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C compiler")
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-13}


@pytest.fixture(scope="module")
def library():
    return native.load("relational", openmp=True)


def rows_of(tensor, index):
    """Rows ``[n, heads or 1, width]``, looked up by ``index``."""
    stride = tensor[0].numel() if len(tensor) else 0
    head = tensor.shape[2] if tensor.shape[1] > 1 else 0
    return CRows(tensor.data_ptr(), None if index is None else index.data_ptr(), stride, head)


def typed_of(counts, heads, inner, outer, dtype):
    segments = torch.tensor([0, *counts]).cumsum(0)
    typed = CTyped(len(counts), heads, inner, outer, dtype.itemsize, segments.data_ptr())
    typed.keeps = segments
    return typed


def products(library, left, index, matrices, counts, places, *, transposed, num_threads):
    heads, inner, outer = matrices.shape[1], left.shape[2], matrices.shape[2 if transposed else 3]
    typed = typed_of(counts, heads, inner, outer, left.dtype)
    own = inner * outer if heads > 1 else 0
    right = CMatrices(matrices.data_ptr(), own, heads * inner * outer, transposed)
    results = torch.full((sum(counts), heads, outer), torch.nan, dtype=left.dtype)
    rows = rows_of(left, index)
    status = library.penstock_typed_matmul(
        ctypes.byref(typed), ctypes.byref(rows), ctypes.byref(right),
        ctypes.c_void_p(None if places is None else places.data_ptr()), ctypes.c_void_p(results.data_ptr()),
        ctypes.c_int64(0), ctypes.c_int64(num_threads),
    )  # fmt: skip
    assert status == 0
    return results


SIZES = st.integers(1, 40)


@settings(deadline=None, max_examples=150)
@given(
    counts=st.lists(st.sampled_from([0, 1, 3, 9, 30, 300]), min_size=1, max_size=4),
    heads=st.sampled_from([1, 1, 3]), inner=SIZES, outer=SIZES, dtype=st.sampled_from(list(BOUNDS)),
    transposed=st.booleans(), is_shared=st.booleans(), is_looked_up=st.booleans(), is_placed=st.booleans(),
    num_threads=st.integers(1, 2), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_products_of_any_size(
    library, counts, heads, inner, outer, dtype, transposed, is_shared, is_looked_up, is_placed, num_threads, seed
):
    generator = torch.Generator().manual_seed(seed)
    count = sum(counts)
    num_rows = 17 if is_looked_up else max(1, count)
    left = torch.randn(num_rows, 1 if is_shared else heads, inner, generator=generator, dtype=dtype)
    index = torch.randint(num_rows, (count,), generator=generator, dtype=torch.int32) if is_looked_up else None
    shape = (len(counts), heads, outer, inner) if transposed else (len(counts), heads, inner, outer)
    matrices = torch.randn(shape, generator=generator, dtype=dtype)
    places = torch.randperm(count, generator=generator).to(torch.int32) if is_placed else None
    results = products(library, left, index, matrices, counts, places, transposed=transposed, num_threads=num_threads)
    right = matrices.double().transpose(2, 3) if transposed else matrices.double()
    chosen = left[:count] if index is None else left[index.long()]
    types = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    expected = torch.einsum("nhi,nhio->nho", chosen.double().expand(-1, heads, -1), right[types])
    computed = results if places is None else results[places.long()]
    assert torch.allclose(computed.double(), expected, rtol=BOUNDS[dtype], atol=10 * BOUNDS[dtype])


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("outer", [64, 45])
def test_a_row_does_not_depend_on_those_beside_it(library, dtype, outer):
    """So results are equal to the bit however rows are divided among blocks, threads, and the parts of a graph."""
    left, matrices = torch.randn(531, 1, 37, dtype=dtype), torch.randn(1, 1, 37, outer, dtype=dtype)
    whole = products(library, left, None, matrices, [531], None, transposed=False, num_threads=2)
    for first, last in ((0, 1), (3, 10), (250, 531)):
        part = products(
            library, left[first:last], None, matrices, [last - first], None, transposed=False, num_threads=1
        )
        assert torch.equal(part, whole[first:last])


@settings(deadline=None, max_examples=100)
@given(
    counts=st.lists(st.sampled_from([0, 1, 7, 64, 65, 300, 2500]), min_size=1, max_size=3),
    heads=st.sampled_from([1, 3]), inner=SIZES, outer=SIZES, dtype=st.sampled_from(list(BOUNDS)),
    num_threads=st.integers(1, 2), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_outer_products_of_any_size(library, counts, heads, inner, outer, dtype, num_threads, seed):
    generator = torch.Generator().manual_seed(seed)
    count = sum(counts)
    left = torch.randn(max(1, count), heads, inner, generator=generator, dtype=dtype)
    right = torch.randn(max(1, count), heads, outer, generator=generator, dtype=dtype)
    results = torch.full((len(counts), heads, inner, outer), torch.nan, dtype=dtype)
    typed = typed_of(counts, heads, inner, outer, dtype)
    rows = rows_of(left, None), rows_of(right, None)
    status = library.penstock_typed_outer(
        ctypes.byref(typed), ctypes.byref(rows[0]), ctypes.byref(rows[1]), ctypes.c_void_p(results.data_ptr()),
        ctypes.c_int64(num_threads),
    )  # fmt: skip
    assert status == 0
    start = 0
    for number, size in enumerate(counts):
        part = slice(start, start := start + size)
        expected = torch.einsum("nhi,nho->hio", left[part].double(), right[part].double())
        bound = BOUNDS[dtype] * max(1, size) ** 0.5
        assert torch.allclose(results[number].double(), expected, rtol=BOUNDS[dtype], atol=10 * bound)


@pytest.mark.parametrize("transposed", [True, False])
def test_bias_and_addition(transposed):
    counts, x = [5, 0, 12], torch.randn(17, 6)
    matrices, bias = torch.randn(3, 6, 6), torch.randn(3, 6)
    typed = Typed(torch.tensor([0, *counts]).cumsum(0), torch.float32, 2)
    results = torch.full((17, 6), torch.nan)
    typed.multiply(x, matrices, results, transposed=transposed, bias=bias)
    right = matrices.transpose(1, 2) if transposed else matrices
    types = torch.arange(3).repeat_interleave(torch.tensor(counts))
    product = torch.einsum("ni,nio->no", x, right[types])
    assert torch.allclose(results, product + bias[types], atol=1e-5)
    typed.multiply(x, matrices, results, transposed=transposed, adds=True)
    assert torch.allclose(results, 2 * product + bias[types], atol=1e-5)
