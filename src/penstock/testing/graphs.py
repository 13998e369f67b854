"""Made graphs of any size, in parts that need little memory, so that anybody can repeat what is shown with large ones.

>>> from penstock.testing.graphs import MadeGraph
>>> graph = MadeGraph(num_nodes=1000, num_edges=5000, num_classes=4)
>>> [tuple(part.shape) for part in graph.edges(most_edges=2000)]
[(2, 2000), (2, 2000), (2, 1000)]

- `MadeGraph`: edges with a power law, by relation if wanted, labels, and features from which labels can be learnt.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.arguments import check_fields, checked

__all__ = ["MadeGraph"]

_STRIDE = 2_654_435_761
"""A prime: node numbers that are so far apart are those of nodes that follow each other by their number of edges."""
_MOST_NODES = 3 * 10**9
"""Products of a node's number and the prime have 63 bits."""
_PART_EDGES = 2**20
"""Edges that one state of the random numbers makes, so that parts of any size are the same edges."""
_PART_ROWS = 2**14


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeGraph:
    """A synthetic random graph, generated in parts; it depends on the fields only, not on the size of the parts.

    A node's label is its number modulo ``num_classes``. With probability ``homophily`` an edge joins nodes of one
    label, so that neighbours tell something about it.
    """

    num_nodes: int
    """Number of nodes."""
    num_edges: int
    """Number of edges."""
    num_relations: int = 1
    """Number of edge types; type ``r`` is about twice as frequent as type ``2 r``."""
    num_classes: int = 16
    """Number of labels."""
    skew: float = 3.0
    """Skew of sources: 1 for uniform; the most connected share ``p`` of nodes are the sources of ``p ** (1 / skew)`` of
    the edges: with 3, the first hundredth of them have 22%."""
    homophily: float = 0.5
    """Probability that an edge is made to join nodes of one label; others may do so by chance."""
    seed: int = 0
    """Seed of the random numbers."""

    def __post_init__(self) -> None:
        check_fields(
            self, "MadeGraph(num_nodes=1000, num_edges=5000)", num_nodes=1, num_edges=0, num_relations=1, num_classes=1,
            skew=1, homophily=0,
        )  # fmt: skip
        if self.num_classes > self.num_nodes or self.homophily > 1 or self.num_nodes > _MOST_NODES:
            raise ValueError(
                f"`num_nodes` must be at most {_MOST_NODES}, `num_classes` at most that number, and `homophily` at "
                f"most 1, got {self.num_nodes}, {self.num_classes} and {self.homophily}: "
                "MadeGraph(num_nodes=1000, num_edges=5000)"
            )

    @checked("graph.edges()", most_edges=1)
    def edges(self, most_edges: int = 4 * 2**20) -> Iterator[torch.Tensor]:
        """Yield parts of an ``edge_index``, ``int64 [2, edges]``: sources, then targets, with power-law sources."""
        for part, _ in self._parts(most_edges):
            yield part

    @checked("graph.typed_edges()", most_edges=1)
    def typed_edges(self, most_edges: int = 4 * 2**20) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the same parts, each with the types of its edges, ``int64 [edges]``."""
        yield from self._parts(most_edges)

    def labels(self) -> torch.Tensor:
        """Return the label of each node, ``int64 [nodes]``."""
        return torch.arange(self.num_nodes, device="cpu") % self.num_classes

    @checked("graph.features(128)", width=1, noise=0)
    def features(self, width: int, *, noise: float = 4.0, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
        """Yield rows for all nodes, ``[rows, width]``: the centre of the node's label, and noise.

        With much noise one row says little, and those of a node's neighbours together say more.
        """
        centres = torch.randn(self.num_classes, width, generator=self._generator(1 << 40), device="cpu")
        for number, first in enumerate(range(0, self.num_nodes, _PART_ROWS)):
            labels = torch.arange(first, min(first + _PART_ROWS, self.num_nodes), device="cpu") % self.num_classes
            rows = torch.randn(len(labels), width, generator=self._generator((2 << 40) + number), device="cpu")
            yield rows.mul_(noise).add_(centres[labels]).to(dtype)

    def _parts(self, most_edges: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number, first in enumerate(range(0, self.num_edges, _PART_EDGES)):
            edges, types = self._part(number, min(_PART_EDGES, self.num_edges - first))
            yield from zip(edges.split(most_edges, 1), types.split(most_edges), strict=True)

    def _part(self, number: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = self._generator(number)
        chance = torch.rand(4, count, generator=generator, dtype=torch.float64, device="cpu")
        ranks = (chance[0] ** self.skew * self.num_nodes).long().clamp_(max=self.num_nodes - 1)
        sources = (ranks * _STRIDE + self.seed) % self.num_nodes
        targets = (chance[1] * self.num_nodes).long().clamp_(max=self.num_nodes - 1)
        like = sources - sources % self.num_classes + targets % self.num_classes
        is_alike = (chance[2] < self.homophily) & (like < self.num_nodes)
        types = ((self.num_relations + 1) ** chance[3]).long().clamp_(max=self.num_relations) - 1
        return torch.stack([torch.where(is_alike, like, sources), targets]), types

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator(device="cpu").manual_seed((self.seed * 1_000_003 + number) % 2**63)
