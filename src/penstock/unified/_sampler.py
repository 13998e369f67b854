"""Samplers of a mini-batch's neighborhood: in each hop, the new nodes draw some of their edges."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.arguments import checked
from penstock.unified._draw import Drawer, mixed, numbering_for
from penstock.unified._graph import Graph, as_seeds

EdgeType = tuple[str, str, str]
"""Type of the source, name, type of the target."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """The nodes around a mini-batch's seeds, and the drawn edges. Tensors are on the sampler's device."""

    nodes: torch.Tensor
    """Node numbers in the graph, seeds first, then hop by hop, ``int64 [nodes]``."""
    rows: torch.Tensor
    """Source of each edge, as a place in ``nodes``, ``int64 [edges]``."""
    cols: torch.Tensor
    """Target of each edge, as a place in ``nodes``."""
    edges: torch.Tensor
    """Number of each edge in the graph as it was given, ``int64 [edges]``."""
    num_sampled_nodes: tuple[int, ...]
    """Number of seeds, then of the new nodes of every hop."""
    num_sampled_edges: tuple[int, ...]
    """Number of edges of every hop."""
    seeds: torch.Tensor
    """Place of each given seed in ``nodes``, ``int64 [seeds]``; repeated seeds share a place."""

    @property
    def edge_index(self) -> torch.Tensor:
        """Edges ``int64 [2, edges]``, sources above targets, as places in ``nodes``."""
        return torch.stack([self.rows, self.cols])

    def block(self, layer: int) -> "Block":
        """Return the edges for layer ``layer`` of a model, from 0; only the first layer uses the last hop."""
        hops = len(self.num_sampled_edges) - layer
        if not 0 < hops <= len(self.num_sampled_edges):
            raise IndexError(
                f"layer {layer} does not exist: {len(self.num_sampled_edges)} hops were sampled, one for each layer"
            )
        count = sum(self.num_sampled_edges[:hops])
        return Block(
            edge_index=torch.stack([self.rows[:count], self.cols[:count]]), edges=self.edges[:count],
            num_sources=sum(self.num_sampled_nodes[: hops + 1]), num_targets=sum(self.num_sampled_nodes[:hops]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """The edges of one layer. The targets come first among the sources."""

    edge_index: torch.Tensor
    """Edges ``int64 [2, edges]``, sources above targets."""
    edges: torch.Tensor
    """Number of each edge in the graph, ``int64 [edges]``."""
    num_sources: int
    """Number of nodes whose values the layer reads."""
    num_targets: int
    """Number of nodes whose values it computes."""


class NeighborSampler:
    """A sampler that draws up to ``fanouts[hop]`` of the edges that enter each node; -1 takes all of them.

    With ``device`` on CUDA the graph is registered and kernels draw from it over the link; otherwise the CPU's cores
    do. ``replace`` draws with replacement.

    Raises ``ValueError`` for fanouts that are not positive or -1.
    """

    @checked("NeighborSampler(graph, [10, 5])")
    def __init__(
        self, graph: Graph, fanouts: Sequence[int], *, replace: bool = False, device: torch.device | str = "cpu"
    ):
        if graph.num_sources != graph.num_nodes:
            raise ValueError(
                f"`graph` must have the same nodes as sources and as targets, got {graph.num_sources} sources and "
                f"{graph.num_nodes} targets; for two types of nodes: "
                "HeteroNeighborSampler({('a', 'to', 'b'): graph}, ...)"
            )
        self.graph, self.fanouts, self.replace = graph, checked_fanouts(fanouts), replace
        self.device = torch.device(device)
        self._drawer = Drawer(graph, self.device)

    @checked("sampler.sample(torch.tensor([0, 1]))")
    def sample(self, seeds: torch.Tensor, *, number: int | None = None) -> Sample:
        """Sample the neighborhood of ``seeds``, which are node numbers ``[seeds]`` or a mask of all nodes.

        The same ``number`` gives the same draws; without one, PyTorch's generator supplies it. Raises ``IndexError``
        for seeds that are not nodes, ``TypeError`` for anything but a tensor of whole numbers.
        """
        number = _number(number)
        numbering = numbering_for(self.device)
        places = numbering.add(as_seeds(seeds, self.graph.num_nodes).to(self.device))
        begin, nodes = 0, [numbering.count]
        rows, cols, edges = [], [], []
        for hop, fanout in enumerate(self.fanouts):
            frontier, first, begin = numbering.nodes()[begin:], begin, numbering.count
            drawn = self._drawer.draw(frontier, fanout, mixed(number, hop), replace=self.replace)
            rows.append(numbering.add(drawn.neighbours))
            cols.append(_owners(drawn.offsets, first))
            edges.append(self._drawer.edge_numbers(drawn.edges))
            nodes.append(numbering.count - begin)
        return Sample(
            nodes=numbering.nodes(), rows=torch.cat(rows), cols=torch.cat(cols), edges=torch.cat(edges),
            num_sampled_nodes=tuple(nodes), num_sampled_edges=tuple(map(len, edges)), seeds=places,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeteroSample:
    """Like ``Sample``, by type of node and of edge."""

    nodes: dict[str, torch.Tensor]
    """Node numbers within their type; those of the seeds' type begin with the seeds."""
    rows: dict[EdgeType, torch.Tensor]
    """Source of each edge, as a place in ``nodes`` of the source's type."""
    cols: dict[EdgeType, torch.Tensor]
    """Target of each edge, as a place in ``nodes`` of the target's type."""
    edges: dict[EdgeType, torch.Tensor]
    """Number of each edge in that type's graph."""
    num_sampled_nodes: dict[str, tuple[int, ...]]
    """Number of seeds, then of the new nodes of every hop."""
    num_sampled_edges: dict[EdgeType, tuple[int, ...]]
    """Number of edges of every hop."""
    seeds: dict[str, torch.Tensor]
    """Place of each given seed in ``nodes``."""


class HeteroNeighborSampler:
    """A ``NeighborSampler`` with a graph for each edge type: new nodes draw from every type that enters them.

    ``fanouts`` is one list for all edge types, or a list for each.
    """

    @checked("HeteroNeighborSampler({('paper', 'cites', 'paper'): graph}, [10, 5])")
    def __init__(
        self,
        graphs: Mapping[EdgeType, Graph],
        fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]],
        *,
        replace: bool = False,
        device: torch.device | str = "cpu",
    ):
        self.graphs, self.replace, self.device = dict(graphs), replace, torch.device(device)
        by_type = fanouts if isinstance(fanouts, Mapping) else dict.fromkeys(self.graphs, fanouts)
        if set(by_type) != set(self.graphs) or not self.graphs:
            raise ValueError(
                f"`fanouts` must name the edge types of the graphs, {sorted(self.graphs)}, got {sorted(by_type)}"
            )
        self.fanouts = {edge_type: checked_fanouts(by_type[edge_type]) for edge_type in self.graphs}
        if len({len(fanouts) for fanouts in self.fanouts.values()}) != 1:
            raise ValueError(
                "all edge types must have the same number of fanouts, one for each hop; a fanout of 0 samples no "
                "edges of a type"
            )
        self.num_nodes: dict[str, int] = {}
        for (source, _, target), graph in self.graphs.items():
            for name, count in ((source, graph.num_sources), (target, graph.num_nodes)):
                if self.num_nodes.setdefault(name, count) != count:
                    raise ValueError(
                        f"all graphs must have the same number of nodes of type {name!r}, got {self.num_nodes[name]} "
                        f"and {count}"
                    )
        self._drawers = {edge_type: Drawer(graph, self.device) for edge_type, graph in self.graphs.items()}

    @checked("sampler.sample({'paper': torch.tensor([0, 1])})")
    def sample(self, seeds: Mapping[str, torch.Tensor], *, number: int | None = None) -> HeteroSample:
        """Sample the neighborhood of ``seeds``, which are node numbers by type.

        ``number`` and the errors are those of ``NeighborSampler.sample``.
        """
        number = _number(number)
        numberings = {name: numbering_for(self.device) for name in self.num_nodes}
        places = {
            name: numberings[name].add(as_seeds(nodes, self.num_nodes[name]).to(self.device))
            for name, nodes in seeds.items()
        }
        begins = dict.fromkeys(numberings, 0)
        counts = {name: [numbering.count] for name, numbering in numberings.items()}
        rows: dict[EdgeType, list[torch.Tensor]] = {edge_type: [] for edge_type in self.graphs}
        cols: dict[EdgeType, list[torch.Tensor]] = {edge_type: [] for edge_type in self.graphs}
        edges: dict[EdgeType, list[torch.Tensor]] = {edge_type: [] for edge_type in self.graphs}
        seed_numbers = itertools.count()
        for hop in range(len(next(iter(self.fanouts.values())))):
            ends = {name: numbering.count for name, numbering in numberings.items()}
            for edge_type, drawer in self._drawers.items():
                source, _, target = edge_type
                frontier = numberings[target].nodes()[begins[target] : ends[target]]
                seed = mixed(number, next(seed_numbers))
                drawn = drawer.draw(frontier, self.fanouts[edge_type][hop], seed, replace=self.replace)
                rows[edge_type].append(numberings[source].add(drawn.neighbours))
                cols[edge_type].append(_owners(drawn.offsets, begins[target]))
                edges[edge_type].append(drawer.edge_numbers(drawn.edges))
            begins = ends
            for name, numbering in numberings.items():
                counts[name].append(numbering.count - ends[name])
        return HeteroSample(
            nodes={name: numbering.nodes() for name, numbering in numberings.items()},
            rows={edge_type: torch.cat(parts) for edge_type, parts in rows.items()},
            cols={edge_type: torch.cat(parts) for edge_type, parts in cols.items()},
            edges={edge_type: torch.cat(parts) for edge_type, parts in edges.items()},
            num_sampled_nodes={name: tuple(added) for name, added in counts.items()},
            num_sampled_edges={edge_type: tuple(map(len, parts)) for edge_type, parts in edges.items()}, seeds=places,
        )  # fmt: skip


def checked_fanouts(fanouts: Sequence[int]) -> tuple[int, ...]:
    """Return the fanouts as a tuple. Raises ``ValueError`` for invalid ones."""
    if not fanouts or any(isinstance(fanout, bool) or not isinstance(fanout, int) or fanout < -1 for fanout in fanouts):
        raise ValueError(
            "`fanouts` must be numbers of neighbors to draw, one for each hop, or -1 for all neighbors, got "
            f"{fanouts!r}: fanouts=[10, 5]"
        )
    return tuple(fanouts)


def _number(number: int | None) -> int:
    return int(torch.randint(2**62, (), device="cpu")) if number is None else number


def _owners(offsets: torch.Tensor, first: int) -> torch.Tensor:
    """Return the node of every draw, as a place."""
    size = len(offsets) - 1
    return torch.arange(first, first + size, device=offsets.device).repeat_interleave(offsets[1:] - offsets[:-1])
