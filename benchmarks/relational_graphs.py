"""Graphs on which relational layers are measured: real ones next to the checkout, and synthetic ones.

A synthetic graph has the published numbers of nodes, edges and types, and a stated share of distinct (source, type)
pairs, since compaction depends on it: with a ratio of 1 nothing is shared.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.common import data_folder
from penstock.relational import RelationalGraph, read_id_file, read_ntriples


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """Index tensors, before any index is built."""

    name: str
    """Name of the graph."""
    edge_index: torch.Tensor
    """Source and target of each edge, ``int64 [2, edges]``."""
    edge_type: torch.Tensor
    """Type of each edge, ``int64 [edges]``."""
    num_nodes: int
    """Number of nodes, which is the number of rows of features."""
    num_edge_types: int
    """Number of edge types, which is the number of matrices of a layer."""
    node_type: torch.Tensor | None = None
    """``int64 [num_nodes]``, for layers that know node types; ``None``: one for all."""

    @property
    def distinct(self) -> float:
        """Number of distinct pairs of source and type over the number of edges."""
        return len(torch.unique(self.edge_type * self.num_nodes + self.edge_index[0])) / self.edge_index.shape[1]

    def to(self, device: str) -> "Edges":
        """Return the tensors on another device."""
        node_type = None if self.node_type is None else self.node_type.to(device)
        return replace(
            self, edge_index=self.edge_index.to(device), edge_type=self.edge_type.to(device), node_type=node_type
        )

    def graph(self) -> RelationalGraph:
        """Return the graph, without any index yet."""
        return RelationalGraph(
            self.edge_index, self.edge_type, num_nodes=self.num_nodes, num_edge_types=self.num_edge_types
        )


def knowledge_graph(folder: str) -> Edges:
    """Return the training triples, unchanged."""
    triples = read_id_file(data_folder() / folder / "train2id.txt")
    counts = {"fb15k237": (14_541, 237), "wn18rr": (40_943, 11)}[folder]
    return Edges(
        name={"fb15k237": "FB15k-237", "wn18rr": "WN18RR"}[folder],
        edge_index=triples[:, :2].t().contiguous(),
        edge_type=triples[:, 2].contiguous(),
        num_nodes=counts[0],
        num_edge_types=counts[1],
    )


def aifb() -> Edges:
    """Return AIFB with inverse edges."""
    graph = read_ntriples(data_folder() / "aifb" / "aifb_stripped.nt.gz", inverses=True)
    return Edges(
        name="AIFB",
        edge_index=graph.edge_index,
        edge_type=graph.edge_type,
        num_nodes=len(graph.nodes),
        num_edge_types=len(graph.relations),
    )


def aifb_by_class() -> Edges:
    """Return AIFB with inverse edges, nodes typed by their first ``rdf:type``; nodes without one get an extra type."""
    graph = read_ntriples(data_folder() / "aifb" / "aifb_stripped.nt.gz", inverses=True)
    relation = next(number for name, number in graph.relations.items() if name.endswith("22-rdf-syntax-ns#type>"))
    chosen = graph.edge_type == relation
    subject, kind = graph.edge_index[:, chosen].flip(1)
    kinds, number = kind.unique(return_inverse=True)
    node_type = torch.full((len(graph.nodes),), len(kinds))
    node_type[subject] = number
    return Edges(
        name="AIFB by class", edge_index=graph.edge_index, edge_type=graph.edge_type, num_nodes=len(graph.nodes),
        num_edge_types=len(graph.relations), node_type=node_type,
    )  # fmt: skip


def slice_of_mag(share: float) -> Edges:
    """Return four node types and four relations with their inverses, in the numbers of ogbn-mag times ``share``."""
    generator = torch.Generator().manual_seed(0)
    nodes = {"paper": 736_389, "author": 1_134_649, "institution": 8_740, "field": 59_965}
    sizes = [int(count * share) for count in nodes.values()]
    starts = dict(zip(nodes, torch.tensor([0, *sizes]).cumsum(0).tolist(), strict=False))
    relations = {
        ("author", "institution"): 1_043_998, ("author", "paper"): 7_145_660, ("paper", "paper"): 5_416_271,
        ("paper", "field"): 7_505_078,
    }  # fmt: skip
    index, types = [], []
    for (source, target), count in relations.items():
        ends = []
        for end in (source, target):
            drawn = torch.rand(int(count * share), generator=generator) ** 2  # low numbers occur more often
            ends.append(starts[end] + (drawn * int(nodes[end] * share)).long())
        for pair in (ends, ends[::-1]):
            types.append(torch.full((len(ends[0]),), len(index)))
            index.append(torch.stack(pair))
    return Edges(
        name="MAG slice", edge_index=torch.cat(index, 1), edge_type=torch.cat(types), num_nodes=sum(sizes),
        num_edge_types=len(index), node_type=torch.arange(4).repeat_interleave(torch.tensor(sizes)),
    )  # fmt: skip


def synthetic(name: str, num_nodes: int, num_edges: int, num_types: int, distinct: float, hub: float = 0.0) -> Edges:
    """Return random edges with ``distinct`` pairs of source and type; ``hub`` of the edges enter node 0."""
    generator = torch.Generator().manual_seed(0)
    num_pairs = max(1, int(distinct * num_edges))
    pairs = torch.randint(num_nodes * num_types, (num_pairs,), generator=generator)
    chosen = torch.cat([pairs, pairs[torch.randint(num_pairs, (num_edges - num_pairs,), generator=generator)]])
    target = torch.randint(num_nodes, (num_edges,), generator=generator)
    target[: int(hub * num_edges)] = 0
    return Edges(
        name=name,
        edge_index=torch.stack([chosen % num_nodes, target]),
        edge_type=chosen // num_nodes,
        num_nodes=num_nodes,
        num_edge_types=num_types,
    )


GRAPHS: dict[str, Callable[[], Edges]] = {
    "AIFB": aifb,
    "FB15k-237": lambda: knowledge_graph("fb15k237"),
    "WN18RR": lambda: knowledge_graph("wn18rr"),
    "MUTAG-like": lambda: synthetic("MUTAG-like", 27_163, 148_100, 50, 0.5),
    "BGS-like": lambda: synthetic("BGS-like", 94_806, 672_884, 122, 0.5),
    "AIFB by class": aifb_by_class,
    "AM-like": lambda: synthetic("AM-like", 881_680, 5_668_682, 108, 0.5),
    "MAG slice": lambda: slice_of_mag(0.05),
    "MAG": lambda: slice_of_mag(1.0),
    "WikiKG2-like": lambda: synthetic("WikiKG2-like", 2_500_604, 16_109_182, 535, 0.5),
    "hub": lambda: synthetic("hub", 50_000, 400_000, 20, 0.7, hub=0.25),
    "small": lambda: synthetic("small", 500, 4_000, 8, 0.5),
}
