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
NUM_TOGETHER = 32
"""Operators of a step: most of what a capture takes is the same for one and for many."""

BREAKS_THE_GRAPH = {
    "bernoulli",
    "combinations",
    "corrcoef",
    "cov",
    "linalg.lstsq",
    "linalg.lstsq.grad_oriented",
    "masked_select",
    "nn.functional.alpha_dropout",
    "nn.functional.ctc_loss",
    "nn.functional.dropout",
    "nn.functional.dropout2d",
    "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout.with_train",
    "nn.functional.feature_alpha_dropout.without_train",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d",
    "nn.functional.gaussian_nll_loss",
    "nn.functional.multi_head_attention_forward",
    "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention",
    "normal",
    "normal.number_mean",
    "pca_lowrank",
    "svd_lowrank",
    "tensor_split",
}
"""Most by the seed that the database sets for them. Each is a step of its own: those beside it would be tried again."""

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
        f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name: info
        for info in op_db
        if info.supports_autograd and torch.float32 in info.supported_dtypes("cpu")
    }


def replaced_elsewhere():
    """What another test's import replaced in eager PyTorch too: PyG's ``index_select`` refuses scalars."""
    return {"index_select"} if torch.index_select.__module__.startswith("torch_geometric") else set()


def same(left, right):
    if left is None or right is None:
        return left is right
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    left, right = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (left, right))
    return torch.equal(torch.nan_to_num(left.float()), torch.nan_to_num(right.float()))


def fresh(leaves):
    return [
        leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]


def run(step, leaves):
    torch.manual_seed(1)
    results = [result for result in pytree.tree_leaves(step(*leaves)) if isinstance(result, torch.Tensor)]
    ends = [result for result in results if result.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    return [*(result.detach() for result in results), *(leaf.grad for leaf in leaves if isinstance(leaf, torch.Tensor))]


class Call:
    """An operator and a sample of what it takes, called by source of its own: Dynamo follows what it calls, no more."""

    def __init__(self, name, operator, sample):
        self.name, self.leaves, values = name, [], {"operator": operator.op, "end": sample.output_process_fn_grad}

        def source(value):
            if isinstance(value, torch.Tensor):
                self.leaves.append(value)
                return f"leaves[{len(self.leaves) - 1}]"
            if type(value) in (list, tuple):
                return f"{type(value).__name__}(({''.join(source(part) + ', ' for part in value)}))"
            values[f"value_{len(values)}"] = value
            return f"value_{len(values) - 1}"

        arguments = [source(value) for value in (sample.input, *sample.args)]
        arguments += [f"{key}={source(value)}" for key, value in sample.kwargs.items()]
        result = f"operator({', '.join(arguments)})"
        exec(f"def call(leaves): return {f'end({result})' if sample.output_process_fn_grad else result}", values)
        self.call = values["call"]

    def repeats_itself(self):
        step = lambda *leaves: self.call(leaves)  # noqa: E731
        return all(map(same, run(step, fresh(self.leaves)), run(step, fresh(self.leaves))))


def check(calls):
    """A step of ``calls``, captured, gives what it gives eagerly."""
    leaves = [leaf for call in calls for leaf in call.leaves]
    ends = list(itertools.accumulate(len(call.leaves) for call in calls))
    parts = [(call.call, end - len(call.leaves), end) for call, end in zip(calls, ends, strict=True)]

    def step(*leaves):
        return [call(leaves[start:end]) for call, start, end in parts]

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
    alone = [[call] for call in calls if call.name in BREAKS_THE_GRAPH]
    together = [call for call in calls if call.name not in BREAKS_THE_GRAPH]
    for step in (*alone, *(together[begin : begin + NUM_TOGETHER] for begin in range(0, len(together), NUM_TOGETHER))):
        failed |= differing(step)
    assert not failed
