"""Samplers and feature stores for PyG's loaders."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.arguments import checked, must_be
from penstock.unified import Graph, HeteroNeighborSampler, NeighborSampler, TieredFeatures

Name = str | tuple[str | None, str]
"""Name of an attribute of nodes, or a pair of a node type and an attribute."""


@checked("penstock.integrations.pyg_sampler(data, [10, 5])")
def pyg_sampler(
    data: Any, fanouts: Sequence[int] | Mapping[tuple[str, str, str], Sequence[int]], *, replace: bool = False
) -> Any:
    """Return a ``BaseSampler`` over PyG's ``Data`` or ``HeteroData``, a `unified.Graph`, or a dict of them by type.

    ``NodeLoader(data, node_sampler=pyg_sampler(data, [10, 5]), input_nodes=...)`` works without pyg-lib, as do
    ``NeighborLoader(..., neighbor_sampler=...)`` and ``LinkNeighborLoader``. A fanout of -1 takes all neighbors. Edges
    are drawn with equal chances, regardless of time. These loaders then raise ``ValueError`` for options that PyG would
    not pass on, such as ``time_attr``, ``disjoint`` or another ``num_neighbors``.

    Raises ``ImportError``, which names the extra, if PyG is not installed, and ``ValueError`` for graphs without edges
    in ``edge_index``, and for tiered features without a row for each node, since PyG would not select from them.
    """
    classes = _classes()
    if isinstance(data, Graph):
        return _over_one(data, fanouts, replace)
    if isinstance(data, Mapping):
        if not data:
            raise ValueError("`data` must have a graph: pyg_sampler({('user', 'likes', 'item'): graph}, [10, 5])")
        return classes.HeteroSampler(HeteroNeighborSampler(data, fanouts, replace=replace))
    if not hasattr(data, "edge_types"):
        if getattr(data, "edge_index", None) is None:
            raise ValueError("`data` has no edge_index; if it has adj_t, give a graph: Graph.from_csc(colptr, row)")
        _check_rows(data)
        return _over_one(Graph(data.edge_index, data.num_nodes), fanouts, replace)
    _check_rows(data)
    graphs = {
        kind: Graph(data[kind].edge_index, data[kind[2]].num_nodes, data[kind[0]].num_nodes) for kind in data.edge_types
    }
    return classes.HeteroSampler(HeteroNeighborSampler(graphs, fanouts, replace=replace))


def pyg_features(features: Mapping[Name, TieredFeatures | torch.Tensor]) -> Any:
    """Return a ``FeatureStore`` of tables, ``{"x": features}``, or by node type and name, ``{("paper", "x"):
    features}``.

    ``NodeLoader((pyg_features(...), data), node_sampler=...)`` reads rows from them; ``data`` gives the edges. Raises
    ``ImportError``, which names the extra, if PyG is not installed.
    """
    if not isinstance(features, Mapping):
        raise must_be("features", "a dict of tables", features, "penstock.integrations.pyg_features({'x': features})")
    return _classes().Features(features)


def _over_one(graph: Graph, fanouts: Any, replace: bool) -> Any:
    if isinstance(fanouts, Mapping):
        raise must_be("fanouts", "a list for a graph of one edge type", fanouts, "pyg_sampler(data, [10, 5])")
    return _classes().Sampler(NeighborSampler(graph, fanouts, replace=replace))


def _check_rows(data: Any) -> None:
    """Raise ``ValueError`` for features with too few or too many rows, which PyG puts whole into every mini-batch."""
    for store in data.stores:
        for name, value in store.items():
            if isinstance(value, TieredFeatures) and not (store.is_node_attr(name) or store.is_edge_attr(name)):
                raise ValueError(
                    f"`{name}` must have a row for each of {store.num_nodes} nodes, got {len(value)} rows; set "
                    f"data.num_nodes where the graph has isolated nodes: Data(..., num_nodes={len(value)})"
                )


def _classes() -> Any:
    try:
        from penstock.integrations import _pyg_classes
    except ImportError as error:
        raise ImportError("this needs PyG: pip install 'penstock[gnn]'") from error
    return _pyg_classes
