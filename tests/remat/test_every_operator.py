"""Every operator that PyTorch's own database lists for training: captured and eager give the same bits.

One sample of each here; all of them with ``PENSTOCK_SAMPLES=1000 pytest tests/remat/test_every_operator.py``.
"""

import functools
import itertools
import os
import warnings

import pytest
import torch
from torch.utils import _pytree as pytree

from penstock import remat
from penstock.errors import GraphBreakWarning

NUM_SAMPLES = int(os.environ.get("PENSTOCK_SAMPLES", "1"))
NUM_PARTS = 8
NUM_TOGETHER = 8
"""Operators of a step: most of what a capture takes is the same for one and for many."""

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


class Call:
    """An operator and a sample of what it takes."""

    def __init__(self, name, operator, sample):
        self.name, self.operator, self.sample = name, operator, sample
        self.leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))

    def __call__(self, leaves):
        given, arguments, keywords = pytree.tree_unflatten(list(leaves), self.spec)
        result = self.operator.op(given, *arguments, **keywords)
        return self.sample.output_process_fn_grad(result) if self.sample.output_process_fn_grad else result

    def repeats_itself(self):
        step = lambda *leaves: self(leaves)  # noqa: E731
        return all(map(same, run(step, fresh(self.leaves)), run(step, fresh(self.leaves))))


def check(calls):
    """A step of ``calls``, captured, gives what it gives eagerly."""
    leaves = [leaf for call in calls for leaf in call.leaves]

    def step(*leaves):
        results, start = [], 0
        for call in calls:
            results.append(call(leaves[start : start + len(call.leaves)]))
            start += len(call.leaves)
        return results

    expected = run(step, fresh(leaves))
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # behind a break others might go by unseen: each alone is tried
        warnings.simplefilter("ignore" if len(calls) == 1 else "error", GraphBreakWarning)
        ours = run(remat.optimize(step, fresh(leaves), None), fresh(leaves))
    assert all(map(same, expected, ours))


def text_of(error):
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def differing(calls):
    """What each operator that fails raises; those of a step that fails are tried alone."""
    try:
        check(calls)
    except Exception as error:  # whatever an operator may raise
        if len(calls) == 1:
            return {calls[0].name: text_of(error)}
        alone = {name: text for call in calls for name, text in differing([call]).items()}
        if not alone and not isinstance(error, GraphBreakWarning):
            return {" beside ".join(call.name for call in calls): text_of(error)}
        return alone
    return {}


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.filterwarnings("ignore")
def test_captured_operators_give_eager_pytorchs_bits(part):
    failed, calls = {}, []
    for name, operator in list(operators().items())[part::NUM_PARTS]:
        if name in NOT_STRIDED | NOT_EQUAL | replaced_elsewhere():
            continue
        for sample in itertools.islice(operator.sample_inputs("cpu", torch.float32, requires_grad=True), NUM_SAMPLES):
            call = Call(name, operator, sample)
            try:
                calls += [call] if call.repeats_itself() else []
            except Exception as error:  # whatever an operator may raise
                failed[name] = text_of(error)
    for start in range(0, len(calls), NUM_TOGETHER):
        failed |= differing(calls[start : start + NUM_TOGETHER])
    assert not failed
