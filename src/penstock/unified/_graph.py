"""A graph stored by the edges that enter each node, its nodes as users name them, and how often each is read."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.arguments import checked, must_be
from penstock.storages import address, as_plain
from penstock.unified._library import library
from penstock.unified._read_ahead import ReadAhead

_MOST_EDGES = 4 * 2**20
"""Number of edges that PyTorch's operators process at once."""
_MOST_CHANCE = 1 - 1e-12
"""The largest probability for which the logarithm of its complement is finite."""


class Graph:
    """A graph with its edges by target.

    The sources of the edges that enter node ``v`` are ``sources[starts[v]:starts[v + 1]]``. It is made from
    ``edge_index`` (``int64 [2, edges]``: sources, then targets, as in PyG) by counting sort; edges keep their order.
    Sources and targets are the same nodes, unless ``num_sources`` gives the number of sources of another type.
    ``Graph.from_csc`` uses the two arrays as they are.

    Raises ``ValueError`` for edges whose ends are not nodes.
    """

    @checked("Graph(torch.stack([sources, targets]))", num_nodes=0, num_sources=0)
    def __init__(self, edge_index: torch.Tensor, num_nodes: int | None = None, num_sources: int | None = None):
        edge_index = as_plain("edge_index", edge_index)
        if edge_index.dim() != 2 or len(edge_index) != 2 or edge_index.dtype is not torch.int64:
            raise ValueError(
                f"edge_index must be int64 of shape [2, edges] with sources above targets, got {edge_index.dtype} of "
                f"shape {tuple(edge_index.shape)}: Graph(torch.stack([sources, targets]))"
            )
        sources, targets = edge_index.cpu().contiguous()
        least = int(edge_index.min()) if edge_index.numel() else 0
        most = [int(ends.max()) + 1 if len(ends) else 0 for ends in (sources, targets)]
        self.num_nodes = num_nodes if num_nodes is not None else most[1] if num_sources is not None else max(most)
        self.num_sources = self.num_nodes if num_sources is None else num_sources
        if least < 0 or most[0] > self.num_sources or most[1] > self.num_nodes:
            raise ValueError(
                f"edges lead from nodes below {most[0]} to nodes below {most[1]}, and the lowest node is {least}, but "
                f"`num_nodes` is {self.num_nodes} and `num_sources` is {self.num_sources}: Graph(edge_index, "
                f"num_nodes={max(most)})"
            )
        self.starts, self.sources, self.positions = by_target(sources, targets, self.num_nodes, self.num_sources)

    starts: torch.Tensor
    """Start of each node's edges, ``int64 [nodes + 1]``."""
    sources: torch.Tensor
    """Source of each edge, ``[edges]``; ``int32`` if node numbers fit, else ``int64``."""
    positions: torch.Tensor | None
    """Number of each edge in ``edge_index``, ``int64 [edges]``; ``None`` if the order is the same."""
    types: torch.Tensor | None = None
    """Type of each edge in the order of ``sources``, ``uint8`` or ``int32 [edges]``, if a file has them."""
    num_types: int = 1
    """Number of edge types."""
    num_nodes: int
    """Number of targets, including isolated ones."""
    num_sources: int
    """Number of sources; equal to ``num_nodes`` if they are the same nodes."""
    ahead: ReadAhead | None = None
    """Reads what a sampler needs of a file, before it needs it; ``None`` if the graph is in memory."""
    path: Path | None = None
    """File in which the arrays are, for `open_graph` in another process; ``None`` if they are in memory."""

    @staticmethod
    @checked("Graph.from_csc(colptr, row)")
    def from_csc(starts: torch.Tensor, sources: torch.Tensor, positions: torch.Tensor | None = None) -> "Graph":
        """Make a graph from arrays as the class describes them; arrays of the right type are not copied."""
        starts, sources = (
            as_plain("starts", starts).to("cpu", torch.int64).contiguous(),
            as_plain("sources", sources).cpu(),
        )
        positions = None if positions is None else as_plain("positions", positions).cpu()
        if starts.dim() != 1 or not len(starts) or int(starts[0]) or int(starts[-1]) != len(sources):
            raise ValueError(
                f"`starts` must go from 0 to the number of edges, {len(sources)}: Graph.from_csc(colptr, row)"
            )
        if bool((starts[1:] < starts[:-1]).any()):
            raise ValueError("`starts` must not decrease: it holds the position at which each node's edges begin")
        graph = Graph.__new__(Graph)
        graph.num_nodes = graph.num_sources = len(starts) - 1
        graph.starts, graph.positions = starts, positions
        graph.sources = sources.contiguous() if sources.dtype is torch.int32 else sources.to(torch.int64).contiguous()
        if len(sources) and (int(sources.min()) < 0 or int(sources.max()) >= graph.num_nodes):
            raise ValueError(f"`sources` must hold nodes below {graph.num_nodes}, got a node outside of that range")
        return graph

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.path is None:
            return super().__reduce_ex__(protocol)
        from penstock.unified._graph_file import open_graph  # it makes graphs

        return open_graph, (self.path,)

    def __repr__(self) -> str:
        return f"Graph({self.num_nodes:,} nodes, {self.num_edges:,} edges)"

    @property
    def num_edges(self) -> int:
        """Number of edges of all nodes."""
        return len(self.sources)

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        arrays = (self.starts, self.sources, self.positions, self.types)
        return sum(array.nbytes for array in arrays if array is not None)

    def degrees(self) -> torch.Tensor:
        """Return the number of edges that enter each node, ``int64 [nodes]``."""
        return self.starts[1:] - self.starts[:-1]

    def out_degrees(self) -> torch.Tensor:
        """Return the number of edges that leave each source, ``int64 [sources]``: how often a sampler can reach it."""
        return torch.bincount(self.sources, minlength=self.num_sources)


@checked("penstock.unified.expected_accesses(graph, seeds, [10, 5], batch_size=512)", batch_size=1)
def expected_accesses(
    graph: Graph, seeds: torch.Tensor, fanouts: Sequence[int], *, batch_size: int, replace: bool = False
) -> torch.Tensor:
    """Return how often each node's row is expected to be read in a mini-batch, ``float64 [nodes]``, 0 to 1.

    This is reverse PageRank from the training seeds along sampled edges, hop by hop. Each edge is weighted by the
    probability that its target draws it (Data Tiering, arXiv 2111.05894, section 4.2). A row is read once per
    mini-batch however often its node is visited; probabilities are multiplied as if a node's visits were independent.
    Cost: one pass over the edges per hop. Raises ``ValueError`` for a graph whose sources are nodes of another type.
    """
    if graph.num_sources != graph.num_nodes:
        raise ValueError(
            f"`graph` must have the same nodes as sources and as targets, got {graph.num_sources} sources and "
            f"{graph.num_nodes} targets: the nodes of two types would be taken for one another. Count what a "
            "HeteroNeighborSampler reads instead: count_accesses((sample.nodes['a'] for sample in samples), num_rows)"
        )
    degrees = graph.degrees().double()
    reached = torch.zeros(graph.num_nodes, dtype=torch.float64, device="cpu")
    frontier = torch.zeros(graph.num_nodes, dtype=torch.float64, device="cpu")
    seeds = as_seeds(seeds, graph.num_nodes)
    frontier[seeds] = min(1.0, batch_size / max(1, len(seeds)))
    for fanout in fanouts:
        reached += frontier
        share = _chance(degrees, fanout, replace=replace)
        missed = _along_edges(graph, torch.log1p(-(frontier * share).clamp(max=_MOST_CHANCE)))
        # only nodes that are new in this hop: a row is read once; plain PageRank would overestimate hubs
        frontier = -torch.expm1(missed) * (1 - reached)
    return (reached + frontier).clamp_(0, 1)


@checked("penstock.unified.count_accesses((batch.nodes for batch in loader), num_rows=len(features))", num_rows=0)
def count_accesses(indexes: Iterable[torch.Tensor | Any], num_rows: int) -> torch.Tensor:
    """Count how often each row is read in a trial epoch, ``float64 [num_rows]``.

    ``indexes`` yields the rows of every mini-batch, or mini-batches with ``n_id`` (PyG's loaders) or ``nodes`` (ours).
    """
    counts = torch.zeros(num_rows, dtype=torch.float64, device="cpu")
    for batch in indexes:
        rows = batch if isinstance(batch, torch.Tensor) else getattr(batch, "n_id", getattr(batch, "nodes", None))
        if not isinstance(rows, torch.Tensor) or rows.is_floating_point():
            example = "count_accesses((batch.nodes for batch in loader), num_rows=len(features))"
            raise must_be("indexes", "tensors of row numbers, or batches with `n_id` or `nodes`", batch, example)
        rows = as_plain("indexes", rows).reshape(-1).cpu()
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < num_rows:
            raise ValueError(
                f"`num_rows` must be above every row that is read, got {num_rows}; rows from {int(rows.min())} to "
                f"{int(rows.max())} are read: count_accesses(indexes, num_rows=len(features))"
            )
        counts.index_add_(0, rows, torch.ones(len(rows), dtype=torch.float64, device="cpu"))
    return counts


def as_seeds(seeds: Any, num_nodes: int) -> torch.Tensor:
    """Return node numbers ``int64 [seeds]`` from numbers of any shape, or from a mask ``bool [num_nodes]``.

    Raises ``IndexError`` for seeds that are not nodes and masks of another length, ``TypeError`` for anything but a
    tensor of whole numbers.
    """
    if not isinstance(seeds, torch.Tensor):
        raise TypeError(f"`seeds` must be a tensor of node numbers, got {type(seeds).__name__}: torch.as_tensor(seeds)")
    seeds = as_plain("seeds", seeds)
    if seeds.dtype is torch.bool:
        if tuple(seeds.shape) != (num_nodes,):
            raise IndexError(
                f"a mask of seeds must have one entry for each of {num_nodes} nodes, got {tuple(seeds.shape)}: "
                "mask = torch.zeros(num_nodes, dtype=torch.bool); mask[nodes] = True"
            )
        seeds = seeds.nonzero()
    if seeds.dtype is torch.uint8:
        raise TypeError("`seeds` must not be uint8, which could mean numbers or a mask: seeds.long(), or seeds.bool()")
    if seeds.numel() and (seeds.dtype.is_floating_point or seeds.dtype.is_complex):
        raise TypeError(f"`seeds` must be whole numbers, got {seeds.dtype}: seeds.long()")
    nodes: torch.Tensor = seeds.reshape(-1).to(torch.int64).contiguous()
    if len(nodes) and (int(nodes.min()) < 0 or int(nodes.max()) >= num_nodes):
        raise IndexError(
            f"`seeds` must be from 0 to {num_nodes - 1}, got numbers from {int(nodes.min())} to {int(nodes.max())}"
        )
    return nodes


def _chance(degrees: torch.Tensor, fanout: int, *, replace: bool) -> torch.Tensor:
    """Return the probability that a node draws a given one of its edges."""
    if fanout < 0:
        return (degrees > 0).double()
    if replace:
        return 1 - (1 - 1 / degrees.clamp(min=1)) ** fanout
    return (fanout / degrees.clamp(min=1)).clamp(max=1)


def _along_edges(graph: Graph, values: torch.Tensor) -> torch.Tensor:
    """Add the value of every edge's target to its source."""
    sums = torch.zeros(graph.num_nodes, dtype=torch.float64, device="cpu")
    degrees, begin = graph.degrees(), 0
    while begin < graph.num_nodes:  # nodes with about that many edges at once
        wanted = graph.starts[begin] + _MOST_EDGES
        end = max(begin + 1, int(torch.searchsorted(graph.starts, wanted, right=True)) - 1)
        end = min(end, graph.num_nodes)
        added = values[begin:end].repeat_interleave(degrees[begin:end])
        sums.index_add_(0, graph.sources[int(graph.starts[begin]) : int(graph.starts[end])].long(), added)
        begin = end
    return sums


def by_target(
    sources: torch.Tensor, targets: torch.Tensor, num_nodes: int, num_sources: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return ``starts``, ``sources`` and ``positions`` of a graph with these edges, ``int64 [edges]`` each."""
    if bool((targets[1:] >= targets[:-1]).all()):  # already in order
        starts = torch.zeros(num_nodes + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(torch.bincount(targets, minlength=num_nodes), 0, out=starts[1:])
        return starts, sources.to(type_for(num_sources)).clone(), None
    compiled = library("sampling")
    if compiled is None:
        order = targets.argsort(stable=True)
        starts = torch.zeros(num_nodes + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(torch.bincount(targets, minlength=num_nodes), 0, out=starts[1:])
        return starts, sources[order].to(type_for(num_sources)), order
    starts = torch.empty(num_nodes + 1, dtype=torch.int64, device="cpu")
    index = torch.empty(len(sources), dtype=type_for(num_sources), device="cpu")
    positions = torch.empty(len(sources), dtype=torch.int64, device="cpu")
    compiled.penstock_by_target(
        address(sources), address(targets), len(sources), num_nodes, index.element_size(),
        address(starts), address(index), address(positions),
    )  # fmt: skip
    return starts, index, positions


def type_for(num_nodes: int) -> torch.dtype:
    """Return the dtype in which numbers of so many nodes are kept."""
    return torch.int32 if num_nodes < 2**31 else torch.int64
