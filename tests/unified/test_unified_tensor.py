"""Unified tensors index as plain ones do, run where the rules say, and share their memory."""

import copy
import gc
import itertools
import multiprocessing
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from penstock import tiers, unified
from penstock.devices._cuda import Cuda
from penstock.errors import BudgetError, TierDegradedWarning
from penstock.probe import ledger
from penstock.unified import Operand, _advice, _order, _tensor
from penstock.unified._gather import in_order
from penstock.unified._rows import RowType

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool,
    torch.complex64,
]  # fmt: skip
PLACES = [torch.device("cpu"), torch.device("meta")]
"""``meta`` stands for a device: operators run there without one."""


def table(rows=20, width=5, dtype=torch.float32):
    return torch.randint(-50, 50, (rows, width), generator=torch.Generator().manual_seed(0)).to(dtype)


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
    found = outcome(lambda: unified.wrap(plain.clone(), prefer=prefer)[index])
    if isinstance(expected, torch.Tensor):
        assert found.dtype is dtype
        assert torch.equal(found.cpu(), expected)
    else:
        assert found is expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_tables_that_are_not_contiguous(either, dtype):
    plain = table(20, 12, dtype)
    index = torch.tensor([[3, -1], [0, 19]])
    for view in (plain[:, 2:7], plain[::3], plain.t(), plain[:, ::2], plain[5:].view(-1, 4, 3).transpose(1, 2)):
        assert torch.equal(unified.wrap(view)[index % len(view)], view[index % len(view)])


@pytest.mark.parametrize("index", [[20], [-21], [0, 1, 10**12]])
def test_rows_that_are_not_there(either, index):
    found = unified.wrap(table())
    with pytest.raises(IndexError, match=f"index {index[-1]} at position {len(index) - 1} is out of range.*20 rows"):
        found[torch.tensor(index)]
    with pytest.raises(IndexError):
        found.index_select(0, torch.tensor([-1]))  # as of a plain tensor: only [] counts from the end
    with pytest.raises(IndexError):
        functional.embedding(torch.tensor([-1]), found)


def test_functions_of_rows():
    plain, index = table(), torch.tensor([[1, 1], [3, 19]])
    found = unified.wrap(plain)
    assert torch.equal(functional.embedding(index, found), plain[index])
    assert torch.equal(found.index_select(0, index[0]), plain[index[0]])
    assert torch.equal(found.index_select(1, index[0]), plain.index_select(1, index[0]))
    assert torch.equal(torch.index_select(found, -2, index[1]), plain[index[1]])
    bags = functional.embedding_bag(index, found, mode="sum")
    assert torch.equal(bags, functional.embedding_bag(index, plain, mode="sum"))
    assert torch.equal(torch.take_along_dim(found, index[:, :1], 0), torch.take_along_dim(plain, index[:, :1], 0))


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_rows_widened_while_they_are_read(either, stored, sort):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(stored).view(-1, 64)
    index = torch.randint(-len(every), len(every), (3, 700))
    found = unified.gather(unified.wrap(every), index, dtype=torch.float32, sort=sort)
    assert torch.equal(found.view(torch.int32), every[index].float().view(torch.int32)) or torch.equal(
        found.nan_to_num(7.0), every[index].float().nan_to_num(7.0)
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


CELLS = list(
    itertools.product([None, "device", "host", "scalar"], [None, "device", "host", "scalar"], ["device", "host"])
)


@pytest.mark.parametrize("first, second, prefer", CELLS)
def test_every_cell_of_the_table_of_placement(monkeypatch, first, second, prefer):
    """The rule as a function, and as operators are placed: the ``meta`` device stands for a CUDA one."""
    monkeypatch.setattr(_tensor, "_device", lambda: torch.device("meta"))
    others = [one for one in (first, second) if one]
    kinds = {"device": Operand.DEVICE, "host": Operand.HOST, "scalar": Operand.SCALAR}
    expected = "device" if "device" in others else "host" if "host" in others else prefer
    assert unified.place([kinds[one] for one in others], [prefer]) == expected
    made = {
        "device": torch.ones(5, device="meta"), "host": torch.ones(5), "scalar": torch.tensor(2.0), None: 2.0,
    }  # fmt: skip
    found = unified.wrap(table(), prefer=prefer)
    if {"device", "host"} <= set(others):  # PyTorch's own rule for operands on two devices
        with pytest.raises(RuntimeError, match="device"):
            torch.addcmul(found, made[first], made[second])
        return
    result = torch.addcmul(found, torch.as_tensor(made[first]), torch.as_tensor(made[second]))
    assert result.device.type == {"device": "meta", "host": "cpu"}[expected]
    assert not unified.is_unified(result)


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
    found = unified.wrap(table())
    assert (found * 2).device.type == "cpu"
    assert not found.is_registered or torch.cuda.is_available()


def test_views_are_unified_and_share_memory():
    plain = table()
    found = unified.wrap(plain)
    for view in (found[2:4], found[3], found.view(5, 20), found.t(), found.detach(), found[:, 1:], found.unsqueeze(0)):
        assert unified.is_unified(view)
    found[2:4] = 7
    assert (plain[2:4] == 7).all()
    plain[0] = 3
    assert (found[0] == 3).all()
    assert not unified.is_unified(found + 1)


def test_writes_go_to_the_memory_that_was_wrapped():
    plain = table()
    expected, found = plain.clone(), unified.wrap(plain)
    index, rows = torch.tensor([3, 5]), torch.full((2, 5), 9.0)
    for one in (expected, found):
        one.index_copy_(0, index, rows)
        one.index_add_(0, index, rows, alpha=2)
        one[torch.tensor([7])] = 1
        one[one[:, 0] > 10] = 0
        one.mul_(2)
        one[4].fill_(5)
    assert torch.equal(plain, expected)
    assert unified.is_unified(found.add_(1))
    torch.add(found, 1, out=found)
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
    found, state = train(torch.nn.Parameter(unified.wrap(plain)))
    assert isinstance(found, torch.nn.Parameter) and unified.is_unified(found)
    assert torch.equal(found.detach().cpu(), expected.detach())
    assert torch.equal(plain, expected.detach())
    assert unified.is_unified(state["exp_avg"])  # as large as the table, so beside it
    found.grad = None
    found[torch.tensor([1, 1])].sum().backward()
    assert found.grad[1].tolist() == [2.0] * 5


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
    assert all(torch.equal(one, two) for one, two in zip(rows, expected[0], strict=True))
    torch.testing.assert_close(gradient, expected[1], rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match=r"trains only by rows.*table\.cuda\(\)"):
        weight * 2


def test_under_torch_compile():
    found, index = unified.wrap(table()), torch.tensor([1, 3])
    compiled = torch.compile(lambda features, rows, weight: (features[rows] @ weight).relu(), backend="aot_eager")
    weight = torch.randn(5, 2, requires_grad=True)
    result = compiled(found, index, weight)
    torch.testing.assert_close(result, (table()[index] @ weight).relu())
    result.sum().backward()
    assert weight.grad is not None


def test_operands_that_occur_twice():
    """Results are never mistaken for an operand."""
    plain = table()
    found = unified.wrap(plain.clone())
    for function in (torch.add, torch.maximum, torch.mul):
        result = function(found, found)
        assert not unified.is_unified(result) and torch.equal(result, function(plain, plain))
    result = torch.addcmul(found, found, found)
    assert torch.equal(result, torch.addcmul(plain, plain, plain)) and not unified.is_unified(result)
    assert torch.equal(found.cpu(), plain)
    assert torch.add(found, found, out=found) is found and torch.equal(found.cpu(), plain * 2)


def test_shapes_stay():
    found = unified.wrap(table())
    for change in (found.t_, lambda: found.unsqueeze_(0), lambda: found.resize_(3)):
        with pytest.raises(RuntimeError, match="is fixed"):
            change()
    for shape in ((20_000, 5), (2, 5)):
        with pytest.raises(RuntimeError, match="give one of the result's shape"):
            torch.add(torch.ones(shape), 1, out=found)
    with pytest.raises(RuntimeError, match="module.to"):
        found.data = torch.ones(2)
    assert torch.equal(found[torch.tensor([3])], table()[3:4])
    with pytest.raises(ValueError, match="not negative"):
        unified.empty(-1, 3)


def test_gradients_through_rows_and_plain_views():
    weight = torch.nn.Parameter(unified.wrap(table()))
    plain = torch.nn.Parameter(table())
    index = torch.tensor([[1, -1], [1, 3]])
    for one in (weight, plain):
        (one[index] * torch.arange(20.0).view(2, 2, 5)).sum().backward()
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
    found = unified.wrap(plain)
    assert type(found.cpu()) is torch.Tensor and found.cpu().data_ptr() == plain.data_ptr()
    assert found.numpy().ctypes.data == plain.data_ptr()
    assert np.asarray(found).shape == (20, 5)
    assert np.asarray(found, dtype=np.float64).dtype == np.float64
    assert found.tolist() == plain.tolist()
    assert found.to(torch.float64).dtype is torch.float64
    assert "UnifiedTensor(tensor(" in repr(found)
    with pytest.raises(RuntimeError, match="detach"):
        unified.wrap(plain).requires_grad_().numpy()
    copied = copy.deepcopy(found)
    copied[0] = 99
    assert unified.is_unified(copied) and (plain[0] != 99).all()
    assert unified.wrap(found, prefer="host").prefer == "host"


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


def test_memory_of_exactly_its_size_on_one_account():
    budget = tiers.Budget(host="1MiB")
    before = ledger.held_bytes
    found = unified.empty(1000, 7, dtype=torch.float64, budget=budget)
    assert found.shape == (1000, 7) and (found.cpu() == 0).all()
    assert budget.held_bytes("host") == 56_000 == ledger.held_bytes - before
    with pytest.raises(BudgetError, match="budget of 1.0 MiB"):
        unified.empty((3000, 100), budget=budget)
    view = found[10:20]
    del found
    gc.collect()
    assert budget.held_bytes("host") == 56_000  # a view keeps it
    del view
    gc.collect()
    assert budget.held_bytes("host") == 0
    assert unified.empty(0, 3).shape == (0, 3)


class FakeRuntime:
    """What CUDA is asked to register."""

    def __init__(self, status=0):
        self.status, self.held, self.calls = status, {}, []

    def cudaHostRegister(self, address, size, flags):
        self.calls.append((address, size, flags))
        if self.status == 0:
            self.held[address] = size
        return self.status

    def cudaHostUnregister(self, address):
        del self.held[address]
        return 0


@pytest.fixture
def cuda(monkeypatch):
    """A machine with CUDA, as far as registering goes."""
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr("penstock.devices._pin.accelerator_type", lambda: "cuda")
    monkeypatch.setattr("penstock.devices._pin.backend_of", lambda _: Cuda(torch.device("cuda", 0)))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self, device=None: False)
    return runtime


def test_memory_is_registered_once_at_its_exact_size_and_let_go(cuda):
    plain = table()
    found = unified.wrap(plain)
    assert found.is_registered
    assert cuda.held == {plain.data_ptr(): plain.nbytes}
    views = found[2:], found.detach()
    again = unified.wrap(found, prefer="host")
    assert len(cuda.calls) == 1
    del found, views
    gc.collect()
    assert cuda.held
    del again
    gc.collect()
    assert not cuda.held
    unified.empty(0)  # nothing to register
    assert len(cuda.calls) == 1


def test_memory_that_somebody_else_registered_is_theirs(cuda, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self, device=None: True)
    found = unified.wrap(table())
    assert found.is_registered
    assert not cuda.calls
    del found
    gc.collect()  # not unregistered


def test_a_part_of_registered_memory_keeps_all_of_it(cuda, monkeypatch):
    plain = torch.zeros(1000)
    array = plain.numpy()
    whole = unified.wrap(plain)
    part = unified.wrap(torch.from_numpy(array[100:200]))
    assert len(cuda.calls) == 1 and part.is_registered
    del whole
    gc.collect()
    assert cuda.held  # the part needs it
    del part
    gc.collect()
    assert not cuda.held


def test_memory_that_is_wrapped_twice_is_registered_once(cuda):
    plain = table()
    first, second = unified.wrap(plain), unified.wrap(plain[3:])
    assert len(cuda.calls) == 1
    del first
    gc.collect()
    assert second.is_registered and cuda.held
    del second
    gc.collect()
    assert not cuda.held


def test_a_refused_registration_is_said_and_rows_are_gathered_by_the_cpu(cuda, monkeypatch):
    cuda.status = 2
    monkeypatch.setattr(_tensor, "_device", lambda: torch.device("meta"))
    with pytest.warns(TierDegradedWarning, match="ulimit -l"):
        found = unified.wrap(table())
    assert torch.equal(found[torch.tensor([3])], table()[3:4])
    with pytest.raises(ValueError, match="only rows can be read"):
        found.in_place.on(torch.device("cuda", 0))
    with pytest.raises(ValueError, match="cannot read host memory in place"):
        found.in_place.on(torch.device("xpu", 0))


class FakeBindings:
    """``cuda.bindings.runtime`` of two versions."""

    cudaDeviceAttr = SimpleNamespace(cudaDevAttrPageableMemoryAccess="pageable")
    cudaMemoryAdvise = SimpleNamespace(cudaMemAdviseSetReadMostly=1, cudaMemAdviseSetPreferredLocation=3)
    cudaMemLocationType = SimpleNamespace(cudaMemLocationTypeHost="host", cudaMemLocationTypeDevice="device")
    cudaMemLocation = SimpleNamespace

    def __init__(self, version, pageable=1, error=0):
        self.CUDART_VERSION, self.pageable, self.error, self.calls = version, pageable, error, []

    def cudaDeviceGetAttribute(self, attribute, device):
        return 0, self.pageable

    def cudaMemAdvise(self, address, size, advice, where):
        self.calls.append((address, size, advice, where))
        return (self.error,)


def test_advice_is_given_where_it_is_heard(monkeypatch):
    found = unified.wrap(table())
    assert not unified.advise(found, "read mostly") or torch.cuda.is_available()
    with pytest.raises(ValueError, match="'read mostly', 'prefer host' or 'prefer device'"):
        unified.advise(found, "fast")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    for fake, taken in ((FakeBindings(12090), True), (FakeBindings(13000), True), (FakeBindings(12090, 0), False),
                        (FakeBindings(12090, error=1), False)):  # fmt: skip
        monkeypatch.setattr(_advice, "_runtime", lambda fake=fake: fake)
        assert [unified.advise(found, one) for one in ("read mostly", "prefer host", "prefer device")] == [taken] * 3
        if taken:
            address, size, advice, where = zip(*fake.calls, strict=True)
            assert set(address) == {found.cpu().data_ptr()} and set(size) == {400} and advice == (1, 3, 3)
            if fake.CUDART_VERSION < 13000:
                assert where == (-1, -1, 2)
            else:
                assert [(one.type, one.id) for one in where] == [("host", 0), ("host", 0), ("device", 2)]


class FakeStreams:
    """Streams by name; a log of what waits for what."""

    def __init__(self):
        self.stream, self.log, self.count = "a", [], 0

    def current(self):
        return self.stream

    def record(self, stream, *, is_timed=True):
        self.count += 1
        return f"{stream}{self.count}"

    def wait(self, stream, mark):
        self.log.append((stream, mark))

    def synchronize(self, mark):
        self.log.append(("host", mark))


def test_accesses_stay_in_order():
    marks = FakeStreams()
    order, device = _order.DeviceOrder(lambda device: marks), torch.device("meta")

    def on(stream, *, writes):
        marks.stream = stream
        order.before_device(device, writes=writes)
        order.after_device(device, writes=writes)
        found, marks.log = marks.log, []
        return found

    def host(*, writes):
        order.before_host(writes=writes)
        found, marks.log = marks.log, []
        return found

    assert on("a", writes=False) == []  # a1
    assert host(writes=False) == []  # reads do not disturb reads
    assert on("b", writes=False) == []  # b2
    assert on("b", writes=True) == [("b", "a1")]  # b3 writes after what a reads
    assert on("b", writes=False) == []  # b4, behind its own write
    assert on("a", writes=False) == [("a", "b3")]  # a5
    assert host(writes=False) == [("host", "b3")]
    assert host(writes=False) == []  # passed
    assert sorted(host(writes=True)) == [("host", "a5"), ("host", "b4")]
    assert host(writes=True) == []


def test_pickling_is_refused_or_by_reference(tmp_path):
    with pytest.raises(TypeError, match="shared=True"):
        pickle.dumps(unified.wrap(table()))
    np.save(tmp_path / "x.npy", table().numpy())
    shared = unified.from_file(tmp_path / "x.npy", shared=True, prefer="host")
    again = pickle.loads(pickle.dumps(shared))
    assert torch.equal(again.cpu(), table()) and again.prefer == "host"
    assert len(pickle.dumps(shared)) < 1000
    again[0] = 77
    assert (shared[0] == 77).all()  # one memory
    for view in (shared[1:], shared.view(-1), shared.view(torch.int32), shared.t()):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(view)
    parameter = pickle.loads(pickle.dumps(torch.nn.Parameter(shared)))
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad


def _write(features, row, value):
    features[row] = value


def test_several_processes_share_one_table(tmp_path):
    np.save(tmp_path / "x.npy", table().numpy())
    shared = unified.from_file(tmp_path / "x.npy", shared=True)
    context = multiprocessing.get_context("forkserver")
    workers = [context.Process(target=_write, args=(shared, row, 100.0 + row)) for row in (3, 7)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert (shared[3] == 103).all() and (shared[7] == 107).all()


def test_numbers_that_change_from_call_to_call_are_no_part_of_a_kernel():
    """Triton compiles a kernel anew for an argument that is 1, or divisible by 16, unless it is told not to."""
    pytest.importorskip("triton")
    source = (
        "from penstock.unified import _kernels\n"
        "for kernel in (_kernels.gather_rows, _kernels.sample_neighbours):\n"
        "    print(*[one.name for one in kernel.params if one.do_not_specialize])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split("\n")[:2] == ["num_wanted", "size seed_low seed_high"]
