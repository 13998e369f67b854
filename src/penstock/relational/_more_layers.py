"""Layers written only in the language: CompGCN, SimpleHGN and a relational GraphSAGE."""

from typing import Any

import torch
from torch import nn

from penstock.arguments import checked, must_be
from penstock.relational._graph import RelationalGraph
from penstock.relational._language import LayerGraph, Value, dot, leaky_relu, softmax
from penstock.relational._rgcn import check_features, check_relations, glorot
from penstock.relational._run import layer
from penstock.relational._stream_graph import StreamedGraph


@layer
def _composed(
    g: LayerGraph, x: Any, relation: Any, scale: Any, is_inverse: Any, forth: Any, back: Any, multiplies: bool
) -> Value:
    for e in g.edges():
        composed = x[e.src] * relation[e.etype] if multiplies else x[e.src] - relation[e.etype]
        message = scale[e.src] * scale[e.dst] * composed
    for n in g.nodes():
        inverse = n.sum(is_inverse[e.etype] * message)
        total = n.sum(message) - inverse
        result: Value = total @ forth + inverse @ back
    return result


class CompGCNConv(nn.Module):
    """A layer whose messages combine the vectors of a neighbor and a relation (Vashishth et al., 2020).

    ``composition``: ``"subtract"`` or ``"multiply"``. The graph has ``2 * num_relations`` edge types; the second half
    are inverses of the first. Messages along edges, against them and from the node itself have one matrix each.
    """

    @checked("CompGCNConv(64, 64, num_relations=10)", in_channels=1, out_channels=1, num_relations=1)
    def __init__(self, in_channels: int, out_channels: int, num_relations: int, composition: str = "subtract"):
        super().__init__()
        if composition not in ("subtract", "multiply"):
            raise ValueError(f"`composition` must be 'subtract' or 'multiply', got {composition!r}")
        self.num_relations, self.composition = num_relations, composition
        self.forth, self.back, self.loop, self.relate = (
            nn.Parameter(torch.empty(in_channels, out_channels)) for _ in range(4)
        )
        self.loop_relation = nn.Parameter(torch.empty(1, in_channels))
        for parameter in self.parameters():
            glorot(parameter)

    def forward(
        self, x: torch.Tensor, relation: torch.Tensor, graph: RelationalGraph
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return new nodes and new relations, ``[num_nodes, out]`` and ``[2 * num_relations, out]``.

        ``x``: ``[num_nodes, in]``; ``relation``: ``[2 * num_relations, in]``. Messages are weighted by one over the
        square root of both ends' degrees.
        """
        check_features(x, self.loop_relation.shape[1])
        if not isinstance(relation, torch.Tensor):
            raise must_be("relation", "a torch.Tensor [2 * num_relations, in]", relation, "conv(x, relation, graph)")
        check_relations(graph, 2 * self.num_relations)
        scale = graph.in_degrees().clamp(min=1).to(x.dtype).rsqrt()
        is_inverse = (torch.arange(2 * self.num_relations, device=x.device) >= self.num_relations).to(x.dtype)
        multiplies = self.composition == "multiply"
        result = _composed(graph, x, relation, scale, is_inverse, self.forth, self.back, multiplies)
        own = x * self.loop_relation if multiplies else x - self.loop_relation
        return (result + own @ self.loop) / 3, relation @ self.relate


@layer
def _simple(g: LayerGraph, x: Any, weight: Any, at_source: Any, at_target: Any, edge_score: Any, heads: int) -> Value:
    for n in g.nodes():
        z = (x[n] @ weight).reshape(heads, -1)
        from_source, from_target = dot(z, at_source), dot(z, at_target)
    for e in g.edges():
        share = softmax(leaky_relu(from_source[e.src] + from_target[e.dst] + edge_score[e.etype], 0.2))
        message = share.unsqueeze(-1) * z[e.src]
    for n in g.nodes():
        total = n.sum(message)
    return total


class SimpleHGNConv(nn.Module):
    """A GAT layer with a learned vector per edge type, and a residual (Lv et al., 2021)."""

    @checked(
        "SimpleHGNConv(64, 64, num_relations=10)", in_channels=1, out_channels=1, num_relations=1, heads=1, edge_dim=1
    )
    def __init__(self, in_channels: int, out_channels: int, num_relations: int, heads: int = 1, edge_dim: int = 64):
        super().__init__()
        self.heads, self.num_relations = heads, num_relations
        self.weight = nn.Parameter(torch.empty(in_channels, heads * out_channels))
        self.at_source, self.at_target = (nn.Parameter(torch.empty(heads, out_channels)) for _ in range(2))
        self.edge = nn.Parameter(torch.empty(num_relations, edge_dim))
        self.edge_to_score = nn.Parameter(torch.empty(edge_dim, heads))
        self.residual = nn.Parameter(torch.empty(in_channels, heads * out_channels))
        for parameter in self.parameters():
            glorot(parameter)

    def forward(self, x: torch.Tensor, graph: RelationalGraph) -> torch.Tensor:
        """Map ``[num_nodes, in]`` to ``[num_nodes, heads * out]``."""
        check_features(x, len(self.weight))
        check_relations(graph, self.num_relations)
        edge_score = self.edge @ self.edge_to_score
        result: torch.Tensor = _simple(graph, x, self.weight, self.at_source, self.at_target, edge_score, self.heads)
        return result.flatten(1) + x @ self.residual


@layer
def _mean(g: LayerGraph, x: Any, weight: Any, own: Any = None) -> Value:
    for e in g.edges():
        message = x[e.src] @ weight[e.etype]
    for n in g.nodes():
        mean = n.mean(message)
        if own is not None:
            mean = mean + x[n] @ own
    return mean


class RGraphSAGEConv(nn.Module):
    """A relational GraphSAGE layer (Hamilton et al., 2017).

    It adds the mean over all neighbors, each times its relation's matrix, and the node itself times a matrix of its
    own. ``normalize`` scales results to a length of one.
    """

    @checked("RGraphSAGEConv(64, 64, num_relations=10)", in_channels=1, out_channels=1, num_relations=1)
    def __init__(self, in_channels: int, out_channels: int, num_relations: int, normalize: bool = False):
        super().__init__()
        self.num_relations, self.normalize = num_relations, normalize
        self.weight = nn.Parameter(torch.empty(num_relations, in_channels, out_channels))
        self.own = nn.Parameter(torch.empty(in_channels, out_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        glorot(self.weight)
        glorot(self.own)

    def forward(self, x: torch.Tensor, graph: RelationalGraph) -> torch.Tensor:
        """Map ``[num_sources, in]`` to ``[num_targets, out]``; in a block, the targets come first among the sources."""
        check_features(x, len(self.own))
        check_relations(graph, self.num_relations)
        if isinstance(graph, StreamedGraph):  # whose rows may be on tiers, which are read block by block
            result = _mean(graph, x, self.weight, self.own) + self.bias
        else:
            result = _mean(graph, x, self.weight) + x[: graph.num_targets] @ self.own + self.bias
        return nn.functional.normalize(result, dim=-1) if self.normalize else result
