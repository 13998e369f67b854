"""Graphs in files: the same as in memory, whatever the memory they are written with, and damage is told."""

import os
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed
from unified_cases import graphs, random_graph

from penstock import unified
from penstock.errors import FeatureFileError, RankError
from penstock.unified import _graph_write
from penstock.unified._read_ahead import ReadAhead
from ranks import run_in_ranks


def same(graph, other):
    assert (graph.num_nodes, graph.num_sources) == (other.num_nodes, other.num_sources)
    assert torch.equal(graph.starts, other.starts) and torch.equal(graph.sources, other.sources)
    assert graph.sources.dtype is other.sources.dtype


@pytest.mark.parametrize("memory", ["1GiB", "20KiB", "200B"])
@pytest.mark.parametrize("positions", [True, False])
def test_a_file_holds_the_graph_of_its_edges(tmp_path, memory, positions):
    edge_index, graph = random_graph(num_nodes=700, num_edges=9000)
    path = unified.write_graph(
        tmp_path / "g", edge_index.split(1234, 1), num_nodes=700, memory=memory, positions=positions
    )
    opened = unified.open_graph(path, verify=True)
    same(opened, graph)
    assert torch.equal(opened.positions, graph.positions) if positions else opened.positions is None
    assert [file.name for file in tmp_path.iterdir()] == ["g"]  # nothing else stays on the disk


@pytest.mark.parametrize("memory", ["1GiB", "20KiB", "200B"])
@pytest.mark.parametrize("num_types", [5, 300])
@pytest.mark.parametrize("positions", [True, False])
def test_types_of_edges_stay_with_their_edges(tmp_path, memory, num_types, positions):
    edge_index, graph = random_graph(num_nodes=700, num_edges=9000)
    types = torch.randint(0, num_types, (9000,), generator=torch.Generator().manual_seed(1))
    parts = zip(edge_index.split(1234, 1), types.split(1234), strict=True)
    path = unified.write_graph(tmp_path / "g", parts, num_nodes=700, memory=memory, positions=positions)
    opened = unified.open_graph(path, verify=True)
    same(opened, graph)
    assert opened.types.dtype is (torch.uint8 if num_types <= 256 else torch.int32)
    assert torch.equal(opened.types.long(), types[graph.positions]) and opened.num_types == int(types.max()) + 1
    copied = unified.open_graph(unified.write_graph(tmp_path / "copy", opened), verify=True)
    assert torch.equal(copied.types, opened.types) and copied.num_types == opened.num_types
    assert opened.nbytes == copied.nbytes > graph.starts.nbytes + graph.sources.nbytes


def test_types_that_do_not_fit_are_refused(tmp_path):
    edge_index, types = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 1, 4])
    assert unified.open_graph(unified.write_graph(tmp_path / "g", (edge_index, types), num_types=9)).num_types == 9
    for edges, options, words in (
        ((edge_index, types), {"num_types": 4}, "`num_types` must be above every type of an edge, got 4 and type 4"),
        ((edge_index, types - 1), {}, r"types of edges must be int64 \[3\] from 0"),
        ((edge_index, types[1:]), {}, r"types of edges must be int64 \[3\] from 0"),
        ((edge_index, types.float()), {}, r"types of edges must be int64 \[3\] from 0"),
        ([(edge_index, types), edge_index], {"num_nodes": 1}, "must all have types or none"),
    ):
        with pytest.raises(ValueError, match=words):
            unified.write_graph(tmp_path / "bad", edges, **options)
    assert [file.name for file in tmp_path.iterdir()] == ["g"]


@settings(max_examples=60, deadline=None)
@given(graphs(), st.sampled_from([1, 3, 2**20]), st.booleans())
def test_any_graph_in_parts_of_any_size(tmp_path_factory, case, most_bytes, positions):
    edge_index, num_nodes = case
    path = tmp_path_factory.mktemp("any") / "g"
    unified.write_graph(
        path, iter(edge_index.split(7, 1)), num_nodes=num_nodes, memory=160 * most_bytes, positions=positions
    )
    same(unified.open_graph(path, verify=True), unified.Graph(edge_index, num_nodes))


def test_graphs_and_whole_edge_indexes_are_written(tmp_path):
    edge_index, graph = random_graph()
    same(unified.open_graph(unified.write_graph(tmp_path / "whole", edge_index, num_nodes=200)), graph)
    copied = unified.open_graph(unified.write_graph(tmp_path / "graph", graph), verify=True)
    same(copied, graph)
    assert torch.equal(copied.positions, graph.positions)
    sorted_graph = unified.Graph.from_csc(graph.starts, graph.sources)
    assert unified.open_graph(unified.write_graph(tmp_path / "csc", sorted_graph)).positions is None
    ends = torch.tensor([[9, 0], [1, 0]])
    other = unified.open_graph(unified.write_graph(tmp_path / "two", ends, num_sources=10))
    same(other, unified.Graph(ends, num_sources=10))
    same(unified.open_graph(unified.write_graph(tmp_path / "own", ends)), unified.Graph(ends))
    empty = torch.empty(2, 0, dtype=torch.int64)
    same(unified.open_graph(unified.write_graph(tmp_path / "empty", empty), verify=True), unified.Graph(empty))
    same(unified.open_graph(unified.write_graph(tmp_path / "none", [], num_nodes=3)), unified.Graph(empty, 3))


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("replace", [False, True])
def test_draws_are_those_from_memory(tmp_path, asks, replace):
    edge_index, graph = random_graph()
    opened = unified.open_graph(unified.write_graph(tmp_path / "g", edge_index, num_nodes=200))
    opened.ahead._is_wanted = asks
    for number in range(3):
        opened.ahead._is_wanted = asks
        samples = [
            unified.NeighborSampler(one, [4, -1], replace=replace).sample(torch.arange(0, 200, 9), number=number)
            for one in (graph, opened)
        ]
        for name in ("nodes", "rows", "cols", "edges"):
            assert torch.equal(*(getattr(sample, name) for sample in samples))
    scores = [unified.expected_accesses(one, torch.arange(50), [4, 2], batch_size=10) for one in (graph, opened)]
    assert torch.equal(*scores)


def test_pages_are_asked_for_only_while_some_are_missing(tmp_path):
    edge_index, graph = random_graph(num_nodes=20_000, num_edges=400_000)
    path = unified.write_graph(tmp_path / "g", edge_index, num_nodes=20_000)
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    opened = unified.open_graph(path)
    sampler = unified.NeighborSampler(opened, [5, 5])

    def sample(number):
        return sampler.sample(torch.randperm(20_000)[:500], number=number)

    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if not opened.ahead._is_told:
        pytest.skip("the system does not tell which pages it has")
    sample(0)
    if not opened.ahead._is_wanted:
        pytest.skip("the system kept the file's pages")
    path.read_bytes()  # all of it is in the page cache now
    for number in range(1, 4):
        sample(number)
    assert not opened.ahead._is_wanted
    same(opened, graph)


def test_faults_decide_whether_pages_are_asked_for(monkeypatch):
    faults = iter([0, 1, 100, 200, 300])
    monkeypatch.setattr("penstock.unified._read_ahead._major_faults", lambda: next(faults))
    ahead = ReadAhead(True)
    ahead.after(1000)
    assert not ahead._is_wanted  # one of a thousand was waited for
    ahead.after(1000)
    assert ahead._is_wanted
    ahead._num_absent = 500
    ahead.after(1000)
    assert ahead._is_wanted
    ahead.after(1000)  # none was missing
    assert not ahead._is_wanted


def test_a_graph_in_a_file_is_pickled_as_its_path(tmp_path):
    edge_index, graph = random_graph()
    opened = unified.open_graph(unified.write_graph(tmp_path / "g", edge_index, num_nodes=200))
    text = pickle.dumps(opened)
    assert len(text) < 1000
    same(pickle.loads(text), graph)
    same(pickle.loads(pickle.dumps(graph)), graph)


def test_graphs_of_several_types_of_nodes(tmp_path):
    generator = torch.Generator().manual_seed(0)
    ends = {"writes": (30, 50), "cites": (50, 50)}
    edges = {
        name: torch.stack([torch.randint(count, (400,), generator=generator) for count in sizes])
        for name, sizes in ends.items()
    }
    kinds = {"writes": ("author", "writes", "paper"), "cites": ("paper", "cites", "paper")}
    samples = []
    for is_file in (False, True):
        graphs = {}
        for name, (num_sources, num_nodes) in ends.items():
            graph = unified.Graph(edges[name], num_nodes, num_sources=num_sources)
            if is_file:
                path = unified.write_graph(
                    tmp_path / name, edges[name].split(90, 1), num_nodes=num_nodes, num_sources=num_sources
                )
                graph = unified.open_graph(path)
            graphs[kinds[name]] = graph
        sampler = unified.HeteroNeighborSampler(graphs, [3, 2])
        samples.append(sampler.sample({"paper": torch.arange(0, 50, 7)}, number=1))
    for part in ("nodes", "rows", "cols", "edges"):
        first, second = (getattr(sample, part) for sample in samples)
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_damage_is_told(tmp_path):
    edge_index, _ = random_graph()
    path = unified.write_graph(tmp_path / "g", edge_index, num_nodes=200)
    content = path.read_bytes()

    def refused(damaged, words, **options):
        (tmp_path / "bad").write_bytes(damaged)
        with pytest.raises(FeatureFileError, match=words):
            unified.open_graph(tmp_path / "bad", **options)

    refused(content[:-1], "its header says")
    refused(b"", "not a graph of Penstock")
    refused(content[:100], "its header differs")
    refused(content[:30] + b"x" + content[31:], "its header differs")
    refused(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:], "bytes from 4096", verify=True)
    refused(content[:-1] + bytes([content[-1] ^ 1]), "checksums differ", verify=True)
    with pytest.raises(FileNotFoundError):
        unified.open_graph(tmp_path / "none")
    table = unified.write_features(tmp_path / "rows", torch.ones(3, 4))
    with pytest.raises(FeatureFileError, match="not a graph of Penstock"):
        unified.open_graph(table)


@pytest.mark.parametrize("array", [0, 1])
def test_damage_that_was_not_looked_for_ends_no_process(tmp_path, array):
    edge_index, _ = random_graph()
    path = unified.write_graph(tmp_path / "g", edge_index, num_nodes=200)
    content = bytearray(path.read_bytes())
    start = 4096 + (8 * 5 if array == 0 else 4096)
    for byte in range(start, start + 8 * 190 if array == 0 else start + 4 * 3000, 8 if array == 0 else 4):
        content[byte + 3] = 0x7F
    path.write_bytes(content)
    sampler = unified.NeighborSampler(unified.open_graph(path), [5, 5])
    with pytest.raises(FeatureFileError, match="verify=True"):
        sampler.sample(torch.arange(0, 200, 3))


def test_bad_edges_are_told(tmp_path):
    edges = torch.tensor([[0, 5], [1, 2]])
    for bad, words in [
        (edges - 1, "lowest number is -1"), (torch.tensor([[6], [0]]), "sources up to 6"), (edges.float(), "`edges`"),
        (edges[:1], "`edges`"),
    ]:  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=words):
            unified.write_graph(tmp_path / "g", iter([edges, bad]), num_nodes=6)
    with pytest.raises(ValueError, match="`num_nodes` must be given"):
        unified.write_graph(tmp_path / "g", iter([edges]))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    edge_index, graph = random_graph()
    path = unified.write_graph(tmp_path / "g", edge_index, num_nodes=200)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_graph_write, "write_at", fail)
    with pytest.raises(OSError, match="No space left"):
        unified.write_graph(path, edge_index.flip(0), num_nodes=200)
    same(unified.open_graph(path, verify=True), graph)
    assert [file.name for file in tmp_path.iterdir()] == ["g"]


def _open_together(rank, path, other):
    _, graph = random_graph()
    opened = unified.open_graph(path, verify=True, group=distributed.group.WORLD)
    same(opened, graph)
    with pytest.raises(RankError, match="agree on the graph"):
        unified.open_graph(other if rank else path, group=distributed.group.WORLD)
    with pytest.raises((FeatureFileError, RankError), match="differ from what was written") as caught:
        unified.open_graph(f"{path}-damaged", verify=True, group=distributed.group.WORLD)
    assert isinstance(caught.value, RankError) == (rank == 1)  # rank 0 has read it for both


def test_ranks_open_one_graph(tmp_path):
    edge_index, _ = random_graph()
    path = unified.write_graph(tmp_path / "g", edge_index, num_nodes=200)
    unified.write_graph(tmp_path / "other", edge_index[:, :10], num_nodes=200)
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    (tmp_path / "g-damaged").write_bytes(content)
    run_in_ranks(_open_together, path, tmp_path / "other", directory=tmp_path)
