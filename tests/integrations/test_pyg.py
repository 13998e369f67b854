"""PyG's loaders over our samplers and tiered features; pyg-lib is not installed here."""

import pickle

import pytest
import torch

from penstock import unified
from penstock.integrations import pyg_features, pyg_sampler

pytest.importorskip("torch_geometric")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

NUM_NODES = 300


@pytest.fixture
def case(tmp_path, monkeypatch):
    from torch_geometric.data import Data

    from penstock.unified import _tiered

    monkeypatch.setattr(_tiered, "buffer_bytes_for", lambda *_: 0)
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(NUM_NODES, (2, 4000), generator=generator)
    x = torch.randn(NUM_NODES, 16, generator=generator)
    features = unified.TieredFeatures(x, host=4 * NUM_NODES + 100 * 68, in_flight=0, disk=tmp_path)
    assert features.plan.num_disk_rows == 200
    yield Data(edge_index=edge_index, num_nodes=NUM_NODES), x, features
    features.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_node_loader_reads_tiered_features(case, num_workers):
    from torch_geometric.loader import NodeLoader

    data, x, features = case
    store = pyg_features({"x": features, "y": torch.arange(NUM_NODES)})
    sampler = pyg_sampler(data, [5, 3])
    loader = NodeLoader((store, data), sampler, torch.arange(100), batch_size=32, num_workers=num_workers)
    seen = 0
    for batch in loader:
        assert torch.equal(batch.x, x[batch.n_id]) and torch.equal(batch.y, batch.n_id)
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        assert sum(batch.num_sampled_nodes) == batch.num_nodes and sum(batch.num_sampled_edges) == batch.num_edges
        assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
        seen += batch.batch_size
    assert seen == 100


def test_a_model_of_pyg_trains(case):
    from torch_geometric.loader import NodeLoader
    from torch_geometric.nn import GraphSAGE

    data, x, features = case
    torch.manual_seed(0)
    labels = (x[:, 0] > 0).long()
    loader = NodeLoader(
        (pyg_features({"x": features, "y": labels}), data), pyg_sampler(data, [5, 3]), torch.arange(200), batch_size=50
    )
    model = GraphSAGE(16, 16, 2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(10):
        for batch in loader:
            optimizer.zero_grad()
            scores = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = torch.nn.functional.cross_entropy(scores, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])


def test_unified_tensors_in_data_and_other_loaders(case):
    from torch_geometric.data import Data
    from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, NodeLoader

    data, x, _ = case
    plain = Data(edge_index=data.edge_index, x=unified.wrap(x))
    sampler = pyg_sampler(unified.Graph(data.edge_index, NUM_NODES), [5, 3])
    batch = next(iter(NodeLoader(plain, sampler, torch.arange(40), batch_size=8)))
    assert torch.equal(batch.x, x[batch.n_id])
    loader = NeighborLoader(plain, [5, 3], input_nodes=torch.arange(40), batch_size=8, neighbor_sampler=sampler)
    for batch in loader:
        assert torch.equal(batch.x, x[batch.n_id])
    links = LinkNeighborLoader(
        plain, [5, 3], edge_label_index=data.edge_index[:, :40], neg_sampling="binary", batch_size=10,
        neighbor_sampler=sampler,
    )  # fmt: skip
    batch = next(iter(links))
    positive = batch.edge_label_index[:, batch.edge_label == 1]
    wanted = {tuple(edge) for edge in data.edge_index[:, :40].t().tolist()}
    assert {tuple(edge) for edge in batch.n_id[positive].t().tolist()} <= wanted


def test_several_types(case):
    from torch_geometric.data import HeteroData
    from torch_geometric.loader import NodeLoader

    _, x, features = case
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = NUM_NODES, 50
    data["a", "to", "b"].edge_index = torch.stack([torch.randint(NUM_NODES, (900,)), torch.randint(50, (900,))])
    data["b", "of", "a"].edge_index = data["a", "to", "b"].edge_index.flip(0)
    store = pyg_features({("a", "x"): features, ("b", "x"): torch.arange(50.0).view(-1, 1)})
    loader = NodeLoader((store, data), pyg_sampler(data, [3, 2]), ("b", torch.arange(20)), batch_size=4)
    twice = NodeLoader((store, data), pyg_sampler(data, [3, 2]), ("b", torch.tensor([4, 4])), batch_size=2)
    with pytest.raises(ValueError, match="twice"):
        next(iter(twice))
    for batch in loader:
        assert torch.equal(batch["a"].x, x[batch["a"].n_id])
        assert torch.equal(batch["b"].x.view(-1).long(), batch["b"].n_id)
        for kind in data.edge_types:
            ends = [batch[kind[0]].n_id[batch[kind].edge_index[0]], batch[kind[2]].n_id[batch[kind].edge_index[1]]]
            assert torch.equal(torch.stack(ends), data[kind].edge_index[:, batch[kind].e_id])


def test_stores_and_what_is_refused(case):
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader

    data, x, features = case
    store = pyg_features({"x": features})
    assert store.get_tensor(attr_name="x", group_name=None, index=torch.tensor([3, 7])).equal(x[[3, 7]])
    assert store.get_tensor_size(attr_name="x", group_name=None) == (NUM_NODES, 16)
    store.put_tensor(torch.ones(5), attr_name="y", group_name=None, index=None)
    assert store.get_tensor(attr_name="y", group_name=None, index=slice(0, 2)).tolist() == [1, 1]
    assert store.remove_tensor(attr_name="y", group_name=None, index=None)
    assert store.get_tensor(attr_name="y", group_name=None, index=None) is None
    with pytest.raises(ValueError, match="from_csc"):
        pyg_sampler(Data(num_nodes=3), [2])
    loader = NodeLoader((store, data), pyg_sampler(data, [2]), torch.tensor([4, 4]), batch_size=2)
    with pytest.raises(ValueError, match="twice"):
        next(iter(loader))
    assert pickle.loads(pickle.dumps(pyg_sampler(data, [2]))).num_nodes == NUM_NODES  # for workers that are spawned


@pytest.fixture
def reviews():
    """Reviews of any time, and a sampler that does not look at it."""
    from torch_geometric.data import Data

    data = Data(edge_index=torch.randint(NUM_NODES, (2, 2000)), num_nodes=NUM_NODES, time=torch.arange(NUM_NODES))
    return data, pyg_sampler(data, [5, 3])


REFUSED = [
    {"time_attr": "time"}, {"weight_attr": "weight"}, {"disjoint": True}, {"subgraph_type": "induced"},
    {"temporal_strategy": "last"}, {"directed": False}, {"replace": True}, {"num_neighbors": [5, 4]},
    {"num_neighbors": [5]}, {"num_neighbors": {("a", "to", "b"): [5, 3]}},
]  # fmt: skip


@pytest.mark.parametrize("option", REFUSED, ids=str)
@pytest.mark.parametrize("name", ["NeighborLoader", "LinkNeighborLoader"])
def test_options_that_pyg_would_drop_are_refused_where_they_are_given(reviews, name, option):
    from torch_geometric import loader

    data, sampler = reviews
    options = {"num_neighbors": [5, 3], "neighbor_sampler": sampler, **option}
    if name == "LinkNeighborLoader":
        options["edge_label_index"] = data.edge_index[:, :10]
        if "time_attr" in option:
            options["edge_label_time"] = torch.zeros(10)
    with pytest.raises(ValueError, match=rf"{name}\({next(iter(option))}=.*pyg_sampler"):
        getattr(loader, name)(data, **options)


def test_times_of_seeds_are_refused(reviews):
    from torch_geometric.loader import LinkLoader, NodeLoader
    from torch_geometric.sampler import NodeSamplerInput

    data, sampler = reviews
    with pytest.raises(ValueError, match="input_time"):
        NodeLoader(data, sampler, torch.arange(10), input_time=torch.zeros(10))
    with pytest.raises(ValueError, match="edge_label_time"):
        LinkLoader(data, sampler, data.edge_index[:, :10], edge_label_time=torch.zeros(10))
    with pytest.raises(ValueError, match="by time"):
        sampler.sample_from_nodes(NodeSamplerInput(input_id=None, node=torch.arange(3), time=torch.zeros(3)))


def test_options_that_say_what_the_sampler_does_are_taken(reviews):
    from torch_geometric.data import HeteroData
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.sampler import NumNeighbors
    from torch_geometric.sampler.base import SubgraphType

    data, sampler = reviews
    for option in (
        {"replace": False}, {"disjoint": False, "time_attr": None}, {"is_sorted": True},
        {"subgraph_type": "directional"}, {"subgraph_type": SubgraphType.directional},
        {"num_neighbors": NumNeighbors([5, 3])},
    ):  # fmt: skip
        options = {"num_neighbors": [5, 3], "input_nodes": torch.arange(10), "neighbor_sampler": sampler, **option}
        assert len(NeighborLoader(data, **options)) == 10
    replacing = pyg_sampler(data, [5, 3], replace=True)
    assert len(NeighborLoader(data, [5, 3], replace=True, neighbor_sampler=replacing, batch_size=NUM_NODES)) == 1
    hetero, kind = HeteroData(), ("a", "to", "a")
    hetero["a"].num_nodes, hetero[kind].edge_index = NUM_NODES, data.edge_index
    sampler = pyg_sampler(hetero, [5, 3])
    for fanouts in ([5, 3], {kind: [5, 3]}):
        assert len(NeighborLoader(hetero, fanouts, "a", neighbor_sampler=sampler)) == NUM_NODES
    with pytest.raises(ValueError, match="num_neighbors"):
        NeighborLoader(hetero, {kind: [5, 2]}, "a", neighbor_sampler=sampler)
    assert (
        len(NeighborLoader(data, [5, 3], weight_attr=None, input_nodes=torch.arange(4)).input_nodes) == 4
    )  # PyG's own


def test_a_sampler_is_what_it_was_made_as(reviews):
    from torch_geometric.data.lightning import LightningNodeData

    data, sampler = reviews
    with pytest.raises(AttributeError, match="num_neighbors"):
        sampler.num_neighbors = [1]
    with pytest.raises(TypeError, match="list for a graph of one edge type"):
        pyg_sampler(data, {("a", "to", "b"): [5]})
    module = LightningNodeData(  # it sets attributes of samplers that are named like their parameters
        data, input_train_nodes=torch.arange(9), input_val_nodes=torch.arange(9), node_sampler=sampler,
        eval_loader_kwargs={"replace": True},
    )  # fmt: skip
    with pytest.raises(TypeError, match="replace"):
        module.val_dataloader()


def test_edges_in_an_edge_index_of_pyg(reviews):
    from torch_geometric import EdgeIndex
    from torch_geometric.loader import NodeLoader

    data, _ = reviews
    plain = pyg_sampler(data, [5, 3])
    data.edge_index = EdgeIndex(data.edge_index, sparse_size=(NUM_NODES, NUM_NODES))
    batches = []
    for sampler in (plain, pyg_sampler(data, [5, 3])):
        torch.manual_seed(0)
        batches.append(next(iter(NodeLoader(data, sampler, torch.arange(40), batch_size=8))))
    assert torch.equal(batches[0].e_id, batches[1].e_id) and torch.equal(batches[0].n_id, batches[1].n_id)
