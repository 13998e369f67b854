"""RGCN (Schlichtkrull et al., 2018), with PyG's arguments, parameters and results."""

from typing import Any

import torch
from torch import nn

from penstock.arguments import checked, must_be
from penstock.relational._graph import RelationalGraph, graph_of
from penstock.relational._language import LayerGraph, Value
from penstock.relational._run import layer
from penstock.relational._stream_graph import StreamedGraph


@layer
def _messages(
    g: LayerGraph, x: Any, weight: Any, norm: Any, mean: bool, is_table: bool, root: Any = None
) -> Value:  # any: symbols
    for e in g.edges():
        message = x[e.src, e.etype] if is_table else x[e.src] @ weight[e.etype]
        if norm is not None:
            message = norm[e] * message
        if mean:
            message = (1 / e.siblings()) * message
    for n in g.nodes():
        total = n.sum(message)
        if root is not None:
            total = total + x[n] @ root
    return total


class RGCNConv(nn.Module):
    """A layer that sums, over relations, the mean (or sum) of transformed neighbors.

    The result for node v is ``x_v W_root + bias``, plus for each relation r the mean (or sum) of ``x_u W_r`` over the
    edges ``u -> v`` of that relation.

    Arguments and parameters are those of ``torch_geometric.nn.RGCNConv``, so ``load_state_dict`` takes its weights;
    ``aggr`` is ``"mean"``, ``"add"`` or ``"sum"``. ``num_bases`` and ``num_blocks`` are its two decompositions.
    """

    @checked("RGCNConv(64, 64, num_relations=10)", out_channels=1, num_relations=1, num_bases=1, num_blocks=1)
    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        aggr: str = "mean",
        root_weight: bool = True,
        bias: bool = True,
    ):
        super().__init__()
        if aggr not in ("mean", "add", "sum"):
            raise ValueError(
                f"`aggr` must be 'mean', 'add' or 'sum', by which RGCNConv aggregates within a relation, got {aggr!r}"
            )
        if num_bases is not None and num_blocks is not None:
            raise ValueError("num_bases and num_blocks are two decompositions of the same weights; give one of them")
        self.in_channels = (in_channels, in_channels) if isinstance(in_channels, int) else in_channels
        if min(self.in_channels) < 1:
            raise ValueError(f"`in_channels` must be at least 1, got {in_channels}: RGCNConv(64, 64, num_relations=10)")
        self.out_channels, self.num_relations = out_channels, num_relations
        self.num_bases, self.num_blocks, self.aggr = num_bases, num_blocks, aggr
        width = self.in_channels[0]
        if num_blocks is not None and (width % num_blocks or out_channels % num_blocks):
            raise ValueError(f"num_blocks={num_blocks} must divide in_channels={width} and out_channels={out_channels}")
        self.comp: nn.Parameter | None
        self.root: nn.Parameter | None
        self.bias: nn.Parameter | None
        shape: tuple[int, ...]
        if num_blocks is not None:
            shape = (num_relations, num_blocks, width // num_blocks, out_channels // num_blocks)
        else:
            shape = (num_relations if num_bases is None else num_bases, width, out_channels)
        self.weight = nn.Parameter(torch.empty(shape))
        self.register_parameter(
            "comp", None if num_bases is None else nn.Parameter(torch.empty(num_relations, num_bases))
        )
        self.register_parameter(
            "root", nn.Parameter(torch.empty(self.in_channels[1], out_channels)) if root_weight else None
        )
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset parameters like PyG: Glorot's uniform distribution, and zeros for the bias."""
        for parameter in (self.weight, self.comp, self.root):
            if parameter is not None:
                glorot(parameter)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor] | None,
        graph: RelationalGraph | torch.Tensor,
        edge_type: torch.Tensor | None = None,
        edge_norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``[num_targets, out_channels]``.

        ``x``: ``[num_nodes, in_channels]``. With ``None`` or ``int64 [num_nodes]``, nodes have numbers instead of
        features, and a row of ``weight`` each. A pair is for sources and targets that differ. ``graph``: a
        `RelationalGraph`, or PyG's ``edge_index``, which needs ``edge_type`` as well. ``edge_norm``: ``[num_edges]``,
        factors of messages.
        """
        source, target = x if isinstance(x, tuple) and len(x) == 2 else (x, x)
        for features, width in zip((source, target), self.in_channels, strict=True):
            if features is not None:
                check_features(features, width, may_be_numbers=True)
        graph = self._graph(graph, edge_type, source, target)
        check_more(graph, edge_norm=edge_norm)
        num_sources = self.in_channels[0] if source is None else len(source)
        if num_sources < graph.num_sources or (source is None and num_sources != graph.num_sources):
            rows = f"None, which stands for in_channels={num_sources}" if source is None else f"{num_sources}"
            raise ValueError(f"`x` must have a row for each of {graph.num_sources} nodes, got {rows}: conv(x, graph)")
        if source is None:
            source = torch.arange(self.in_channels[0], device=self.weight.device)
        if target is None:
            target = source
        target = target[: graph.num_targets] if graph.is_block else target
        # rows of a stream may be on tiers, which are read block by block
        has_numbers = torch.int64 in (source.dtype, target.dtype)
        has_root_inside = isinstance(graph, StreamedGraph) and not has_numbers and self.num_blocks is None
        result = self._sum(source, graph, edge_norm, target if has_root_inside else None)
        if self.root is not None and not has_root_inside:
            result = result + (self.root[target] if target.dtype == torch.int64 else target @ self.root)
        return result if self.bias is None else result + self.bias

    def _graph(
        self,
        graph: RelationalGraph | torch.Tensor,
        edge_type: torch.Tensor | None,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
    ) -> RelationalGraph:
        if isinstance(graph, RelationalGraph):
            check_relations(graph, self.num_relations, edge_type)
            return graph
        num_sources = self.in_channels[0] if source is None else len(source)
        num_targets = num_sources if target is None else len(target)
        sizes = num_sources if source is target else (num_sources, num_targets)
        return graph_of(graph, edge_type, sizes, self.num_relations)

    def _sum(
        self,
        source: torch.Tensor,
        graph: RelationalGraph,
        norm: torch.Tensor | None,
        target: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the sum of messages; with ``target``, plus what nodes send to themselves."""
        weight: torch.Tensor = self.weight
        is_mean = self.aggr == "mean"
        if self.comp is not None:
            weight = torch.einsum("rb,bio->rio", self.comp, weight)
        if source.dtype == torch.int64:
            if self.num_blocks is not None:
                raise ValueError(
                    "num_blocks needs features, because a block-diagonal weight has no complete rows to look up; give "
                    "`x` in float"
                )
            if isinstance(graph, StreamedGraph):
                table = weight[:, source].flatten(0, 1)
            else:
                nodes, types = graph.pairs()
                table = weight.reshape(-1, self.out_channels)[types * weight.shape[1] + source[nodes]]
            result: torch.Tensor = _messages(graph, table, None, norm, is_mean, True)
            return result
        if self.num_blocks is not None:
            source = source.view(len(source), self.num_blocks, -1)
        if target is not None:
            return _messages(graph, (source, target), weight, norm, is_mean, False, self.root)  # type: ignore[no-any-return]
        result = _messages(graph, source, weight, norm, is_mean, False)
        return result.reshape(len(result), self.out_channels)

    def extra_repr(self) -> str:
        """Return the layer's sizes, for its ``repr``."""
        return f"{self.in_channels[0]}, {self.out_channels}, num_relations={self.num_relations}"


def glorot(tensor: torch.Tensor) -> None:
    """Fill uniformly between plus and minus ``sqrt(6 / (rows + columns))`` of the last two dimensions."""
    bound = (6.0 / (tensor.shape[-2] + tensor.shape[-1])) ** 0.5
    nn.init.uniform_(tensor, -bound, bound)


def check_features(x: object, width: int, *, may_be_numbers: bool = False) -> None:
    """Raise unless ``x`` has rows of that width, or is ``int64 [nodes]``, if nodes may have numbers instead.

    `checked` would break graphs of ``torch.compile``.
    """
    if not isinstance(x, torch.Tensor):
        raise must_be("x", "a torch.Tensor with a row for each node", x, "conv(x, graph)")
    if may_be_numbers and x.dtype == torch.int64 and x.dim() == 1:
        return
    if x.dim() != 2 or x.shape[1] != width or (may_be_numbers and x.dtype == torch.int64):
        raise ValueError(
            f"`x` must have a row of in_channels={width} for each node, got {x.dtype} {tuple(x.shape)}: conv(x, graph)"
        )


def check_more(graph: RelationalGraph, **values: torch.Tensor | None) -> None:
    """Raise ``TypeError`` unless all edge data are tensors."""
    for name, value in values.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise must_be(
                name, f"a torch.Tensor with a row for each of {graph.num_edges} edges", value, "conv(x, graph)"
            )


def check_relations(graph: RelationalGraph, num_relations: int, edge_type: torch.Tensor | None = None) -> None:
    """Raise ``TypeError`` unless ``graph`` is a graph, ``ValueError`` unless it has as many edge types as the layer."""
    if not isinstance(graph, RelationalGraph):
        raise must_be("graph", "a penstock.relational.RelationalGraph", graph, "conv(x, RelationalGraph(edge_index))")
    if edge_type is not None:
        raise ValueError(
            "`edge_type` must be given only with an edge_index, because a RelationalGraph has its own edge types: "
            "conv(x, graph) or conv(x, edge_index, edge_type)"
        )
    if graph.num_edge_types != num_relations:
        raise ValueError(
            f"the layer has num_relations={num_relations}, but {graph} has {graph.num_edge_types} edge types. If some "
            "types do not occur in the graph, give their number: RelationalGraph(edge_index, edge_type, "
            f"num_edge_types={num_relations})"
        )
