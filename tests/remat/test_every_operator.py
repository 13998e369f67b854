"""Every operator that PyTorch's own database lists for training: captured and eager give the same bits.

One sample of each here; all of them with ``PENSTOCK_SAMPLES=1000 pytest tests/remat/test_every_operator.py``.
"""

import functools
import os
import warnings

import pytest
import torch
from torch.utils import _pytree as pytree

from penstock import remat
from penstock.errors import GraphBreakWarning

NUM_SAMPLES = int(os.environ.get("PENSTOCK_SAMPLES", "1"))
NUM_PARTS = 8

NOT_STRIDED = {"sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse"}
"""Not for tensors with strides."""
NOT_EQUAL = {"masked.cumprod"} if torch.__version__.startswith("2.11.") else set()
"""What PyTorch computes another way when it may not look at the numbers."""


@functools.cache
def operators():
    """By name. What is imported here takes seconds, which a worker without these tests need not spend."""
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        f"{one.name}.{one.variant_test_name}" if one.variant_test_name else one.name: one
        for one in op_db
        if one.supports_autograd and torch.float32 in one.supported_dtypes("cpu")
    }


def replaced_elsewhere():
    """What another test's import replaced in eager PyTorch too: PyG's ``index_select`` refuses scalars."""
    return {"index_select"} if torch.index_select.__module__.startswith("torch_geometric") else set()


def same(one, two):
    if one is None or two is None:
        return one is two
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    one, two = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (one, two))
    return torch.equal(torch.nan_to_num(one.float()), torch.nan_to_num(two.float()))


def fresh(leaves):
    return [
        one.detach().clone().requires_grad_(one.requires_grad) if isinstance(one, torch.Tensor) else one
        for one in leaves
    ]


def run(step, leaves):
    torch.manual_seed(1)
    results = [one for one in pytree.tree_leaves(step(*leaves)) if isinstance(one, torch.Tensor)]
    ends = [one for one in results if one.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(one) for one in ends])
    return [*(one.detach() for one in results), *(one.grad for one in leaves if isinstance(one, torch.Tensor))]


def check(operator, sample):
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))

    def step(*leaves):
        given, arguments, keywords = pytree.tree_unflatten(list(leaves), spec)
        result = operator.op(given, *arguments, **keywords)
        return sample.output_process_fn_grad(result) if sample.output_process_fn_grad else result

    expected, again = run(step, fresh(leaves)), run(step, fresh(leaves))
    if not all(map(same, expected, again)):
        return  # eager PyTorch does not repeat itself
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphBreakWarning)
        ours = run(remat.optimize(step, fresh(leaves), None), fresh(leaves))
    assert all(map(same, expected, ours))


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.filterwarnings("ignore")
def test_captured_operators_give_eager_pytorchs_bits(part):
    failed = {}
    for name, operator in list(operators().items())[part::NUM_PARTS]:
        if name in NOT_STRIDED | NOT_EQUAL | replaced_elsewhere():
            continue
        for number, sample in enumerate(operator.sample_inputs("cpu", torch.float32, requires_grad=True)):
            if number >= NUM_SAMPLES:
                break
            try:
                check(operator, sample)
            except Exception as error:  # whatever an operator may raise
                failed[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    assert not failed
