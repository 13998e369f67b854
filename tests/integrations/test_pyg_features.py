"""Tables of `penstock.unified` in PyG's data: its loaders give the rows of their nodes, or a clear error."""

import copy
import importlib
import pickle
from multiprocessing import context

import pytest
import torch

from penstock import unified
from penstock.integrations import pyg_features, pyg_sampler
from penstock.unified import _functions, _tiered

pytest.importorskip("torch_geometric")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

NUM_NODES = 300


@pytest.fixture(params=["tiered", "unified"])
def case(request, tmp_path, monkeypatch):
    """Data with features, and these as a plain tensor."""
    from torch_geometric.data import Data

    monkeypatch.setattr(_tiered, "buffer_bytes_for", lambda *_: 0)
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(NUM_NODES, (2, 2000), generator=generator)
    plain = torch.randn(NUM_NODES, 16, generator=generator)
    if request.param == "unified":
        yield Data(edge_index=edge_index, x=unified.wrap(plain), y=torch.arange(NUM_NODES)), plain
        return
    budget = 4 * NUM_NODES + 100 * 68
    with unified.TieredFeatures(plain, host=budget, in_flight=0, disk=tmp_path) as features:
        assert features.plan.num_disk_rows == 200
        yield Data(edge_index=edge_index, x=features, y=torch.arange(NUM_NODES)), plain


def check(batches, plain, num_batches):
    seen = 0
    for batch in batches:
        assert type(batch.x) is torch.Tensor and torch.equal(batch.x, plain[batch.n_id])
        assert torch.equal(batch.y, batch.n_id)
        seen += 1
    assert seen == num_batches


@pytest.mark.parametrize("filter_per_worker", [None, False])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_node_loader_gives_the_rows_of_its_nodes(case, num_workers, filter_per_worker):
    from torch_geometric.loader import NodeLoader

    data, plain = case
    assert data.num_nodes == NUM_NODES and data.num_features == 16 and data.is_node_attr("x")
    seeds = torch.arange(200, 240)
    loader = NodeLoader(
        data, pyg_sampler(data, [4, 2]), seeds, batch_size=20, num_workers=num_workers,
        filter_per_worker=filter_per_worker,
    )  # fmt: skip
    check(loader, plain, 2)


def test_other_loaders(case):
    from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, RandomNodeLoader

    data, plain = case
    sampler = pyg_sampler(data, [4, 2])
    check(NeighborLoader(data, [4, 2], torch.arange(40), neighbor_sampler=sampler, batch_size=20), plain, 2)
    links = LinkNeighborLoader(
        data, [4, 2], edge_label_index=data.edge_index[:, :40], neg_sampling="binary", batch_size=20,
        neighbor_sampler=sampler,
    )  # fmt: skip
    check(links, plain, 2)
    seen = []
    for batch in RandomNodeLoader(data, num_parts=3):
        assert torch.equal(batch.x, plain[batch.y])
        seen.append(batch.y)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(NUM_NODES))


def test_several_types_and_features_of_edges(case):
    from torch_geometric.data import HeteroData
    from torch_geometric.loader import NodeLoader

    homogeneous, plain = case
    data = HeteroData()
    data["a"].x, data["b"].x = homogeneous.x, torch.arange(50.0).view(-1, 1)
    kind = ("a", "to", "b")
    data[kind].edge_index = torch.stack([torch.randint(NUM_NODES, (900,)), torch.randint(50, (900,))])
    data["b", "of", "a"].edge_index = data[kind].edge_index.flip(0)
    assert data["a"].num_nodes == NUM_NODES and data.num_node_features == {"a": 16, "b": 1}
    attributes = torch.randn(900, 3)
    with unified.TieredFeatures(attributes) as edge_features:
        data[kind].edge_attr = edge_features
        loader = NodeLoader(data, pyg_sampler(data, [3, 2]), ("b", torch.arange(20)), batch_size=4)
        for batch in loader:
            assert torch.equal(batch["a"].x, plain[batch["a"].n_id])
            assert torch.equal(batch["b"].x.view(-1).long(), batch["b"].n_id)
            assert torch.equal(batch[kind].edge_attr, attributes[batch[kind].e_id])


def test_parts_and_transforms_of_data(case):
    from torch_geometric import transforms

    data, plain = case
    rows = torch.tensor([250, 3, 17])
    assert torch.equal(data.subgraph(rows).x, plain[rows])
    assert torch.equal(data.subgraph(torch.arange(NUM_NODES) % 7 == 0).x, plain[::7])
    for change in (
        transforms.ToUndirected(), transforms.AddSelfLoops(), transforms.RandomNodeSplit(num_val=10, num_test=10),
        copy.copy, lambda data: data.to("cpu"), lambda data: data.contiguous(), lambda data: data.detach(),
    ):  # fmt: skip
        assert torch.equal(change(copy.copy(data)).x[rows], plain[rows])
    assert "x=[300, 16]" in repr(data) and data.validate()


def test_what_needs_all_features_is_refused(case):
    from torch_geometric import transforms
    from torch_geometric.data import Batch

    data, plain = case
    if unified.is_unified(data.x):
        assert torch.equal(transforms.Constant()(copy.copy(data)).x[:, :16], plain)
        return
    for change in (
        transforms.NormalizeFeatures(), transforms.Constant(), copy.deepcopy, lambda data: data.clone(),
        lambda data: Batch.from_data_list([data, data]), lambda data: data.to("meta"),
        lambda data: data.share_memory_(),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="features"):
            change(copy.copy(data))
    assert data.x.statistics().host_rows + data.x.statistics().disk_rows == 0


def test_features_of_other_nodes_are_refused(case):
    from torch_geometric.data import Data, HeteroData

    data, plain = case
    with unified.TieredFeatures(plain[:200]) as features:
        short = Data(edge_index=data.edge_index, num_nodes=NUM_NODES, x=features)
        several = HeteroData()
        several["a"].x, several["a"].num_nodes = features, NUM_NODES
        several["a", "to", "a"].edge_index = data.edge_index
        for some in (short, several):
            with pytest.raises(ValueError, match="`x` must have a row for each of 300 nodes, got 200 rows"):
                pyg_sampler(some, [2])
    with pytest.raises(TypeError, match="`features` must be tiered features or tensors"):
        pyg_features({"x": plain.numpy()})
    for name in (3, ("a", "to", "b"), (None, 1)):
        with pytest.raises(ValueError, match="the name of a table must be"):
            pyg_features({name: plain})


def test_workers_that_are_spawned_sample(case):
    from torch_geometric.loader import NodeLoader

    data, plain = case
    if unified.is_unified(data.x):
        with pytest.raises(TypeError, match="from_file"):
            pickle.dumps(data)
        return
    loader = NodeLoader(
        data, pyg_sampler(data, [4]), torch.arange(20), batch_size=20, num_workers=1,
        multiprocessing_context="spawn", filter_per_worker=False,
    )  # fmt: skip
    check(loader, plain, 1)


def test_workers_that_are_spawned_read_nothing(case):
    """They say so: mini-batches never come without features."""
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader

    data, _ = case
    if unified.is_unified(data.x):
        return
    graph = Data(edge_index=data.edge_index, num_nodes=NUM_NODES)
    for source in (data, (pyg_features({"x": data.x, "y": data.y}), graph)):
        loader = NodeLoader(source, pyg_sampler(data, [4]), torch.arange(20), batch_size=20, filter_per_worker=True)
        there = as_in_a_spawned_process(loader.collate_fn)
        with pytest.raises(ValueError, match="filter_per_worker=False"):
            there([0, 1])
    assert repr(there.__self__.data[0]) and repr(as_in_a_spawned_process(data.x)) != repr(data.x)


def as_in_a_spawned_process(thing):
    context.set_spawning_popen(object())
    try:
        pickled = pickle.dumps(thing)
    finally:
        context.set_spawning_popen(None)
    return pickle.loads(pickled)


def test_features_are_selected_whoever_is_imported_first(case, monkeypatch):
    """PyG replaces ``torch.index_select`` when it is imported, here before the file that handles it."""
    import torch_geometric.hash_tensor  # noqa: F401

    data, plain = case
    importlib.reload(_functions)
    rows = torch.tensor([250, 3])
    monkeypatch.setattr(_tiered, "call", _functions.call)
    assert torch.equal(torch.index_select(data.x, 0, rows), plain[rows])


def test_features_are_not_pickled_by_the_way(case):
    data, _ = case
    if unified.is_unified(data.x):
        return
    with pytest.raises(TypeError, match="write_features"):
        pickle.dumps(data)
    store = pickle.loads(pickle.dumps(pyg_features({"x": data.x})))
    with pytest.raises(ValueError, match="filter_per_worker=False"):
        store.get_all_tensor_attrs()
    with pytest.raises(ValueError, match="filter_per_worker=False"):
        store["x", None, None]
