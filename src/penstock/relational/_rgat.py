"""RGAT (Busbridge et al., 2019), with PyG's arguments, parameters and results, and Hector's attention per relation."""

from typing import Any

import torch
from torch import nn

from penstock.arguments import checked, must_be
from penstock.relational._graph import RelationalGraph, graph_of
from penstock.relational._language import LayerGraph, Value, dropout, leaky_relu, softmax
from penstock.relational._rgcn import check_features, check_more, check_relations, glorot
from penstock.relational._run import layer
from penstock.relational._stream_graph import StreamedGraph


@layer
def _attention(
    g: LayerGraph,
    x: Any,  # any: symbols
    weight: Any,
    query: Any,
    key: Any,
    edge_score: Any,
    added: Any,
    per_type_vectors: bool,
    additive: bool,
    per_type: bool,
    slope: float,
    probability: float,
    mod: str | None,
    heads: int,
    dim: int,
    returns_shares: bool,
) -> tuple[Value, ...]:
    for e in g.edges():
        source = x[e.src] @ weight[e.etype]
        target = x[e.dst] @ weight[e.etype]
        at_target = target @ (query[e.etype] if per_type_vectors else query)
        at_source = source @ (key[e.etype] if per_type_vectors else key)
        if additive:
            score = at_target + at_source
            score = leaky_relu(score if edge_score is None else score + edge_score[e], slope)
        else:
            score = at_target * at_source
            score = score if edge_score is None else score * edge_score[e]
        share = softmax(score, per_type=per_type)
        factor = dropout(share, probability)
        if mod == "f-additive":
            factor = factor + 1
        if heads == dim == 1 and added is None:
            message = factor * source
        else:
            factor = factor.reshape(heads, dim, 1)
            message = (factor if added is None else factor + added) * source.reshape(heads, 1, -1)
    for n in g.nodes():
        total = n.sum(message)
    return (total, share) if returns_shares else (total,)


class RGATConv(nn.Module):
    """A layer with attention over the edges that enter a node; keys, queries and messages depend on the relation.

    Arguments and parameters are those of ``torch_geometric.nn.RGATConv``, so ``load_state_dict`` takes its weights.
    ``attention_per_relation`` gives every relation its own ``q`` and ``k``, ``[num_relations, ...]``, as in Hector's
    RGAT; PyG shares them. The class is wide because it has all of PyG's arguments and parameters under PyG's names.
    """

    @checked(
        "RGATConv(64, 64, num_relations=10)",
        in_channels=1,
        out_channels=1,
        num_relations=1,
        num_bases=1,
        num_blocks=1,
        heads=1,
        dim=1,
        dropout=0,
        edge_dim=1,
    )
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        mod: str | None = None,
        attention_mechanism: str = "across-relation",
        attention_mode: str = "additive-self-attention",
        heads: int = 1,
        dim: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        attention_per_relation: bool = False,
    ):
        super().__init__()
        _check("attention_mechanism", attention_mechanism, ("across-relation", "within-relation"))
        _check("attention_mode", attention_mode, ("additive-self-attention", "multiplicative-self-attention"))
        _check("mod", mod, (None, "additive", "scaled", "f-additive", "f-scaled"))
        if attention_mode.startswith("additive") and dim != 1:
            raise ValueError(f"dim={dim} needs attention_mode='multiplicative-self-attention'")
        if num_bases is not None and num_blocks is not None:
            raise ValueError("num_bases and num_blocks are two decompositions of the same weights; give one of them")
        if dropout > 0 and mod is not None:
            raise ValueError(
                f"dropout={dropout} needs mod=None, got mod={mod!r}, which changes the attention weights in another way"
            )
        self.in_channels, self.out_channels, self.num_relations = in_channels, out_channels, num_relations
        self.num_bases, self.num_blocks, self.mod = num_bases, num_blocks, mod
        self.attention_mechanism, self.attention_mode = attention_mechanism, attention_mode
        self.heads, self.dim, self.concat, self.negative_slope = heads, dim, concat, negative_slope
        self.dropout, self.edge_dim, self.attention_per_relation = dropout, edge_dim, attention_per_relation
        self.bias: nn.Parameter | None
        self.e: nn.Parameter | None
        self._add_parameters(bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset parameters like PyG: Glorot's uniform distribution, zeros for biases, ones for scales."""
        names = ["q", "k", "e", "att", "basis"] if self.num_bases is not None else ["q", "k", "e", "weight"]
        for name in names:
            parameter = getattr(self, name, None)
            if parameter is not None:
                glorot(parameter)
        if self.lin_edge is not None:
            glorot(self.lin_edge.weight)
        for parameter, value in ((self.bias, 0.0), (self.w, 1.0), (self.l1, 1.0), (self.b1, 0.0), (self.b2, 0.0)):
            if parameter is not None:
                nn.init.constant_(parameter, value)
        nn.init.constant_(self.l2, 1 / self.out_channels)

    def forward(
        self,
        x: torch.Tensor,
        graph: RelationalGraph | torch.Tensor,
        edge_type: torch.Tensor | None = None,
        edge_attr: torch.Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Return ``[num_targets, heads * dim * out_channels]``, or without ``concat`` the mean over heads.

        ``x``: ``[num_nodes, in_channels]``. ``graph``: a `RelationalGraph`, or PyG's ``edge_index``, which needs
        ``edge_type`` as well. ``edge_attr``: ``[num_edges, edge_dim]``, or a row per relation. With
        ``return_attention_weights`` the result also has ``(edge_index, shares)``, with shares
        ``[num_edges, heads * dim]``.
        """
        check_features(x, self.in_channels)
        if isinstance(graph, RelationalGraph):
            check_relations(graph, self.num_relations, edge_type)
        else:
            graph = graph_of(graph, edge_type, len(x), self.num_relations)
        check_more(graph, edge_attr=edge_attr)
        if not isinstance(return_attention_weights, bool | None):
            raise must_be("return_attention_weights", "True, False or None", return_attention_weights, "conv(x, graph)")
        # in memory, shares that are results need not be kept for backward; edges of a stream are never all in memory
        returns_shares = return_attention_weights is not None or not isinstance(graph, StreamedGraph)
        result, *shares = _attention(
            graph, x, self._weight(), self.q, self.k, self._edge_score(edge_attr, graph),
            self.w if self.mod == "additive" else None, self.attention_per_relation,
            self.attention_mode.startswith("additive"), self.attention_mechanism == "within-relation",
            self.negative_slope, self.dropout if self.training else 0.0, self.mod, self.heads, self.dim,
            returns_shares,
        )  # fmt: skip
        result = self._modified(result.reshape(len(result), self.heads, self.dim, self.out_channels), x, graph)
        result = result.flatten(1) if self.concat else result.mean(1).flatten(1)
        result = result if self.bias is None else result + self.bias
        return result if return_attention_weights is None else (result, (graph.edge_index, shares[0]))

    def _add_parameters(self, bias: bool) -> None:
        width = self.heads * self.out_channels
        vectors = (self.num_relations,) if self.attention_per_relation else ()
        self.q = nn.Parameter(torch.empty(*vectors, width, self.heads * self.dim))
        self.k = nn.Parameter(torch.empty(*vectors, width, self.heads * self.dim))
        size = (self.heads if self.concat else 1) * self.dim * self.out_channels
        self.register_parameter("bias", nn.Parameter(torch.empty(size)) if bias else None)
        self.lin_edge = None if self.edge_dim is None else nn.Linear(self.edge_dim, width, bias=False)
        self.register_parameter(
            "e", None if self.edge_dim is None else nn.Parameter(torch.empty(width, self.heads * self.dim))
        )
        if self.num_bases is not None:
            self.att = nn.Parameter(torch.empty(self.num_relations, self.num_bases))
            self.basis = nn.Parameter(torch.empty(self.num_bases, self.in_channels, width))
        elif self.num_blocks is not None:
            if self.in_channels % self.num_blocks or width % self.num_blocks:
                raise ValueError(f"num_blocks={self.num_blocks} must divide in_channels and heads * out_channels")
            shape = (self.num_blocks, self.in_channels // self.num_blocks, width // self.num_blocks)
            self.weight = nn.Parameter(torch.empty(self.num_relations, *shape))
        else:
            self.weight = nn.Parameter(torch.empty(self.num_relations, self.in_channels, width))
        self.w = nn.Parameter(torch.empty(self.out_channels))
        self.l1 = nn.Parameter(torch.empty(1, self.out_channels))
        self.b1 = nn.Parameter(torch.empty(1, self.out_channels))
        self.l2 = nn.Parameter(torch.empty(self.out_channels, self.out_channels))
        self.b2 = nn.Parameter(torch.empty(1, self.out_channels))

    def _weight(self) -> torch.Tensor:
        """Return the weights as ``[num_relations, in_channels, heads * out_channels]``."""
        if self.num_bases is not None:
            return torch.einsum("rb,bio->rio", self.att, self.basis)
        if self.num_blocks is None:
            return self.weight
        return torch.stack([torch.block_diag(*blocks) for blocks in self.weight])

    def _edge_score(self, edge_attr: torch.Tensor | None, graph: RelationalGraph) -> torch.Tensor | None:
        if edge_attr is None:
            return None
        if self.lin_edge is None or self.e is None:
            raise ValueError(f"`edge_attr` needs a layer with edge_dim: RGATConv(..., edge_dim={edge_attr.shape[-1]})")
        edge_attr = edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr
        score: torch.Tensor = self.lin_edge(edge_attr) @ self.e
        if len(score) != graph.num_edges and isinstance(graph, StreamedGraph):
            raise ValueError("`edge_attr` must have a row for each edge on a streamed graph: edge_attr[edge_type]")
        return score if len(score) == graph.num_edges else score[graph.edge_type]

    def _modified(self, total: torch.Tensor, x: torch.Tensor, graph: RelationalGraph) -> torch.Tensor:
        """Apply PyG's ``mod`` to ``[targets, heads, dim, out]``; factors of every message are applied to the sum."""
        if self.mod not in ("scaled", "f-scaled"):
            return total
        degree = graph.in_degrees().to(x.dtype).view(-1, 1)
        if self.mod == "scaled":
            degree = torch.relu(degree @ self.l1 + self.b1) @ self.l2 + self.b2
        return total * degree.view(len(total), 1, 1, -1)

    def extra_repr(self) -> str:
        """Return the layer's sizes, for its ``repr``."""
        return f"{self.in_channels}, {self.out_channels}, num_relations={self.num_relations}, heads={self.heads}"


def _check(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, known))}, got {value!r}")
