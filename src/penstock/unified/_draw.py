"""Drawing neighbors of nodes, by compiled loops, by a kernel or by PyTorch, and numbering the nodes drawn.

Draws without replacement use Floyd's method (Bentley and Floyd, CACM 30(9), 1987), which makes every subset equally
likely. Random numbers are computed from counters: a node's draws depend only on the seed and the node, not on the
number of threads, and all three ways draw the same.
"""

import functools
from typing import Any, NamedTuple

import torch

from penstock.errors import FeatureFileError
from penstock.storages import address
from penstock.unified._gather import has_triton, launch
from penstock.unified._graph import Graph
from penstock.unified._library import library, threads_for
from penstock.unified._tensor import UnifiedTensor, wrap

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
_BLOCK = 64
_MOST_SLOTS = 128
"""The most draws per node that the kernel can hold."""


class EdgeDraws(NamedTuple):
    """The draws of several nodes."""

    offsets: torch.Tensor
    """Start of each node's draws, ``int64 [nodes + 1]``."""
    neighbours: torch.Tensor
    """Sources of the drawn edges, ``int64 [draws]``."""
    edges: torch.Tensor
    """Positions of the drawn edges in the graph's arrays."""


class Drawer:
    """A drawer of neighbors from one graph on one device."""

    def __init__(self, graph: Graph, device: torch.device):
        self.graph, self.device = graph, device
        self._on_link: tuple[UnifiedTensor, UnifiedTensor] | None = None
        self._positions: torch.Tensor | None = graph.positions
        if device.type == "cuda" and graph.path is None:  # to register a file's map would keep all of it in memory
            self._on_link = wrap(graph.starts), wrap(graph.sources)
            self._positions = None if graph.positions is None else wrap(graph.positions)

    def draw(self, nodes: torch.Tensor, fanout: int, seed: int, *, replace: bool) -> EdgeDraws:
        """Draw up to ``fanout`` (-1: all) of the edges that enter each node."""
        replace = replace and fanout > 0
        link = self._on_link
        if link is None and self.device.type == "cpu":
            return draw(self.graph, nodes, fanout, seed, replace=replace)
        if (
            link is None
            or not 0 < fanout <= _MOST_SLOTS
            or not has_triton()
            or not all(array.is_registered for array in link)
        ):
            draws = draw(self.graph, nodes.cpu(), fanout, seed, replace=replace)
            return EdgeDraws(*(tensor.to(self.device) for tensor in draws))
        with torch.cuda.device(self.device):
            for array in link:
                array.in_place.before(self.device, writes=False)
            draws = draw_by_kernel(self.graph, nodes, fanout, seed, replace=replace)
            for array in link:
                array.in_place.after(self.device, writes=False)
            return draws

    def edge_numbers(self, edges: torch.Tensor) -> torch.Tensor:
        """Return the numbers of these edges in the graph as the user gave it."""
        if self._positions is None:
            return edges
        if self.graph.ahead is None:
            return self._positions[edges]
        edges = edges.cpu()
        self.graph.ahead.before(self._positions, edges)
        return self._positions[edges].to(self.device)


def draw(graph: Graph, nodes: torch.Tensor, fanout: int, seed: int, *, replace: bool) -> EdgeDraws:
    """Draw on the CPU's cores."""
    compiled = library("sampling")
    if compiled is None:
        return draw_by_torch(graph, nodes, fanout, seed, replace=replace)
    ahead = graph.ahead
    if ahead is not None:
        ahead.before(graph.starts, nodes)
    offsets = torch.empty(len(nodes) + 1, dtype=torch.int64, device="cpu")
    count = compiled.penstock_sample_offsets(
        address(graph.starts), graph.num_edges, address(nodes), len(nodes), fanout, int(replace), address(offsets),
    )  # fmt: skip
    if count < 0:
        raise _damage(graph)
    neighbours, edges = (
        torch.empty(count, dtype=torch.int64, device="cpu"),
        torch.empty(count, dtype=torch.int64, device="cpu"),
    )
    compiled.penstock_sample(
        address(graph.starts), address(graph.sources), graph.sources.element_size(), address(nodes),
        len(nodes), int(replace), seed, address(offsets), None if ahead is not None else address(neighbours),
        address(edges), threads_for(count * 64),
    )  # fmt: skip
    if ahead is not None:
        ahead.before(graph.sources, edges)
        compiled.penstock_neighbours(
            address(graph.sources), graph.sources.element_size(), address(edges), count, address(neighbours),
            threads_for(count * 64),
        )  # fmt: skip
        ahead.after(len(nodes) + count)
        if count and (int(neighbours.min()) < 0 or int(neighbours.max()) >= graph.num_sources):
            raise _damage(graph)
    return EdgeDraws(offsets, neighbours, edges)


def _damage(graph: Graph) -> FeatureFileError:
    """Return the error for a file that was not verified, and whose numbers are of no node."""
    return FeatureFileError(
        f"{graph.path or 'the graph'} leads to nodes or edges that do not exist. Read all of it with "
        "penstock.unified.open_graph(path, verify=True) to see where it is damaged, and write it again"
    )


def draw_by_kernel(graph: Graph, nodes: torch.Tensor, fanout: int, seed: int, *, replace: bool) -> EdgeDraws:
    """Draw on the device, which reads the graph over the link."""
    starts, sources = graph.starts, graph.sources
    degrees = _degrees(starts, nodes)
    counts = torch.where(degrees > 0, fanout, 0) if replace else degrees.clamp(max=fanout)
    offsets = torch.zeros(len(nodes) + 1, dtype=torch.int64, device=nodes.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    total = int(offsets[-1])
    neighbours = torch.empty(total, dtype=torch.int64, device=nodes.device)
    edges = torch.empty_like(neighbours)
    if total:
        launch(
            _kernels().sample_neighbours, (-(-len(nodes) // _BLOCK),),
            [
                starts, sources, nodes, offsets, neighbours, edges, len(nodes), _signed(seed & _MASK),
                _signed(seed >> 32 & _MASK),
            ],
            {"FANOUT": fanout, "SLOTS": max(2, 1 << (fanout - 1).bit_length()), "REPLACE": replace, "BLOCK": _BLOCK},
            warps=4,
        )  # fmt: skip
    return EdgeDraws(offsets, neighbours, edges)


def draw_by_torch(graph: Graph, nodes: torch.Tensor, fanout: int, seed: int, *, replace: bool) -> EdgeDraws:
    """Draw with PyTorch's operators, for machines without a compiler."""
    starts, sources = graph.starts, graph.sources
    first = starts[nodes]
    degrees = starts[nodes + 1] - first
    counts = degrees if fanout < 0 else torch.where(degrees > 0, fanout, 0) if replace else degrees.clamp(max=fanout)
    offsets = torch.zeros(len(nodes) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(counts, 0, out=offsets[1:])
    within = torch.arange(int(offsets[-1]), device="cpu") - offsets[:-1].repeat_interleave(counts)
    chosen = within.clone()
    keys = _keys(nodes, seed)
    for number in range(max(fanout, 0)):
        drawing = (number < counts) & ((counts < degrees) | replace)
        most = (degrees - counts + number)[drawing]
        bound = degrees[drawing] if replace else most + 1
        drawn = _hashed(keys[drawing] + number * _GOLDEN & _MASK) * bound >> 32
        begins = offsets[:-1][drawing]
        if not replace:
            is_taken = torch.zeros(len(drawn), dtype=torch.bool, device="cpu")
            for earlier in range(number):
                is_taken |= chosen[begins + earlier] == drawn
            drawn = torch.where(is_taken, most, drawn)  # no earlier draw could reach ``most``
        chosen[begins + number] = drawn
    edges = first.repeat_interleave(counts) + chosen
    return EdgeDraws(offsets, sources[edges].long(), edges)


def mixed(number: int, hop: int) -> int:
    """Return the seed of one hop: 63 bits."""
    value = (number + (hop + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) >> 1


def numbering_for(device: torch.device) -> "Numbering | SortedNumbering":
    """Return an empty numbering for nodes on ``device``."""
    return Numbering() if device.type == "cpu" and library("sampling") is not None else SortedNumbering(device)


class Numbering:
    """A numbering of nodes in the order in which they first occur, with a hash table that grows."""

    def __init__(self) -> None:
        self.count = 0
        self._nodes = torch.empty(0, dtype=torch.int64, device="cpu")
        self._keys = torch.empty(0, dtype=torch.int64, device="cpu")
        self._values = torch.empty(0, dtype=torch.int64, device="cpu")

    def nodes(self) -> torch.Tensor:
        """Return the node numbers by place."""
        return self._nodes[: self.count]

    def add(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the places of nodes; new nodes get the next places."""
        most = self.count + len(ids)
        if most * 2 > len(self._keys):
            self._grow(most)
        places = torch.empty_like(ids)
        self.count = self._relabel(ids, places, self.count)
        return places

    def _grow(self, most: int) -> None:
        size = 1 << max(8, (most * 2).bit_length())  # a power of two, at most half full: probing ends soon
        old = self.nodes()
        self._keys, self._values = (
            torch.full((size,), -1, dtype=torch.int64, device="cpu"),
            torch.empty(size, dtype=torch.int64, device="cpu"),
        )
        self._nodes = torch.empty(size // 2 + 1, dtype=torch.int64, device="cpu")
        self._relabel(old, None, 0)

    def _relabel(self, ids: torch.Tensor, places: torch.Tensor | None, first: int) -> int:
        compiled = library("sampling")
        assert compiled is not None
        return int(
            compiled.penstock_relabel(
                address(self._keys), address(self._values), len(self._keys) - 1, address(ids), len(ids),
                address(places), address(self._nodes), first,
            )
        )  # fmt: skip


class SortedNumbering:
    """The same numbering by sorting, which works on any device and gives the same order."""

    def __init__(self, device: torch.device):
        self._nodes = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def count(self) -> int:
        """Number of nodes so far."""
        return len(self._nodes)

    def nodes(self) -> torch.Tensor:
        """Return the node numbers by place."""
        return self._nodes

    def add(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the places of nodes; new nodes get the next places."""
        every = torch.cat([self._nodes, ids])
        distinct, inverse = every.unique(return_inverse=True)
        first = torch.full((len(distinct),), len(every), device=ids.device)
        first.scatter_reduce_(0, inverse, torch.arange(len(every), device=ids.device), "amin")
        order = first.argsort()
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=ids.device)
        known = self.count
        self._nodes = distinct[order]
        return rank[inverse[known:]]


def _degrees(starts: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    if nodes.device.type == "cpu":
        return starts[nodes + 1] - starts[nodes]
    ends: torch.Tensor = wrap(starts)[torch.cat([nodes, nodes + 1])]
    return ends[len(nodes) :] - ends[: len(nodes)]


def _keys(nodes: torch.Tensor, seed: int) -> torch.Tensor:
    mixed_seed = _hashed(_hashed(torch.tensor(seed & _MASK ^ _GOLDEN, device="cpu")) ^ (seed >> 32))
    return _hashed(_hashed(mixed_seed ^ (nodes & _MASK)) ^ (nodes >> 32))


def _hashed(value: torch.Tensor) -> torch.Tensor:
    value = value & _MASK
    value = (value ^ (value >> 16)) * 0x7FEB352D & _MASK
    value = (value ^ (value >> 15)) * 0x846CA68B & _MASK
    return value ^ (value >> 16)


def _signed(word: int) -> int:
    """Return the same 32 bits as a signed number, which kernels expect."""
    return word - 2**32 if word >= 2**31 else word


@functools.cache
def _kernels() -> Any:
    from penstock.unified import _kernels as kernels  # it imports Triton, which machines without CUDA may lack

    return kernels
