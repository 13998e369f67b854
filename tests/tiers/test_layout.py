"""Layouts of tensors over their storages: every dtype and every view comes back."""

import pytest
import torch
from parking import plain, random_bytes

from penstock.tiers import ViewLayout

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(waterfall, dtype):
    tensor = random_bytes(48_000).fill_(1).view(dtype) if dtype is torch.bool else random_bytes(48_000).view(dtype)
    expected = plain(tensor.untyped_storage())
    layout = ViewLayout.of(tensor)
    handle = waterfall.park(tensor.untyped_storage())
    shape = tensor.shape
    del tensor
    waterfall.drain()
    rebuilt = layout.rebuild(handle.get())
    assert (rebuilt.dtype, rebuilt.shape) == (dtype, shape)
    assert plain(rebuilt.untyped_storage()) == expected


VIEWS = {
    "whole": lambda base: base,
    "offset": lambda base: base[7:],
    "transposed": lambda base: base.view(20, 50, 3).permute(2, 0, 1),
    "strided": lambda base: base[1::7],
    "expanded": lambda base: base[3:4].expand(9),
    "expanded inside": lambda base: base[:12].view(3, 1, 4).expand(3, 5, 4),
    "scalar": lambda base: base[11],
    "empty": lambda base: base[5:5],
    "overlapping": lambda base: base.unfold(0, 8, 2),
    "conjugated": lambda base: base.conj(),
    "conjugated twice": lambda base: base.conj().T.conj() if base.dim() == 2 else base.conj().conj(),
    "imaginary part of a conjugate": lambda base: base.conj().imag,
    "real part": lambda base: base.real[2:],
}


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_comes_back(waterfall, name):
    base = torch.randn(3000, dtype=torch.complex64)
    view = VIEWS[name](base)
    expected = view.resolve_conj().resolve_neg().clone()
    facts = (view.dtype, view.shape, view.stride(), view.storage_offset(), view.is_conj(), view.is_neg())
    layout = ViewLayout.of(view)
    handle = waterfall.park(view.untyped_storage())
    del base, view
    waterfall.drain()
    rebuilt = layout.rebuild(handle.get())
    assert facts == (
        rebuilt.dtype, rebuilt.shape, rebuilt.stride(), rebuilt.storage_offset(), rebuilt.is_conj(), rebuilt.is_neg()
    )  # fmt: skip
    assert torch.equal(rebuilt, expected)
    assert not rebuilt.requires_grad
