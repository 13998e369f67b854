"""A graph with typed edges, and optionally typed nodes."""

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.arguments import checked
from penstock.relational._domain import Domain
from penstock.relational._edges import Edges, check_range, edges_of
from penstock.relational._indexes import Indexes
from penstock.relational._registry import Guard, register
from penstock.relational._saved import load_graph, save_graph
from penstock.storages import as_plain
from penstock.tiers import Budget, Size


class RelationalGraph:
    """Edges from sources to targets, each with a type.

    ``edge_index``: ``int64 [2, num_edges]``, sources in the first row. ``edge_type``: ``int64 [num_edges]``, from 0;
    ``None`` for one type. ``num_nodes``: a number, or two for a block whose sources and targets are different nodes.
    ``node_type``: ``int64 [num_nodes]`` in ascending order (two of them for a block); ``None`` for one type.
    Sizes that are not given are the largest index plus one. Indexes are checked once, here: ``ValueError``.

    >>> graph = RelationalGraph(torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([0, 1, 0]))
    >>> graph
    RelationalGraph(num_nodes=3, num_edges=3, num_edge_types=2)
    """

    @checked("RelationalGraph(torch.stack([sources, targets]), edge_type)", num_edge_types=1, num_node_types=1)
    def __init__(
        self,
        edge_index: torch.Tensor,
        edge_type: torch.Tensor | None = None,
        *,
        num_nodes: int | tuple[int, int] | None = None,
        num_edge_types: int | None = None,
        node_type: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_node_types: int | None = None,
    ):
        self.take(edges_of(edge_index, edge_type, num_nodes, num_edge_types, node_type, num_node_types))

    def take(self, edges: Edges) -> None:
        """Become the graph of these edges."""
        self.indexes = Indexes(edges)
        """The indexes built so far."""
        self.device, self.num_edges, self.is_block = edges.device, edges.num_edges, edges.is_block
        self.num_sources, self.num_targets = edges.num_sources, edges.num_targets
        self.num_edge_types, self.num_node_types = edges.num_edge_types, edges.num_node_types
        self.node_type_names: tuple[str, ...] = ()
        """Names of the node types, if the graph was made from named types."""
        self.edge_type_names: tuple[tuple[str, str, str], ...] = ()
        """Source type, relation and target type, in order of edge types."""
        self.number = register(self)
        self.name = str(self.number)
        """The graph's number as text, for arguments of operators."""

    @classmethod
    def of_edges(cls, edges: Edges) -> "RelationalGraph":
        """Make a graph of edges that were checked before; they are not copied."""
        graph = cls.__new__(cls)
        graph.take(edges)
        return graph

    @classmethod
    @checked("RelationalGraph.from_types({('a', 'to', 'b'): edge_index}, {'a': 10, 'b': 20})")
    def from_types(
        cls, edge_index: Mapping[tuple[str, str, str], torch.Tensor], num_nodes: Mapping[str, int]
    ) -> "RelationalGraph":
        """Make a graph from ``int64 [2, num_edges]`` per ``(source type, relation, target type)``.

        Nodes in ``edge_index`` are numbered within their node types. In the graph, nodes and edges are numbered type by
        type, in the order of the mappings; ``node_type_names`` and ``edge_type_names`` have the names.
        """
        starts, total = {}, 0
        for name, count in num_nodes.items():
            starts[name] = total
            total += count
        parts, types = [torch.empty(2, 0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for number, ((source, relation, target), edges) in enumerate(edge_index.items()):
            edges = as_plain("edge_index", edges)
            for end, row in zip((source, target), edges, strict=True):
                if end not in starts:
                    raise ValueError(
                        f"({source}, {relation}, {target}) names the node type {end!r}, but `num_nodes` has only "
                        f"{list(starts)}"
                    )
                check_range(f"a node of type {end!r} in {relation!r}", row, num_nodes[end])
            parts.append(edges + torch.tensor([[starts[source]], [starts[target]]], device=edges.device))
            types.append(torch.full((edges.shape[1],), number, dtype=torch.int64, device=edges.device))
        sizes = torch.tensor(list(num_nodes.values()))
        graph = cls(
            torch.cat(parts[1:] or parts, dim=1),
            torch.cat(types[1:] or types),
            num_nodes=total,
            num_edge_types=max(1, len(edge_index)),
            node_type=torch.arange(len(sizes)).repeat_interleave(sizes).to(parts[-1].device),
            num_node_types=max(1, len(num_nodes)),
        )
        graph.node_type_names, graph.edge_type_names = tuple(num_nodes), tuple(edge_index)
        return graph

    @classmethod
    def from_pyg(cls, data: Any) -> "RelationalGraph":  # any: torch_geometric.data.HeteroData or Data
        """Make a graph from PyG's ``HeteroData``, or from ``Data`` with ``edge_type``."""
        if hasattr(data, "edge_index_dict"):
            return cls.from_types(data.edge_index_dict, {name: data[name].num_nodes for name in data.node_types})
        return cls(data.edge_index, data.edge_type, num_nodes=data.num_nodes)

    @classmethod
    def from_dgl(cls, graph: Any) -> "RelationalGraph":  # any: dgl.DGLGraph
        """Make a graph from a DGL graph, by its edge types or, if it has only one, by ``edata["etype"]``.

        Blocks stay blocks.
        """
        if graph.is_block:
            if len(graph.canonical_etypes) > 1:
                raise ValueError(
                    "a DGL block with several edge types is not supported; convert it first with dgl.block_to_graph "
                    "and to_homogeneous"
                )
            sizes = (graph.num_src_nodes(), graph.num_dst_nodes())
            return cls(torch.stack(graph.edges()), graph.edata.get("etype"), num_nodes=sizes)
        if len(graph.canonical_etypes) > 1 or len(graph.ntypes) > 1:
            edges = {kind: torch.stack(graph.edges(etype=kind)) for kind in graph.canonical_etypes}
            return cls.from_types(edges, {name: graph.num_nodes(name) for name in graph.ntypes})
        return cls(torch.stack(graph.edges()), graph.edata.get("etype"), num_nodes=graph.num_nodes())

    @checked("graph.to('cuda')")
    def to(self, device: torch.device | str) -> "RelationalGraph":
        """Return the graph on another device, on the same account but without its indexes; itself if already there."""
        device = torch.empty(0, device=device).device  # "cuda" means the current device
        if device == self.device:
            return self
        of_sources, of_targets = (types.to(device) for types in self.indexes.edges.node_types)
        graph = RelationalGraph(
            self.edge_index.to(device), self.edge_type.to(device),
            num_nodes=self.num_nodes, num_edge_types=self.num_edge_types,
            node_type=(of_sources, of_targets) if self.is_block else of_sources, num_node_types=self.num_node_types,
        )  # fmt: skip
        graph.node_type_names, graph.edge_type_names = self.node_type_names, self.edge_type_names
        budget = self.indexes.kept.budget
        return graph if budget is None else graph.charge_to(budget)

    @checked("graph.save('graph.pt')")
    def save(self, path: str | Path) -> None:
        """Write the graph and the indexes built so far as safetensors, either completely or not at all."""
        save_graph(self, Path(path))

    @classmethod
    @checked("RelationalGraph.load('graph.pt')")
    def load(cls, path: str | Path) -> "RelationalGraph":
        """Return the graph that `save` wrote, on the CPU. Raises ``ValueError`` for any other file."""
        return load_graph(cls, Path(path))

    @staticmethod
    @checked("RelationalGraph.stream('edges.graph', budget='1GiB')")
    def stream(
        path: str | Path,
        *,
        budget: Size | Budget = "1GiB",
        node_counts: Sequence[int] | Mapping[str, int] | None = None,
        device: torch.device | str = "cpu",
    ) -> "RelationalGraph":
        """Return a graph whose edges stay in a file of `penstock.unified.write_graph`, with types.

        Layers take it as they take a graph in memory, with the same results up to rounding. They go through the edges
        block by block: blocks are as large as ``budget`` allows for all that a layer needs at once of edges, indexes,
        rows and intermediate values, in forward and backward. It is a size, or an account that rooms share, of which
        it then takes what is free on the device. What a layer reads and returns for all nodes is not counted.

        ``node_counts``: the number of nodes of each node type, by name or in order; nodes are numbered type by type.
        ``device``: the device of the tensors that layers get. Raises what `penstock.unified.open_graph` raises, and
        ``ValueError`` for counts that are not those of the file.
        """
        from penstock.relational._stream_graph import StreamedGraph  # it is a graph

        return StreamedGraph(Path(path), budget, node_counts, torch.empty(0, device=device).device)

    @property
    def num_nodes(self) -> int | tuple[int, int]:
        """Number of nodes as given: one number, or two for sources and targets."""
        return self.indexes.edges.num_nodes

    def __repr__(self) -> str:
        return str(self.indexes.edges)

    @checked("graph.charge_to(Budget(host='8GiB'))")
    def charge_to(self, budget: Budget) -> "RelationalGraph":
        """Charge edges, and indexes when layers come to need them, to the device of an account that rooms share.

        The bytes are given back when the graph is garbage-collected. Returns the graph. Raises ``BudgetError`` if they
        do not fit; a layer raises it too if its index does not fit.
        """
        self.indexes.kept.charge_to(budget, self.edge_index, self.edge_type)
        return self

    @property
    def edge_index(self) -> torch.Tensor:
        """Edges ``int64 [2, num_edges]``, sources first."""
        return self.indexes.edges.edge_index

    @property
    def edge_type(self) -> torch.Tensor:
        """Type of each edge, ``int64 [num_edges]``."""
        return self.indexes.edges.edge_type

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sources and edge types that occur together, ``int64 [pairs]`` each.

        They are the rows of ``x[e.src, e.etype]``.
        """
        nodes, types, _ = self.indexes.pairs(Domain.SOURCE_AND_TYPE)
        return nodes, types

    def node_counts(self) -> list[int]:
        """Return the number of sources of each node type."""
        types, _ = self.indexes.edges.node_types
        return [int(count) for count in types.bincount(minlength=self.num_node_types).tolist()]

    def in_degrees(self) -> torch.Tensor:
        """Return the number of edges that enter each target, ``int64 [num_targets]``."""
        return self.edge_index[1].bincount(minlength=self.num_targets)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("number", "name")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.number = register(self)
        self.name = str(self.number)


def graph_of(
    edge_index: torch.Tensor, edge_type: torch.Tensor | None, num_nodes: int | tuple[int, int], num_edge_types: int
) -> RelationalGraph:
    """Return the graph of PyG's index tensors, the same one as long as they live and are not written to."""
    if edge_type is None:
        raise ValueError("edge_index is given without edge_type: conv(x, edge_index, edge_type), or conv(x, graph)")
    return _remembered(
        (edge_index, edge_type),
        (num_nodes, num_edge_types),
        lambda: RelationalGraph(edge_index, edge_type, num_nodes=num_nodes, num_edge_types=num_edge_types),
    )


def graph_of_types(
    edge_index: Mapping[tuple[str, str, str], torch.Tensor], num_nodes: Mapping[str, int]
) -> RelationalGraph:
    """Return the graph of PyG's ``edge_index_dict``, cached too; node types are in the order of ``num_nodes``."""
    return _remembered(
        tuple(edge_index.values()),
        (tuple(edge_index), tuple(num_nodes.items())),
        lambda: RelationalGraph.from_types(edge_index, num_nodes),
    )


def _remembered(
    tensors: tuple[torch.Tensor, ...], rest: Hashable, make: Callable[[], RelationalGraph]
) -> RelationalGraph:
    if any(tensor.is_inference() for tensor in tensors):  # inference tensors have no version counter
        return make()
    key = (*(id(tensor) for tensor in tensors), rest)
    versions = tuple(tensor._version for tensor in tensors)
    with _lock:
        known = _known.get(key)
        if (
            known is not None
            and known.versions == versions
            and all(reference() is tensor for reference, tensor in zip(known.tensors, tensors, strict=True))
        ):
            return known.graph
    graph = make()  # without the lock: two threads may make equal graphs, and the last one stays
    references = tuple(weakref.ref(tensor, functools.partial(_forget, key)) for tensor in tensors)
    with _lock:
        _known[key] = _Known(references, versions, graph)
    return graph


def _forget(key: Hashable, _: Any) -> None:
    _known.pop(key, None)


@dataclass(frozen=True, slots=True)
class _Known:
    """A graph, and the tensors it was made from."""

    tensors: tuple["weakref.ref[torch.Tensor]", ...]
    """Weak references to the tensors, which may be freed: the graph has aliases of what it reads."""
    versions: tuple[int, ...]
    """Versions of the tensors, which count writes."""
    graph: RelationalGraph
    """The graph, with the indexes built so far."""


_known: dict[Hashable, _Known] = {}
_lock = Guard()
