"""HGT (Hu et al., 2020), with PyG's arguments, parameters and results."""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from penstock.arguments import checked, must_be
from penstock.relational._graph import RelationalGraph, graph_of_types
from penstock.relational._language import LayerGraph, Value, dot, softmax
from penstock.relational._linear import blend_by_type, map_by_type, may_map
from penstock.relational._rgcn import check_features, check_relations
from penstock.relational._run import Layer, Options

EdgeType = tuple[str, str, str]


def _attend(g: LayerGraph, key: Any, query: Any, value: Any, to_key: Any, to_message: Any, prior: Any) -> Value:
    for e in g.edges():
        score = dot(key[e.src] @ to_key[e.etype], query[e.dst]) * prior[e.etype]
        message = softmax(score).unsqueeze(-1) * (value[e.src] @ to_message[e.etype])
    for n in g.nodes():
        total = n.sum(message)
    return total


_attention = Layer(_attend, Options(shares_results=True))  # nothing writes to its result


class HGTConv(nn.Module):
    """Attention with keys, queries and values by node type, and maps between them by edge type.

    Arguments and parameters are those of ``torch_geometric.nn.HGTConv``, so ``load_state_dict`` takes its weights.
    ``metadata``: node types, and edge types as ``(source type, relation, target type)``.
    """

    @checked("HGTConv(64, 64, data.metadata(), heads=4)", out_channels=1, heads=1)
    def __init__(
        self,
        in_channels: int | Mapping[str, int],
        out_channels: int,
        metadata: tuple[list[str], list[EdgeType]],
        heads: int = 1,
    ):
        super().__init__()
        if out_channels % heads:
            raise ValueError(f"out_channels={out_channels} must be divisible by heads={heads}")
        self.node_types = list(metadata[0])
        self.edge_types: list[EdgeType] = [(kind[0], kind[1], kind[2]) for kind in metadata[1]]
        self.in_channels = (
            dict.fromkeys(self.node_types, in_channels) if isinstance(in_channels, int) else dict(in_channels)
        )
        if any(self.in_channels.get(name, 0) < 1 for name in self.node_types):
            raise ValueError(
                f"`in_channels` must be at least 1 for each of {', '.join(self.node_types)}, got {in_channels}: "
                "HGTConv({'paper': 64, 'author': 32}, 64, data.metadata())"
            )
        self.out_channels, self.heads = out_channels, heads
        self._no_edges: torch.Tensor | None = None
        width = out_channels // heads
        self.kqv_lin = _ByType({name: nn.Linear(self.in_channels[name], 3 * out_channels) for name in self.node_types})
        self.out_lin = _ByType({name: nn.Linear(out_channels, out_channels) for name in self.node_types})
        self.k_rel = _Matrices(heads * len(self.edge_types), width)
        self.v_rel = _Matrices(heads * len(self.edge_types), width)
        self.skip = nn.ParameterDict({name: nn.Parameter(torch.ones(1)) for name in self.node_types})
        self.p_rel = nn.ParameterDict({"__".join(kind): nn.Parameter(torch.ones(1, heads)) for kind in self.edge_types})

    def forward(
        self,
        x: torch.Tensor | Mapping[str, torch.Tensor],
        graph: RelationalGraph | Mapping[EdgeType, torch.Tensor],
    ) -> Any:
        """Return ``[num_nodes, out_channels]``, as one tensor or per node type, like ``x``.

        ``x``: ``[nodes of the type, in_channels]`` per node type, or one tensor for all in the graph's order.
        ``graph``: a `RelationalGraph` with node types, or PyG's ``edge_index_dict``. If ``x`` is a mapping, types that
        no edge enters have no result, as in PyG.
        """
        if not isinstance(x, Mapping):
            check_features(x, self.in_channels[self.node_types[0]])
        elif any(not isinstance(x.get(name), torch.Tensor) for name in self.node_types):
            words = f"a torch.Tensor, or a dict of one for each of {', '.join(self.node_types)}"
            raise must_be("x", words, dict(x), "conv(data.x_dict, data.edge_index_dict)")
        sizes = [len(x[name]) for name in self.node_types] if isinstance(x, Mapping) else None
        graph = self._graph(graph, sizes)
        features = self._features(x, graph)
        key, query, value = self._projected(x, features)
        total = _attention(graph, key, query, value, self._by_edge_type(self.k_rel), self._by_edge_type(self.v_rel),
                           self._prior()).reshape(-1, self.out_channels)  # fmt: skip
        sizes = [len(rows) for rows in features]
        if not isinstance(x, Mapping) and self.out_lin.maps_at_once(total):
            return self._updated_at_once(total, x, sizes)
        results = {
            name: self._updated(name, part, rows)
            for name, part, rows in zip(self.node_types, total.split(sizes), features, strict=True)
        }
        if not isinstance(x, Mapping):
            return torch.cat(list(results.values()))
        entered = {target for _, _, target in self.edge_types}
        return {name: result for name, result in results.items() if name in entered}

    def _graph(
        self, graph: RelationalGraph | Mapping[EdgeType, torch.Tensor], sizes: list[int] | None
    ) -> RelationalGraph:
        if not isinstance(graph, RelationalGraph):
            if sizes is None:
                raise ValueError("`x` must be a mapping if edge_index_dict is one: conv(x_dict, edge_index_dict)")
            if not isinstance(graph, Mapping) or any(not isinstance(edges, torch.Tensor) for edges in graph.values()):
                words = "a RelationalGraph, or a dict of edge_index by type"
                raise must_be("graph", words, graph, "conv(data.x_dict, data.edge_index_dict)")
            device = next(iter(graph.values())).device if graph else torch.device("cpu")
            if self._no_edges is None or self._no_edges.device != device:
                self._no_edges = torch.empty(2, 0, dtype=torch.int64, device=device)
            edges = {kind: graph.get(kind, self._no_edges) for kind in self.edge_types}
            return graph_of_types(edges, dict(zip(self.node_types, sizes, strict=True)))
        check_relations(graph, len(self.edge_types))
        if graph.num_node_types != len(self.node_types):
            raise ValueError(f"the layer has {len(self.node_types)} node types, but {graph} has {graph.num_node_types}")
        names = (list(graph.node_type_names), list(graph.edge_type_names) or self.edge_types)
        if graph.node_type_names and names != (self.node_types, self.edge_types):
            raise ValueError(
                f"the graph must have the node and edge types of the layer in the same order, {self.node_types} and "
                f"{self.edge_types}, got {names}"
            )
        return graph

    def _features(self, x: torch.Tensor | Mapping[str, torch.Tensor], graph: RelationalGraph) -> list[torch.Tensor]:
        if not isinstance(x, torch.Tensor):
            return [x[name] for name in self.node_types]
        sizes = graph.node_counts()
        if len(x) != sum(sizes):
            raise ValueError(f"`x` must have a row for each of {sum(sizes)} nodes, got {len(x)}: conv(x, graph)")
        return list(x.split(sizes))

    def _projected(
        self, x: torch.Tensor | Mapping[str, torch.Tensor], features: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return keys, queries and values of all nodes, ``[nodes, heads, width]``; ``features`` are ``x`` by type."""
        shape = (-1, self.heads, self.out_channels // self.heads)
        if all(rows.shape[1] == features[0].shape[1] and rows.dtype == features[0].dtype for rows in features):
            whole = torch.cat(features) if isinstance(x, Mapping) else x
            if self.kqv_lin.maps_at_once(whole):
                parts = map_by_type(whole, self.kqv_lin.all_lins(), [len(rows) for rows in features], 3)
                return [part.view(shape) for part in parts]
        by_type = [
            self.kqv_lin(name, rows).view(-1, 3, *shape[1:]).unbind(1)
            for name, rows in zip(self.node_types, features, strict=True)
        ]
        # Parts of one tensor of all types would have to be copied again, since kernels read rows without gaps.
        return [torch.cat(parts) for parts in zip(*by_type, strict=True)]

    def _by_edge_type(self, matrices: "_Matrices") -> torch.Tensor:
        """Return ``[edge types, heads, width, width]``; PyG has heads first."""
        width = self.out_channels // self.heads
        return matrices.weight.view(self.heads, len(self.edge_types), width, width).transpose(0, 1)

    def _prior(self) -> torch.Tensor:
        rows = [self.p_rel["__".join(kind)] for kind in self.edge_types]
        return torch.cat(rows) / math.sqrt(self.out_channels // self.heads)

    def _updated(self, name: str, total: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        mapped: torch.Tensor = self.out_lin(name, functional.gelu(total))
        if mapped.shape[-1] != before.shape[-1]:
            return mapped
        share = self.skip[name].sigmoid()
        return torch.lerp(before, mapped.to(before.dtype), share.to(before.dtype))

    def _updated_at_once(self, total: torch.Tensor, before: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        lins, activated = self.out_lin.all_lins(), functional.gelu(total)
        if self.out_channels != before.shape[-1]:
            return map_by_type(activated, lins, sizes, 1)[0]
        shares = torch.cat([self.skip[name].sigmoid() for name in self.node_types]).to(before.dtype)
        return blend_by_type(activated, lins, sizes, before, shares)

    def extra_repr(self) -> str:
        """Return the layer's sizes, for its ``repr``."""
        counts = f"{len(self.node_types)} node types, {len(self.edge_types)} edge types"
        return f"{self.out_channels}, {counts}, heads={self.heads}"


class _ByType(nn.Module):
    """A linear map per node type, with PyG's parameter names."""

    def __init__(self, lins: Mapping[str, nn.Linear]):
        super().__init__()
        self.lins = nn.ModuleDict(lins)

    def forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Map ``[nodes, in]`` to ``[nodes, out]``."""
        mapped: torch.Tensor = self.lins[name](x)
        return mapped

    def maps_at_once(self, x: torch.Tensor) -> bool:
        """Return whether one operator can compute all maps, of rows like ``x``."""
        return may_map([self, *self.lins.values()], x)

    def all_lins(self) -> list[nn.Linear]:
        """Return the maps of all types, once `maps_at_once` has said that they are PyTorch's."""
        return [cast("nn.Linear", lin) for lin in self.lins.values()]


class _Matrices(nn.Module):
    """Square matrices in the layout of PyG's ``HeteroLinear``."""

    def __init__(self, count: int, width: int):
        super().__init__()
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(count, width, width).uniform_(-bound, bound))
