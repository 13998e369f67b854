"""Tensors without memory of their own: what compiled code reads by address gets them never."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

from penstock import relational, unified
from penstock.storages import address, as_plain

NUM_NODES, NUM_EDGES, NUM_SEEDS = 60, 400, 5_000  # more rows than PyTorch's own kernel reads for a table


class Wrapper(torch.Tensor):
    """A tensor that only holds another one, as those of many libraries do."""

    @staticmethod
    def __new__(cls, held):
        self = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, strides=held.stride(), storage_offset=held.storage_offset()
        )
        self.held = held
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda leaf: leaf.held if isinstance(leaf, cls) else leaf, (args, kwargs or {}))
        return tree_map(lambda leaf: cls(leaf) if isinstance(leaf, torch.Tensor) else leaf, func(*args, **kwargs))


class Named(torch.Tensor):
    """A subclass over memory."""


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


WITHOUT_MEMORY = {
    "wrapper": Wrapper,
    "fake": lambda tensor: FakeTensorMode().from_tensor(tensor),
    "functional": torch._to_functional_tensor,
    "freed": freed,
    "sparse": torch.Tensor.to_sparse,
}


def drawn(*shape, limit=NUM_NODES):
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(0))


def edge_index():
    return drawn(2, NUM_EDGES)


def table():
    return drawn(NUM_NODES, 8).float()


def index():
    return drawn(NUM_SEEDS)


def edge_type():
    return drawn(NUM_EDGES, limit=3)


def graph():
    return unified.Graph(edge_index(), NUM_NODES)


def sampled(graph, seeds):
    return unified.NeighborSampler(graph, [3, 2]).sample(seeds, number=1).edges


def layer(*graph):
    torch.manual_seed(0)
    return relational.RGCNConv(8, 4, num_relations=3)(table(), *graph)


def typed(edges, types, **options):
    return relational.RelationalGraph(edges, types, num_nodes=NUM_NODES, num_edge_types=3, **options)


def written(tmp_path, edges):
    path = unified.write_graph(tmp_path / "edges.graph", edges, num_nodes=NUM_NODES, progress=False)
    return unified.open_graph(path).sources


def read(tmp_path, source):
    path = unified.write_features(tmp_path / "rows.features", source, progress=False)
    with unified.TieredFeatures(path) as features:
        return features[index()]


def tiered(source, rows):
    with unified.TieredFeatures(source) as features:
        return features[rows]


USES = {
    "Graph": (edge_index, lambda given, _: sampled(unified.Graph(given, NUM_NODES), index())),
    "from_csc starts": (
        lambda: graph().starts,
        lambda given, _: sampled(unified.Graph.from_csc(given, graph().sources), index()),
    ),
    "from_csc sources": (
        lambda: graph().sources.to(torch.int64),
        lambda given, _: sampled(unified.Graph.from_csc(graph().starts, given), index()),
    ),
    "from_csc positions": (
        lambda: torch.arange(NUM_EDGES),
        lambda given, _: sampled(unified.Graph.from_csc(graph().starts, graph().sources, given), index()),
    ),
    "sample": (index, lambda given, _: sampled(graph(), given)),
    "expected_accesses": (index, lambda given, _: unified.expected_accesses(graph(), given, [3], batch_size=10)),
    "count_accesses": (index, lambda given, _: unified.count_accesses([given], NUM_NODES)),
    "write_graph": (edge_index, lambda given, tmp_path: written(tmp_path, given)),
    "write_features": (table, lambda given, tmp_path: read(tmp_path, given)),
    "wrap": (table, lambda given, _: unified.wrap(given)[index()]),
    "gather": (table, lambda given, _: unified.gather(given, index())),
    "gather by": (index, lambda given, _: unified.gather(table(), given)),
    "gather scale": (
        lambda: torch.ones(8),
        lambda given, _: unified.gather(table().to(torch.int8), index(), dtype=torch.float32, scale=given),
    ),
    "wrapped by": (index, lambda given, _: unified.wrap(table())[given]),
    "TieredFeatures": (table, lambda given, _: tiered(given, index())),
    "TieredFeatures by": (index, lambda given, _: tiered(table(), given)),
    "RelationalGraph": (edge_index, lambda given, _: layer(typed(given, edge_type()))),
    "RelationalGraph types": (edge_type, lambda given, _: layer(typed(edge_index(), given))),
    "RelationalGraph nodes": (
        lambda: torch.zeros(NUM_NODES, dtype=torch.int64),
        lambda given, _: layer(typed(edge_index(), edge_type(), node_type=given)),
    ),
    "from_types": (
        edge_index,
        lambda given, _: relational.RelationalGraph.from_types({("a", "to", "a"): given}, {"a": NUM_NODES}).edge_index,
    ),
    "layer": (edge_index, lambda given, _: layer(given, edge_type())),
}


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
@pytest.mark.parametrize("use", USES)
def test_tensors_without_memory_are_refused(use, kind, tmp_path):
    make, call = USES[use]
    with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
        call(WITHOUT_MEMORY[kind](make()), tmp_path)
    if kind in ("wrapper", "freed"):  # nothing but an address tells
        assert "memory of its own" in str(raised.value)


@pytest.mark.parametrize("use", USES)
def test_subclasses_over_memory_are_read(use, tmp_path):
    make, call = USES[use]
    folders = [tmp_path / name for name in ("plain", "named", "parameter")]
    for folder in folders:
        folder.mkdir()
    plain = call(make(), folders[0])
    assert torch.equal(call(make().as_subclass(Named), folders[1]).as_subclass(torch.Tensor), plain)
    assert torch.equal(call(torch.nn.Parameter(make(), requires_grad=False), folders[2]), plain)


@pytest.mark.parametrize("use", [use for use, (make, _) in USES.items() if make().dtype is torch.int64])
def test_what_pyg_wraps_is_unwrapped(use, tmp_path):
    geometric = pytest.importorskip("torch_geometric")
    make, call = USES[use]
    (tmp_path / "plain").mkdir()
    wrapped = geometric.EdgeIndex(make()) if make().dim() == 2 else geometric.Index(make())
    result = call(wrapped, tmp_path)
    assert type(result) is torch.Tensor and torch.equal(result, call(make(), tmp_path / "plain"))


def test_addresses():
    tensor = torch.arange(8)
    assert address(tensor[2:]) == tensor.data_ptr() + 16
    assert address(None) is None
    assert as_plain("rows", tensor[:0]) is not None and address(torch.empty(0)) == 0
    with pytest.raises(TypeError, match="`rows` must"):
        as_plain("rows", tensor.to("meta"))
    for nothing in (Wrapper(tensor), Wrapper(tensor)[2:], freed(torch.arange(8))):
        with pytest.raises(TypeError, match="memory of its own"):
            address(nothing)
