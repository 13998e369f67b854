"""Graphs with their indexes as files, pairs by counting, graphs on the move."""

import json

import pytest
import torch
from relational_layers import random_graph, rgat, tensors
from safetensors import safe_open
from safetensors.torch import save_file

from penstock.relational import RelationalGraph, _indexes


def graph_and_result():
    generator = torch.Generator().manual_seed(1)
    graph = random_graph(20, 90, 4, generator)
    arguments = tensors("rgat", graph, 4, torch.float64, generator)
    rgat(graph, **arguments).sum().backward()
    return graph, arguments


def test_a_loaded_graph_has_its_indexes_and_gives_the_same(tmp_path, monkeypatch):
    graph, arguments = graph_and_result()
    graph.save(tmp_path / "graph.safetensors")
    loaded = RelationalGraph.load(tmp_path / "graph.safetensors")
    for build in ("pairs_of", "counting_sort"):
        monkeypatch.setattr(_indexes, build, lambda *_: pytest.fail("an index was built again"))
    assert torch.equal(rgat(loaded, **arguments), rgat(graph, **arguments))
    assert repr(loaded) == repr(graph)
    assert [path.name for path in tmp_path.iterdir()] == ["graph.safetensors"]


def test_blocks_and_names_come_back(tmp_path):
    edges = {("a", "to", "b"): torch.tensor([[0, 1], [1, 0]]), ("b", "to", "b"): torch.tensor([[0], [1]])}
    graph = RelationalGraph.from_types(edges, {"a": 2, "b": 2})
    graph.save(tmp_path / "typed")
    loaded = RelationalGraph.load(tmp_path / "typed")
    assert (loaded.node_type_names, loaded.edge_type_names) == (("a", "b"), tuple(edges))
    block = RelationalGraph(torch.tensor([[3, 0], [0, 1]]), num_nodes=(4, 2))
    block.save(tmp_path / "block")
    assert RelationalGraph.load(tmp_path / "block").num_nodes == (4, 2)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"graph\.save"):
        RelationalGraph.load(tmp_path / "none")
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ValueError, match="not a graph that RelationalGraph.save wrote"):
        RelationalGraph.load(tmp_path / "text")
    save_file({"edge_index": torch.zeros(2, 1)}, tmp_path / "weights")
    with pytest.raises(ValueError, match="has format None"):
        RelationalGraph.load(tmp_path / "weights")


def change(name, how):
    return lambda kept: kept.update({name: how(kept[name])})


DAMAGES = {
    "an index beyond its rows": change("index EDGE TARGET_AND_TYPE", lambda tensor: tensor + 99),
    "borders that are none": change("starts EDGE TARGET", lambda tensor: tensor * 0),
    "wider numbers": change("positions EDGE TARGET", lambda tensor: tensor.long()),
    "a repeated row": change("positions EDGE TARGET", lambda tensor: tensor * 0 + 1),
    "pairs out of order": change("index TARGET_AND_TYPE EDGE_TYPE", lambda tensor: tensor.flip(0)),
    "an unknown domain": lambda kept: kept.update({"index EDGE NOWHERE": torch.zeros(1)}),
    "no domain": lambda kept: kept.update({"index": torch.zeros(1)}),
    "an order without its rows": lambda kept: kept.pop("positions EDGE TARGET"),
    "another order": change("positions EDGE TARGET", lambda tensor: tensor.flip(0)),
    "no edges": lambda kept: kept.pop("edge_type"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(tmp_path, damage):
    graph, _ = graph_and_result()
    graph.save(tmp_path / "graph")
    with safe_open(tmp_path / "graph", framework="pt") as file:
        metadata, kept = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert json.loads(metadata["about"])["num_edge_types"] == 4
    DAMAGES[damage](kept)
    save_file(kept, tmp_path / "graph", metadata)
    with pytest.raises(ValueError, match="do not fit together"):
        RelationalGraph.load(tmp_path / "graph")


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    graph, _ = graph_and_result()
    graph.save(tmp_path / "graph")
    before = (tmp_path / "graph").read_bytes()

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.relational._saved.save_file", fails)
    with pytest.raises(OSError, match="No space left"):
        graph.save(tmp_path / "graph")
    assert (tmp_path / "graph").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
