"""Graphs from files and from other libraries' objects."""

import gzip

import pytest
import torch

from penstock.relational import RelationalGraph, read_id_file, read_ntriples

TRIPLES = """# a comment
<a> <knows> <b> .
<b> <knows> _:c .   # another

<a> <name> "An \\"A\\" . <x>"@en .
_:c <age> "3"^^<int> .
"""


@pytest.mark.parametrize("is_packed", [False, True])
def test_ntriples(tmp_path, is_packed):
    path = tmp_path / ("graph.nt.gz" if is_packed else "graph.nt")
    with gzip.open(path, "wt") if is_packed else path.open("w") as file:
        file.write(TRIPLES)
    actual = read_ntriples(path)
    assert list(actual.relations) == ["<knows>", "<name>", "<age>"]
    assert actual.edge_index.tolist() == [[0, 1, 0, 2], [1, 2, 3, 4]]
    assert actual.edge_type.tolist() == [0, 0, 1, 2]
    both = read_ntriples(path, inverses=True)
    assert both.edge_index[:, 4:].tolist() == [[1, 2, 3, 4], [0, 1, 0, 2]]
    assert both.edge_type.tolist() == [0, 0, 1, 2, 3, 3, 4, 5]
    assert (both.graph().num_nodes, both.graph().num_edge_types) == (5, 6)


@pytest.mark.parametrize("line", ["<a> <b> .", "<a> <b> <c>", "a b c .", '"literal" <b> <c> .'])
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "graph.nt"
    path.write_text(f"<a> <b> <c> .\n{line}\n")
    with pytest.raises(ValueError, match="graph.nt:2: expected a triple"):
        read_ntriples(path)


def test_id_files(tmp_path):
    path = tmp_path / "train2id.txt"
    path.write_text("2\n0 1 0\n1 2 1\n")
    assert read_id_file(path).tolist() == [[0, 1, 0], [1, 2, 1]]
    path.write_text("0\n")
    assert read_id_file(path).shape == (0, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x\n", "expected the number of triples"),
        ("2\n0 1 0\n", "says 2 triples, but it has 1 lines"),
        ("1\n0 1 a\n", "in whole numbers"),
    ],
)
def test_broken_id_files_are_refused(tmp_path, text, message):
    path = tmp_path / "train2id.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_id_file(path)


def test_named_types_are_numbered_in_order():
    edges = {("a", "x", "b"): torch.tensor([[0, 1], [2, 0]]), ("b", "y", "a"): torch.tensor([[1], [1]])}
    graph = RelationalGraph.from_types(edges, {"a": 2, "b": 3})
    assert graph.edge_index.tolist() == [[0, 1, 3], [4, 2, 1]]
    assert graph.edge_type.tolist() == [0, 0, 1]
    assert graph.node_counts() == [2, 3]
    assert (graph.node_type_names, graph.edge_type_names) == (("a", "b"), tuple(edges))
    with pytest.raises(ValueError, match="names the node type 'c'"):
        RelationalGraph.from_types({("a", "x", "c"): torch.tensor([[0], [0]])}, {"a": 2})
    with pytest.raises(ValueError, match="a node of type 'b'"):
        RelationalGraph.from_types({("a", "x", "b"): torch.tensor([[0], [9]])}, {"a": 2, "b": 3})


def test_from_pyg():
    data = pytest.importorskip("torch_geometric.data")
    hetero = data.HeteroData()
    hetero["a"].x, hetero["b"].x = torch.ones(2, 4), torch.ones(3, 4)
    hetero["a", "x", "b"].edge_index = torch.tensor([[0, 1], [2, 0]])
    graph = RelationalGraph.from_pyg(hetero)
    assert (graph.num_nodes, graph.num_edges, graph.num_node_types) == (5, 2, 2)
    plain = data.Data(edge_index=torch.tensor([[0], [1]]), edge_type=torch.tensor([3]), num_nodes=7)
    graph = RelationalGraph.from_pyg(plain)
    assert (graph.num_nodes, graph.num_edge_types) == (7, 4)


def test_from_dgl():
    """A stand-in with the few methods that are called: DGL's wheels do not import beside today's PyTorch."""

    class Graph:
        ntypes, is_block = ("n",), True
        canonical_etypes = (("n", "e", "n"),)
        edata = {"etype": torch.tensor([1, 0])}

        def edges(self, etype=None):
            return torch.tensor([0, 3]), torch.tensor([1, 0])

        def num_src_nodes(self):
            return 4

        def num_dst_nodes(self):
            return 2

    graph = RelationalGraph.from_dgl(Graph())
    assert (graph.num_nodes, graph.num_edge_types, graph.is_block) == ((4, 2), 2, True)
