"""Tables of this room against plain tensors: the same rows or a clear error, whatever PyTorch calls on them."""

import copy
import io
import multiprocessing
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils import data

from penstock import unified
from penstock.unified import _tiered

NUM_ROWS, WIDTH = 60, 3


def plain():
    return torch.arange(NUM_ROWS * WIDTH, dtype=torch.float32).view(NUM_ROWS, WIDTH)


@pytest.fixture(params=["memory", "disk", "unified"])
def table(request, tmp_path, monkeypatch):
    monkeypatch.setattr(_tiered, "buffer_bytes_for", lambda *_: 0)
    if request.param == "unified":
        yield unified.wrap(plain())
        return
    options = {"host": 4 * NUM_ROWS + 20 * 16, "in_flight": 0, "disk": tmp_path}
    with unified.TieredFeatures(plain(), **(options if request.param == "disk" else {})) as features:
        assert features.plan.num_disk_rows == (40 if request.param == "disk" else 0)
        yield features


def outcome(call, features):
    """What it gives as plain values, or the kind of its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uint8 masks are deprecated
        try:
            return call(features)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            return error


def same(result, expected):
    if isinstance(expected, torch.Tensor):
        result = result.cpu() if unified.is_unified(result) else result
        return result.dtype is expected.dtype and torch.equal(result, expected)
    if isinstance(expected, np.ndarray):
        return np.array_equal(result, expected)
    if isinstance(expected, list | tuple):
        return len(result) == len(expected) and all(map(same, result, expected))
    return result == expected


ROWS = torch.tensor([41, 3, 3, 59])
INDEXES = {
    "int64": ROWS,
    "int32": ROWS.int(),
    "int16": ROWS.short(),
    "int8": ROWS.to(torch.int8),
    "negative": torch.tensor([-1, -60, 5]),
    "negative int32": torch.tensor([-1, -60, 5], dtype=torch.int32),
    "repeated": torch.tensor([7] * 9),
    "matrix": ROWS.view(2, 2),
    "not contiguous": torch.arange(60)[::7],
    "transposed": torch.arange(6).view(2, 3).t(),
    "expanded": torch.tensor([9]).expand(4),
    "unified": unified.wrap(ROWS),
    "0-d": torch.tensor(41),
    "0-d negative": torch.tensor(-2),
    "empty": torch.tensor([], dtype=torch.int64),
    "empty of floats": torch.tensor([]),
    "empty list": [],
    "above": torch.tensor([0, 60]),
    "below": torch.tensor([0, -61]),
    "far above": torch.tensor([2**40]),
    "floats": torch.tensor([1.0, 2.0]),
    "complex": torch.tensor([1j]),
    "mask": torch.arange(60) % 7 == 2,
    "mask of nothing": torch.zeros(60, dtype=torch.bool),
    "uint8 mask": (torch.arange(60) % 7 == 2).byte(),
    "short mask": torch.ones(5, dtype=torch.bool),
    "long mask": torch.ones(61, dtype=torch.bool),
    "mask of numbers": torch.ones(60, 3, dtype=torch.bool),
    "0-d mask": torch.tensor(True),
    "true": True,
    "false": False,
    "list": [41, 3, 3],
    "list of negatives": [-1, 0],
    "list of bools": [True] + [False] * 59,
    "nested list": [[1, 2], [3, 4]],
    "nested list within": [[1, 2], [0, 1]],
    "list of tensors": [torch.tensor(1), torch.tensor(2)],
    "list of slices": [slice(0, 2), slice(0, 1)],
    "list of numpy's ints": [np.int64(1), np.int64(2)],
    "range": range(3, 9),
    "array": np.array([41, 3]),
    "array of int32": np.array([41, 3], dtype=np.int32),
    "array of uint8": np.array([41, 3], dtype=np.uint8),
    "array of bools": np.arange(60) % 7 == 2,
    "numpy's int": np.int64(41),
    "numpy's bool": np.bool_(True),
    "int": 41,
    "negative int": -60,
    "int above": 60,
    "int below": -61,
    "float": 1.0,
    "string": "x",
    "slice": slice(3, 9),
    "slice from the end": slice(-5, None),
    "slice of steps": slice(1, None, 13),
    "slice backwards": slice(None, None, -1),
    "empty slice": slice(9, 3),
    "slice of tensors": slice(torch.tensor(3), torch.tensor(9)),
    "all": slice(None),
    "ellipsis": ...,
    "none": None,
    "no index": (),
    "rows and column": (ROWS, 1),
    "rows and columns": (ROWS, slice(1, 3)),
    "rows and a list": (ROWS, [0, 1, 2, 0]),
    "rows and rows": (ROWS, ROWS % 3),
    "mask and column": (torch.arange(60) % 7 == 2, 0),
    "column": (slice(None), 1),
    "column above": (slice(None), 3),
    "one number": (41, 1),
    "too many": (ROWS, 0, 0),
    "ellipsis and column": (..., 1),
    "rows and ellipsis": (ROWS, ...),
    "none and rows": (None, ROWS),
    "rows and none": (ROWS, None),
    "tuple of rows": (ROWS,),
    "tuple of a list": ([1, 2],),
}


@pytest.mark.parametrize("name", INDEXES)
def test_indexes(table, name):
    index = INDEXES[name]
    expected, result = outcome(lambda tensor: tensor[index], plain()), outcome(lambda tensor: tensor[index], table)
    if isinstance(expected, Exception):
        assert name in FURTHER_INDEXES or isinstance(result, IndexError | TypeError | ValueError), result
    elif isinstance(result, Exception):
        assert not unified.is_unified(table)
        assert isinstance(result, IndexError | ValueError | TypeError) and name in REFUSED_INDEXES, result
    else:
        assert name not in REFUSED_INDEXES or unified.is_unified(table)
        assert same(result, expected)


REFUSED_INDEXES = {
    "mask of numbers", "0-d mask", "true", "false", "numpy's bool", "rows and a list", "rows and rows",
    "ellipsis", "none", "ellipsis and column", "none and rows", "nested list within", "list of tensors",
    "list of slices",
}  # fmt: skip
"""Of tiered features: they would need more than rows."""
FURTHER_INDEXES = {"int16", "int8", "empty of floats"}
"""Which tiered features take, and PyTorch does not."""


def saved(tensor):
    torch.save(tensor, io.BytesIO())


def module_of(tensor):
    module = torch.nn.Module()
    module.register_buffer("table", tensor)
    return module


READS = {
    "index_select": lambda table: table.index_select(0, ROWS),
    "torch.index_select": lambda table: torch.index_select(table, 0, ROWS),
    "index_select from the end": lambda table: torch.index_select(table, -2, ROWS),
    "index_select by keywords": lambda table: torch.index_select(input=table, dim=0, index=ROWS),
    "index_select of one": lambda table: torch.index_select(table, 0, torch.tensor(41)),
    "index_select of int32": lambda table: torch.index_select(table, 0, ROWS.int()),
    "index_select of negatives": lambda table: table.index_select(0, torch.tensor([-1])),
    "index_select above": lambda table: table.index_select(0, torch.tensor([60])),
    "index_select of floats": lambda table: table.index_select(0, torch.tensor([1.0])),
    "index_select of a mask": lambda table: table.index_select(0, torch.ones(60, dtype=torch.bool)),
    "index_select of a matrix": lambda table: table.index_select(0, ROWS.view(2, 2)),
    "index_select into": lambda table: torch.index_select(table, 0, ROWS, out=torch.empty(4, WIDTH)),
    "embedding": lambda table: functional.embedding(ROWS.view(2, 2), table),
    "embedding of int32": lambda table: functional.embedding(ROWS.int(), table),
    "embedding of one": lambda table: functional.embedding(torch.tensor(41), table),
    "embedding of padding": lambda table: functional.embedding(ROWS, table, padding_idx=3),
    "embedding of negatives": lambda table: functional.embedding(torch.tensor([-1]), table),
    "embedding of floats": lambda table: functional.embedding(torch.tensor([1.0]), table),
    "iteration": list,
    "reversed": lambda table: [table[number] for number in reversed(range(len(table)))],
    "len": len,
    "shape": lambda table: (
        table.shape, table.size(), table.size(0), table.size(-1), table.dim(), table.ndim, table.numel(),
    ),
    "type": lambda table: (
        table.dtype, table.device, table.layout, table.is_cuda, table.is_sparse, table.element_size(),
    ),
    "size of a dim": lambda table: table.size(dim=1),
    "shape above": lambda table: table.size(2),
    "gradients": lambda table: (table.requires_grad, table.grad, table.is_leaf),
    "to where it is": lambda table: table.to("cpu")[ROWS],
    "to its type": lambda table: table.to(torch.float32)[ROWS],
    "cpu": lambda table: table.cpu()[ROWS],
    "contiguous": lambda table: table.contiguous()[ROWS],
    "detach": lambda table: table.detach()[ROWS],
    "copy": lambda table: copy.copy(table)[ROWS],
    "new": lambda table: table.new_zeros(2),
    "as_tensor": lambda table: torch.as_tensor(table)[ROWS],
    "torch.asarray": lambda table: torch.asarray(table)[ROWS],
    "module": lambda table: module_of(table).to("cpu").table[ROWS],
    "state of a module": lambda table: module_of(table).state_dict()["table"][ROWS],
    "TensorDataset": lambda table: list(data.TensorDataset(table, torch.arange(60)))[41],
    "DataLoader": lambda table: list(data.DataLoader(data.TensorDataset(table), batch_size=7)),
    "DataLoader of the table": lambda table: list(data.DataLoader(table, batch_size=7)),
    "Subset": lambda table: list(data.DataLoader(data.Subset(data.TensorDataset(table), [41, 3, 5]), batch_size=2)),
    "batches of indexes": lambda table: list(
        data.DataLoader(table, sampler=data.BatchSampler(range(50, 60), 4, drop_last=False), batch_size=None)
    ),
    "random_split": lambda table: list(data.random_split(table, [50, 10], torch.Generator().manual_seed(0))[1]),
    "collated rows": lambda table: data.default_collate([table[41], table[3]]),
    "stacked rows": lambda table: torch.stack([table[41], table[3]]),
    "gradients behind": lambda table: table[ROWS].clone().requires_grad_().sum().grad_fn is not None,
}  # fmt: skip
"""What gives rows, or tells about the table, for all."""


@pytest.mark.parametrize("name", READS)
def test_reads(table, name):
    expected, result = outcome(READS[name], plain()), outcome(READS[name], table)
    if isinstance(expected, Exception):
        assert isinstance(result, type(expected) | IndexError), result
    else:
        assert not isinstance(result, Exception), result
        assert same(result, expected)


WHOLE = {
    "as_tensor of a type": lambda table: torch.as_tensor(table, dtype=torch.float64),
    "asarray": np.asarray,
    "array": np.array,
    "torch.tensor": torch.tensor,
    "numpy": lambda table: table.numpy(),
    "numpy's function": lambda table: np.concatenate([table, table]),
    "dlpack": torch.from_dlpack,
    "tolist": lambda table: table.tolist(),
    "clone": lambda table: table.clone(),
    "deepcopy": copy.deepcopy,
    "sum": lambda table: table.sum(),
    "mean": torch.mean,
    "equal": lambda table: torch.equal(table, plain()),
    "==": lambda table: table == 1,
    "== itself": lambda table: table == table,  # noqa: PLR0124
    "<": lambda table: table < 1,
    "+": lambda table: table + 1,
    "1 -": lambda table: 1 - table,
    "in": lambda table: 1 in table,
    "bool": bool,
    "float": float,
    "@": lambda table: table @ torch.ones(WIDTH),
    "plain @": lambda table: torch.ones(60) @ table,
    "stack": lambda table: torch.stack([table, table]),
    "cat": lambda table: torch.cat([table, torch.ones(1, WIDTH)]),
    "collate": lambda table: data.default_collate([table, table]),
    "view": lambda table: table.view(-1),
    "reshape": lambda table: table.reshape(-1),
    "t": lambda table: table.t(),
    "T": lambda table: table.T,
    "select": lambda table: table.select(1, 0),
    "narrow": lambda table: table.narrow(0, 3, 2),
    "unbind": lambda table: table.unbind(),
    "split": lambda table: table.split(20),
    "gather": lambda table: table.gather(0, ROWS.view(-1, 1)),
    "take": lambda table: table.take(ROWS),
    "take_along_dim": lambda table: torch.take_along_dim(table, ROWS.view(-1, 1), 0),
    "masked_select": lambda table: torch.masked_select(table, table > 3),
    "where": lambda table: torch.where(torch.tensor(True), table, 0.0),
    "linear": lambda table: functional.linear(table, torch.ones(2, WIDTH)),
    "dropout": functional.dropout,
    "embedding_bag": lambda table: functional.embedding_bag(ROWS.view(2, 2), table),
    "embedding of norms": lambda table: functional.embedding(ROWS, table, max_norm=1.0),
    "index of another": lambda table: plain()[table],
    "columns": lambda table: table.index_select(1, torch.tensor([0])),
    "to another type": lambda table: table.to(torch.float64),
    "to another device": lambda table: table.to("meta"),
    "to as another": lambda table: table.to(torch.ones(1, dtype=torch.float64)),
    "to a copy": lambda table: table.to("cpu", copy=True),
    "half": lambda table: table.half(),
    "module of another type": lambda table: module_of(table).double(),
    "zeros_like": torch.zeros_like,
    "parameter": lambda table: torch.nn.Parameter(table, requires_grad=False),
    "trained parameter": torch.nn.Parameter,
    "from_pretrained": torch.nn.Embedding.from_pretrained,
    "requires_grad_": lambda table: table.requires_grad_(),
    "share_memory_": lambda table: table.share_memory_(),
    "pickle": pickle.dumps,
    "save": saved,
    "save of a state": lambda table: saved(module_of(table).state_dict()),
    "write": lambda table: table.__setitem__(3, 1.0),
    "write of rows": lambda table: table.__setitem__(ROWS, torch.ones(4, WIDTH)),
    "index_copy_": lambda table: table.index_copy_(0, ROWS[:2], torch.ones(2, WIDTH)),
    "zero_": lambda table: table.zero_(),
    "add out": lambda table: torch.add(torch.ones(60, WIDTH), 1, out=table),
    "copy_": lambda table: table.copy_(torch.ones(WIDTH)),
    "copy from": lambda table: torch.empty(60, WIDTH).copy_(table),
    "data": lambda table: setattr(table, "data", torch.ones(2)),
    "load_state_dict": lambda table: module_of(table).load_state_dict({"table": torch.zeros(60, WIDTH)}),
    "data_ptr": lambda table: table.data_ptr(),
    "vmap": torch.vmap(lambda row: row * 2),
    "wrap": unified.wrap,
    "gathered": lambda table: unified.gather(table, ROWS),
}  # fmt: skip
"""What needs the whole table, or writes: refused by tiered features."""


@pytest.mark.parametrize("name", WHOLE)
def test_what_needs_the_whole_table(table, name):
    result = outcome(WHOLE[name], table)
    if unified.is_unified(table):
        expected = outcome(WHOLE[name], plain())
        if isinstance(expected, Exception) or name in REFUSED_BY_UNIFIED:
            assert isinstance(result, Exception), result
        else:
            assert not isinstance(result, Exception), result
            assert name in NOT_COMPARED or same(result, expected)
        return
    assert isinstance(result, RuntimeError | TypeError | ValueError), result
    assert "features" in str(result), result
    assert torch.equal(table[:], plain())  # nothing was written
    assert table.statistics().host_rows + table.statistics().disk_rows == NUM_ROWS  # nothing else was read


REFUSED_BY_UNIFIED = {"pickle", "save", "save of a state", "data", "share_memory_"}
NOT_COMPARED = {"dropout", "module of another type", "from_pretrained", "data_ptr", "to another device"}
"""Random numbers, modules, addresses, and what has no values."""


def test_shared_memory_is_shared_before_it_is_wrapped():
    shared = unified.wrap(plain().share_memory_())
    assert shared.share_memory_() is shared


def test_closed_features_say_so(tmp_path):
    features = unified.TieredFeatures(plain())
    features.close()
    for read in (READS["index_select"], READS["embedding"], READS["DataLoader"], lambda table: table[ROWS]):
        with pytest.raises(ValueError, match="were closed"):
            read(features)
    assert features.shape == (NUM_ROWS, WIDTH) and "TieredFeatures" in f"{features}"


def test_forked_processes_read_whatever_threads_were_doing(table):
    """As of a data loader's workers that start while another thread reads."""
    if unified.is_unified(table):
        return
    process = multiprocessing.get_context("fork").Process(target=read_and_close, args=(table,))
    with table._store._readers, table._store.counts._lock:
        process.start()
    process.join(600)
    code = process.exitcode
    process.kill()
    assert code == 0
    assert same(table[ROWS], plain()[ROWS])


def read_and_close(features):
    assert same(features[ROWS], plain()[ROWS])
    features.close()


@pytest.mark.parametrize("context", ["fork", None])
def test_workers_of_data_loaders(table, context):
    loader = data.DataLoader(
        data.TensorDataset(table, torch.arange(NUM_ROWS)), batch_size=8, shuffle=True, num_workers=2 if context else 0,
        multiprocessing_context=context,
    )  # fmt: skip
    seen = []
    for rows, numbers in loader:
        assert torch.equal(rows, plain()[numbers])
        seen.append(numbers)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(NUM_ROWS))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_read_rows(table, backend):
    torch._dynamo.reset()
    weight = torch.randn(WIDTH, 2)
    for read in (lambda tensor, rows: tensor[rows], lambda tensor, rows: tensor.index_select(0, rows)):
        compiled = torch.compile(lambda tensor, rows, read=read: (read(tensor, rows) @ weight).relu(), backend=backend)
        assert torch.equal(compiled(table, ROWS), (plain()[ROWS] @ weight).relu())


@pytest.mark.parametrize(
    "seeds, error, message",
    [
        (torch.tensor([1.7, 2.2]), TypeError, "whole numbers, got torch.float32"),
        (torch.tensor([1, 0], dtype=torch.uint8), TypeError, r"seeds.long\(\), or seeds.bool\(\)"),
        (torch.ones(5, dtype=torch.bool), IndexError, r"each of 60 nodes, got \(5,\)"),
        (torch.ones(61, dtype=torch.bool), IndexError, r"each of 60 nodes, got \(61,\)"),
        (torch.tensor([-1]), IndexError, "got numbers from -1"),
        (torch.tensor([60]), IndexError, "must be from 0 to 59"),
        ([1, 2], TypeError, r"must be a .*torch.Tensor.*, got .*\[1, 2\]"),
        (np.array([1, 2]), TypeError, r"must be a .*torch.Tensor.*, got .*array"),
    ],
)
def test_seeds_that_are_no_nodes(table, seeds, error, message):
    graph = unified.Graph(torch.randint(NUM_ROWS, (2, 200)), NUM_ROWS)
    sampler = unified.NeighborSampler(graph, [2])
    hetero = unified.HeteroNeighborSampler({("a", "to", "a"): graph}, [2])
    for call in (
        lambda: sampler.sample(seeds),
        lambda: hetero.sample({"a": seeds}),
        lambda: unified.Loader(sampler, table, seeds, batch_size=2),
        lambda: unified.expected_accesses(graph, seeds, [2], batch_size=2),
    ):
        with pytest.raises(error, match=message):
            call()


def test_seeds_and_labels_as_they_are_taken(table):
    graph = unified.Graph(torch.randint(NUM_ROWS, (2, 200)), NUM_ROWS)
    sampler = unified.NeighborSampler(graph, [2])
    mask = torch.arange(NUM_ROWS) % 7 == 2
    for seeds in (mask, mask.nonzero(), mask.nonzero().view(-1).int()):
        loader = unified.Loader(sampler, table, seeds, batch_size=4, labels=torch.arange(NUM_ROWS))
        for batch in loader:
            assert torch.equal(batch.x, plain()[batch.nodes]) and torch.equal(batch.y, batch.seeds)
        assert torch.equal(loader.seeds.sort().values, mask.nonzero().view(-1))
    assert len(unified.Loader(sampler, table, torch.tensor([]), batch_size=4)) == 0
    with pytest.raises(
        ValueError, match=r"`labels` must have one entry for each of 60 nodes, got 9: .*labels\[seeds\]"
    ):
        unified.Loader(sampler, table, mask, batch_size=4, labels=torch.arange(NUM_ROWS)[mask])
