"""Subclasses of PyG's classes. This file is imported only when needed, since it imports PyG."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch_geometric.data import FeatureStore, TensorAttr
from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput, SamplerOutput
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from penstock.unified import Graph, HeteroNeighborSampler, NeighborSampler, TieredFeatures

EdgeType = tuple[str, str, str]


class _Base(BaseSampler):  # type: ignore[misc]
    """The common part of samplers for homogeneous and heterogeneous graphs."""

    is_hetero: bool
    is_sorted = False
    disjoint = False
    num_nodes: Any
    _sample: Any
    node_time = None
    edge_time = None

    def sample_from_nodes(self, inputs: Any, **_: Any) -> Any:
        """Sample the neighborhood of nodes."""
        self._refuse_time(inputs)
        return node_sample(inputs, self._sample)

    def sample_from_edges(self, inputs: Any, neg_sampling: Any = None) -> Any:
        """Sample the neighborhood of the ends of edges, and of negative edges."""
        self._refuse_time(inputs)
        return edge_sample(inputs, self._sample, self.num_nodes, self.disjoint, self.node_time, neg_sampling)

    @staticmethod
    def _refuse_time(inputs: Any) -> None:
        if inputs.time is not None:
            raise ValueError("sampling by time is not supported: edges are sampled regardless of their time")

    @staticmethod
    def _refuse_twice(seeds: torch.Tensor, places: torch.Tensor) -> None:
        if len(places) and int(places.max()) + 1 != len(seeds):
            raise ValueError("a node is among a mini-batch's seeds twice; give each once: input_nodes=seeds.unique()")


class Sampler(_Base):
    """A sampler for graphs with one type of nodes."""

    is_hetero = False

    def __init__(self, graph: Graph, fanouts: Any, *, replace: bool):
        self.num_nodes = graph.num_nodes
        self._sampler = NeighborSampler(graph, list(fanouts), replace=replace)

    def _sample(self, seed: torch.Tensor, seed_time: Any = None, **_: Any) -> SamplerOutput:  # noqa: ARG002
        sampled = self._sampler.sample(seed)
        self._refuse_twice(seed, sampled.seeds)
        return SamplerOutput(
            node=sampled.nodes, row=sampled.rows, col=sampled.cols, edge=sampled.edges,
            num_sampled_nodes=list(sampled.num_sampled_nodes), num_sampled_edges=list(sampled.num_sampled_edges),
        )  # fmt: skip


class HeteroSampler(_Base):
    """A sampler for graphs with several types of nodes."""

    is_hetero = True

    def __init__(self, graphs: Mapping[EdgeType, Graph], fanouts: Any, *, replace: bool):
        if not isinstance(fanouts, Mapping):
            fanouts = list(fanouts)
        self._sampler = HeteroNeighborSampler(graphs, fanouts, replace=replace)
        self.num_nodes = self._sampler.num_nodes

    def _sample(self, seed: Mapping[str, torch.Tensor], seed_time: Any = None, **_: Any) -> HeteroSamplerOutput:  # noqa: ARG002
        sampled = self._sampler.sample(seed)
        for name, places in sampled.seeds.items():
            self._refuse_twice(seed[name], places)
        return HeteroSamplerOutput(
            node=sampled.nodes, row=sampled.rows, col=sampled.cols, edge=sampled.edges,
            num_sampled_nodes={name: list(counts) for name, counts in sampled.num_sampled_nodes.items()},
            num_sampled_edges={kind: list(counts) for kind, counts in sampled.num_sampled_edges.items()},
        )  # fmt: skip


class Features(FeatureStore):  # type: ignore[misc]
    """A feature store with tables by node type and name."""

    def __init__(self, features: Mapping[Any, TieredFeatures | torch.Tensor]):
        super().__init__()
        self._by_name: dict[tuple[str | None, str], torch.Tensor] | None = {}
        for name, table in features.items():
            self._by_name[_key_of(name)] = _checked(name, table)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the tables out of a pickle: spawned workers only sample, and the main process reads rows."""
        return {**self.__dict__, "_by_name": None}

    @property
    def _tables(self) -> dict[tuple[str | None, str], torch.Tensor]:
        if self._by_name is None:
            raise ValueError(
                "this feature store was pickled, which leaves out its tables. Let workers that are spawned only "
                "sample: NodeLoader(..., filter_per_worker=False)"
            )
        return self._by_name

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        if attr.index is not None:
            raise ValueError("a store of tiered features cannot write single rows; give the whole table")
        self._tables[attr.group_name, attr.attr_name] = torch.as_tensor(tensor)
        return True

    def _get_tensor(self, attr: TensorAttr) -> torch.Tensor | None:
        table = self._tables.get((attr.group_name, attr.attr_name))
        if table is None:
            return None
        index = slice(None) if attr.index is None else attr.index
        return table[index if isinstance(index, int | slice) else torch.as_tensor(index)]

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self._tables.pop((attr.group_name, attr.attr_name), None) is not None

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        table = self._tables.get((attr.group_name, attr.attr_name))
        return None if table is None else tuple(table.shape)

    def get_all_tensor_attrs(self) -> Sequence[TensorAttr]:
        """Return the node type and name of each table."""
        return [TensorAttr(group, name) for group, name in self._tables]


def _key_of(name: Any) -> tuple[str | None, str]:
    if isinstance(name, str):
        return None, name
    if isinstance(name, tuple) and len(name) == 2 and isinstance(name[1], str):
        return name
    raise ValueError(
        f'the name of a table must be a string, "x", or a node type and a string, ("paper", "x"), got {name!r}'
    )


def _checked(name: Any, table: Any) -> torch.Tensor:
    if isinstance(table, torch.Tensor) and table.dim():
        return table
    raise TypeError(
        f"`features` must be tiered features or tensors [rows, ...], got {type(table).__name__} for {name!r}: "
        "torch.as_tensor(table)"
    )
