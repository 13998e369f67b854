"""Unified tensors index as plain ones do, run where the rules say, and share their memory."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from unified_cases import table

from penstock import unified
from penstock.unified import _tensor

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool,
    torch.complex64,
]  # fmt: skip
PLACES = [torch.device("cpu"), torch.device("meta")]
"""``meta`` stands for a device: operators run there without one."""


@st.composite
def indexed(draw):
    """A table's shape and type, and an index of any kind."""
    rows, shape = draw(st.integers(0, 12)), draw(st.sampled_from([(), (1,), (3,), (2, 4), (0,), (33,)]))
    numbers = st.integers(-rows - (rows == 0), rows - 1 if rows else 0)
    kind = draw(
        st.sampled_from(["tensor", "int32", "matrix", "slice", "mask", "list", "int", "pair", "ellipsis", "none"])
    )
    many = draw(st.lists(numbers, max_size=8 if rows else 0))
    index = {
        "tensor": lambda: torch.tensor(many, dtype=torch.int64),
        "int32": lambda: torch.tensor(many, dtype=torch.int32),
        "matrix": lambda: torch.tensor([many, many], dtype=torch.int64),
        "slice": lambda: slice(draw(st.none() | numbers), draw(st.none() | numbers), draw(st.integers(1, 3))),
        "mask": lambda: torch.tensor(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), dtype=torch.bool),
        "list": lambda: many,
        "int": lambda: draw(numbers),
        "pair": lambda: (torch.tensor(many, dtype=torch.int64), slice(0, 1)),
        "ellipsis": lambda: (Ellipsis, slice(0, 2)),
        "none": lambda: (None, torch.tensor(many, dtype=torch.int64)),
    }[kind]()
    return rows, shape, draw(st.sampled_from(DTYPES)), index


def outcome(call):
    """What it gives, or the kind of its error."""
    try:
        return call()
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        return IndexError if isinstance(error, IndexError) else type(error)


@given(indexed(), st.sampled_from(["device", "host"]))
@settings(max_examples=300, deadline=None)
def test_every_index_gives_what_it_gives_on_a_plain_tensor(case, prefer):
    rows, shape, dtype, index = case
    plain = torch.randint(-50, 50, (rows, *shape)).to(dtype)
    expected = outcome(lambda: plain[index])
    result = outcome(lambda: unified.wrap(plain.clone(), prefer=prefer)[index])
    if isinstance(expected, torch.Tensor):
        assert result.dtype is dtype
        assert torch.equal(result.cpu(), expected)
    else:
        assert result is expected


def test_functions_of_rows():
    plain, index = table(), torch.tensor([[1, 1], [3, 19]])
    wrapped = unified.wrap(plain)
    assert torch.equal(functional.embedding(index, wrapped), plain[index])
    assert torch.equal(wrapped.index_select(0, index[0]), plain[index[0]])
    assert torch.equal(wrapped.index_select(1, index[0]), plain.index_select(1, index[0]))
    assert torch.equal(torch.index_select(wrapped, -2, index[1]), plain[index[1]])
    bags = functional.embedding_bag(index, wrapped, mode="sum")
    assert torch.equal(bags, functional.embedding_bag(index, plain, mode="sum"))
    assert torch.equal(torch.take_along_dim(wrapped, index[:, :1], 0), torch.take_along_dim(plain, index[:, :1], 0))


def test_several_unified_operands_follow_the_one_that_prefers_the_device(monkeypatch):
    monkeypatch.setattr(_tensor, "_device", lambda: torch.device("meta"))
    device, host = unified.wrap(table()), unified.wrap(table(), prefer="host")
    assert (host + host).device.type == "cpu"
    assert (host + device).device.type == "meta"
    assert host[torch.tensor([1])].device.type == "cpu"
    assert device[torch.tensor([1])].device.type == "cpu"  # the index is in host memory
    assert device[torch.tensor([1], device="meta")].device.type == "meta"
    assert device[:, 0].sum().device.type == "meta"


def test_without_a_device_all_runs_on_the_cpu():
    wrapped = unified.wrap(table())
    assert (wrapped * 2).device.type == "cpu"
    assert not wrapped.is_registered or torch.cuda.is_available()


def test_views_are_unified_and_share_memory():
    plain = table()
    wrapped = unified.wrap(plain)
    for view in (
        wrapped[2:4],
        wrapped[3],
        wrapped.view(5, 20),
        wrapped.t(),
        wrapped.detach(),
        wrapped[:, 1:],
        wrapped.unsqueeze(0),
    ):
        assert unified.is_unified(view)
    wrapped[2:4] = 7
    assert (plain[2:4] == 7).all()
    plain[0] = 3
    assert (wrapped[0] == 3).all()
    assert not unified.is_unified(wrapped + 1)


def test_writes_go_to_the_memory_that_was_wrapped():
    plain = table()
    expected, wrapped = plain.clone(), unified.wrap(plain)
    index, rows = torch.tensor([3, 5]), torch.full((2, 5), 9.0)
    for tensor in (expected, wrapped):
        tensor.index_copy_(0, index, rows)
        tensor.index_add_(0, index, rows, alpha=2)
        tensor[torch.tensor([7])] = 1
        tensor[tensor[:, 0] > 10] = 0
        tensor.mul_(2)
        tensor[4].fill_(5)
    assert torch.equal(plain, expected)
    assert unified.is_unified(wrapped.add_(1))
    torch.add(wrapped, 1, out=wrapped)
    assert torch.equal(plain, expected + 2)


@pytest.mark.parametrize("sparse", [True, False])
def test_training_a_table_in_host_memory(sparse):
    """Parameters, gradients and an optimizer's state as of a plain table."""

    def train(weight):
        make = torch.optim.SparseAdam if sparse else torch.optim.Adam
        optimizer = make([weight], lr=0.1)
        for step in range(4):
            index = torch.tensor([[1, 2], [2, 7 + step]])
            functional.embedding(index, weight, sparse=sparse).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight, optimizer.state[weight]

    plain = table()
    expected, _ = train(torch.nn.Parameter(plain.clone()))
    trained, state = train(torch.nn.Parameter(unified.wrap(plain)))
    assert isinstance(trained, torch.nn.Parameter) and unified.is_unified(trained)
    assert torch.equal(trained.detach().cpu(), expected.detach())
    assert torch.equal(plain, expected.detach())
    assert unified.is_unified(state["exp_avg"])  # as large as the table, so beside it
    trained.grad = None
    trained[torch.tensor([1, 1])].sum().backward()
    assert trained.grad[1].tolist() == [2.0] * 5


@pytest.mark.parametrize(
    "options", [{}, {"sparse": True}, {"padding_idx": -1}, {"sparse": True, "padding_idx": 2}], ids=str
)
def test_rows_that_a_device_reads_leave_their_gradient_in_host_memory(monkeypatch, options):
    """PyTorch's engine takes none on a device for a leaf of the CPU. Here the device is the CPU under another name."""

    def trained(weight):
        index = torch.tensor([[1, 2], [2, len(weight) - 1]])
        rows = functional.embedding(index, weight, **options), weight.index_select(0, index[0]), weight[index[1]]
        sum(part.sin().sum() for part in rows).backward()
        return rows, weight.grad.to_dense()

    expected = trained(torch.nn.Parameter(table()))
    monkeypatch.setattr(unified._tensor, "_where", lambda *_: torch.device("cpu"))
    weight = torch.nn.Parameter(unified.wrap(table()))
    rows, gradient = trained(weight)
    assert all(torch.equal(result, reference) for result, reference in zip(rows, expected[0], strict=True))
    torch.testing.assert_close(gradient, expected[1], rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match=r"trains only by rows.*table\.cuda\(\)"):
        weight * 2


def test_under_torch_compile():
    wrapped, index = unified.wrap(table()), torch.tensor([1, 3])
    compiled = torch.compile(lambda features, rows, weight: (features[rows] @ weight).relu(), backend="aot_eager")
    weight = torch.randn(5, 2, requires_grad=True)
    result = compiled(wrapped, index, weight)
    torch.testing.assert_close(result, (table()[index] @ weight).relu())
    result.sum().backward()
    assert weight.grad is not None


def test_operands_that_occur_twice():
    """Results are never mistaken for an operand."""
    plain = table()
    wrapped = unified.wrap(plain.clone())
    for function in (torch.add, torch.maximum, torch.mul):
        result = function(wrapped, wrapped)
        assert not unified.is_unified(result) and torch.equal(result, function(plain, plain))
    result = torch.addcmul(wrapped, wrapped, wrapped)
    assert torch.equal(result, torch.addcmul(plain, plain, plain)) and not unified.is_unified(result)
    assert torch.equal(wrapped.cpu(), plain)
    assert torch.add(wrapped, wrapped, out=wrapped) is wrapped and torch.equal(wrapped.cpu(), plain * 2)


def test_shapes_stay():
    wrapped = unified.wrap(table())
    for change in (wrapped.t_, lambda: wrapped.unsqueeze_(0), lambda: wrapped.resize_(3)):
        with pytest.raises(RuntimeError, match="is fixed"):
            change()
    for shape in ((20_000, 5), (2, 5)):
        with pytest.raises(RuntimeError, match="give one of the result's shape"):
            torch.add(torch.ones(shape), 1, out=wrapped)
    with pytest.raises(RuntimeError, match="module.to"):
        wrapped.data = torch.ones(2)
    assert torch.equal(wrapped[torch.tensor([3])], table()[3:4])
    with pytest.raises(ValueError, match="not negative"):
        unified.empty(-1, 3)


def test_gradients_through_rows_and_plain_views():
    weight = torch.nn.Parameter(unified.wrap(table()))
    plain = torch.nn.Parameter(table())
    index = torch.tensor([[1, -1], [1, 3]])
    for parameter in (weight, plain):
        (parameter[index] * torch.arange(20.0).view(2, 2, 5)).sum().backward()
    assert torch.equal(weight.grad, plain.grad)
    weight.grad = None
    (weight.cpu() ** 2).sum().backward()
    assert torch.equal(weight.grad, 2 * table())
    weight.grad = None
    weight[0:2].cpu().sum().backward()
    assert weight.grad[:2].sum() == 10 and weight.grad.sum() == 10
    assert weight.numpy(force=True).shape == (20, 5)
    with torch.no_grad():
        assert not weight[index].requires_grad
    rows = weight[index].sum()
    index.fill_(4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rows.backward()
    assert torch.equal(weight.data.cpu(), table())


def test_copies_keep_what_they_are():
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(unified.wrap(table()))
    again = copy.deepcopy(layer)
    assert isinstance(again.weight, torch.nn.Parameter) and unified.is_unified(again.weight)
    assert dict(again.named_parameters())
    assert copy.copy(layer.weight).cpu().data_ptr() == layer.weight.cpu().data_ptr()
    assert np.array(unified.wrap(table())).shape == (20, 5)
    assert unified.is_unified(torch.full_like(unified.wrap(table()), 3.0))


def test_to_other_forms():
    plain = table()
    wrapped = unified.wrap(plain)
    assert type(wrapped.cpu()) is torch.Tensor and wrapped.cpu().data_ptr() == plain.data_ptr()
    assert wrapped.numpy().ctypes.data == plain.data_ptr()
    assert np.asarray(wrapped).shape == (20, 5)
    assert np.asarray(wrapped, dtype=np.float64).dtype == np.float64
    assert wrapped.tolist() == plain.tolist()
    assert wrapped.to(torch.float64).dtype is torch.float64
    assert "UnifiedTensor(tensor(" in repr(wrapped)
    with pytest.raises(RuntimeError, match="detach"):
        unified.wrap(plain).requires_grad_().numpy()
    copied = copy.deepcopy(wrapped)
    copied[0] = 99
    assert unified.is_unified(copied) and (plain[0] != 99).all()
    assert unified.wrap(wrapped, prefer="host").prefer == "host"


def test_what_cannot_be_wrapped():
    with pytest.raises(TypeError, match=r"from_numpy"):
        unified.wrap([1.0])
    with pytest.raises(TypeError, match="to_dense"):
        unified.wrap(table().to_sparse())
    with pytest.raises(ValueError, match=r"wrap\(tensor.cpu\(\)\)"):
        unified.wrap(torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match="detach"):
        unified.wrap(table().requires_grad_() * 2)
    with pytest.raises(ValueError, match="`prefer` must be 'device' or 'host'"):
        unified.wrap(table(), prefer="cpu")
    with pytest.raises(TypeError, match="rows"):
        unified.gather(table(), torch.ones(3))


def test_shapes_are_whole_numbers():
    for shape in (("",), ("12",), (True,), (-1,), ([1.5],)):
        with pytest.raises((TypeError, ValueError), match="whole numbers that are not negative"):
            unified.empty(*shape)
