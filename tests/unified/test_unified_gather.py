"""Rows of tables in host memory are gathered as plain indexing gives them, widened, scaled and in order."""

import pytest
import torch
from torch.nn import functional
from unified_cases import table

from penstock import unified
from penstock.unified._gather import in_order
from penstock.unified._rows import RowType

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool,
    torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_tables_that_are_not_contiguous(either, dtype):
    plain = table(20, 12, dtype)
    index = torch.tensor([[3, -1], [0, 19]])
    for view in (plain[:, 2:7], plain[::3], plain.t(), plain[:, ::2], plain[5:].view(-1, 4, 3).transpose(1, 2)):
        assert torch.equal(unified.wrap(view)[index % len(view)], view[index % len(view)])


@pytest.mark.parametrize("index", [[20], [-21], [0, 1, 10**12]])
def test_rows_that_are_not_there(either, index):
    wrapped = unified.wrap(table())
    with pytest.raises(IndexError, match=f"index {index[-1]} at position {len(index) - 1} is out of range.*20 rows"):
        wrapped[torch.tensor(index)]
    with pytest.raises(IndexError):
        wrapped.index_select(0, torch.tensor([-1]))  # as of a plain tensor: only [] counts from the end
    with pytest.raises(IndexError):
        functional.embedding(torch.tensor([-1]), wrapped)


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_rows_widened_while_they_are_read(either, stored, sort):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(stored).view(-1, 64)
    index = torch.randint(-len(every), len(every), (3, 700))
    widened = unified.gather(unified.wrap(every), index, dtype=torch.float32, sort=sort)
    assert torch.equal(widened.view(torch.int32), every[index].float().view(torch.int32)) or torch.equal(
        widened.nan_to_num(7.0), every[index].float().nan_to_num(7.0)
    )
    assert torch.equal(unified.gather(every, index, sort=sort).view(torch.int16), every[index].view(torch.int16))


def test_int8_with_a_scale(either):
    plain, index = torch.randint(-128, 128, (50, 7)).to(torch.int8), torch.tensor([4, -1])
    for scale in (0.5, torch.rand(7)):
        expected = plain[index].float() * scale
        assert torch.equal(unified.gather(plain, index, scale=scale), expected)
    with pytest.raises(ValueError, match="int8 needs a scale"):
        unified.gather(plain, index, dtype=torch.float32)
    with pytest.raises(ValueError, match="cannot be read as torch.float64"):
        unified.gather(plain.half(), index, dtype=torch.float64)
    with pytest.raises(ValueError, match="one number or 7"):
        unified.gather(plain, index, scale=torch.rand(3))


@pytest.mark.parametrize(
    ("width", "num_rows", "is_sorted"), [(4, 20_000, True), (4, 2000, False), (600, 20_000, False)]
)
def test_many_short_rows_are_read_as_they_lie(width, num_rows, is_sorted):
    plain, index = torch.zeros(100, width), torch.randint(100, (num_rows,))
    kind = RowType((width,), torch.float32, torch.float32)
    for places in (None, torch.randperm(num_rows)):
        rows, positions = in_order(plain, index, places, kind)
        back = torch.empty_like(index)
        back[torch.arange(num_rows) if positions is None else positions] = rows
        expected = index if places is None else torch.empty_like(index).index_copy_(0, places, index)
        assert torch.equal(back, expected)
        assert torch.equal(rows, index.sort().values) is is_sorted
