"""Subclasses of PyG's classes. This file is imported only when needed, since it imports PyG."""

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch_geometric.data import FeatureStore, TensorAttr
from torch_geometric.loader import LinkLoader, LinkNeighborLoader, NeighborLoader, NodeLoader
from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput, NumNeighbors, SamplerOutput
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from penstock.unified import HeteroNeighborSampler, NeighborSampler, TieredFeatures


class _Base(BaseSampler):  # type: ignore[misc]
    """The common part of samplers for homogeneous and heterogeneous graphs.

    Constructors have one parameter, of no name that PyG knows: Lightning's data modules set attributes of a sampler
    that are named like its parameters, and give all others to the loader, which refuses them.
    """

    is_hetero: bool
    _sampler: Any
    _sample: Any
    is_sorted = False
    disjoint = False
    node_time = None
    edge_time = None

    def __init__(self, over: NeighborSampler | HeteroNeighborSampler):
        self.__dict__["_sampler"] = over

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"`{name}` of this sampler cannot be set; make another: pyg_sampler(data, [10, 5])")

    def sample_from_nodes(self, inputs: Any, **_: Any) -> Any:
        """Sample the neighborhood of nodes."""
        self._refuse_time(inputs)
        return node_sample(inputs, self._sample)

    def sample_from_edges(self, inputs: Any, neg_sampling: Any = None) -> Any:
        """Sample the neighborhood of the ends of edges, and of negative edges."""
        self._refuse_time(inputs)
        return edge_sample(inputs, self._sample, self.num_nodes, self.disjoint, self.node_time, neg_sampling)

    @property
    def num_nodes(self) -> Any:
        """Number of nodes, by type if there are several."""
        raise NotImplementedError

    def draws(self, num_neighbors: Any) -> bool:
        """Return whether this sampler draws as many neighbors as a loader's argument says."""
        edge_types = list(self._sampler.graphs) if self.is_hetero else None
        wanted = num_neighbors if isinstance(num_neighbors, NumNeighbors) else NumNeighbors(num_neighbors)
        values, fanouts = wanted.get_values(edge_types), self._sampler.fanouts
        if isinstance(values, Mapping) != isinstance(fanouts, Mapping):
            return False
        if isinstance(values, Mapping):
            return bool({kind: tuple(counts) for kind, counts in values.items()} == fanouts)
        return bool(tuple(values) == fanouts)

    def refuse(self, loader: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for a loader's arguments that say how to sample, and that PyG would not pass on."""
        for name, value in arguments.items():
            if name == "num_neighbors":
                if not self.draws(value):
                    raise ValueError(
                        f"{loader}(num_neighbors={value!r}) is not what the sampler draws, {self._sampler.fanouts}: "
                        f"neighbor_sampler=pyg_sampler(data, {value!r})"
                    )
            elif name == "replace":
                if bool(value) is not self._sampler.replace:
                    raise ValueError(
                        f"{loader}(replace={value!r}) is not what the sampler does: "
                        f"neighbor_sampler=pyg_sampler(data, fanouts, replace={value!r})"
                    )
            elif name in defaults and _differs(value, defaults[name]):
                raise ValueError(
                    f"{loader}({name}=...) is not supported by pyg_sampler, which draws edges with equal chances and "
                    f"regardless of time: leave {name} out, or use PyG's own sampler"
                )

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

    @property
    def num_nodes(self) -> Any:
        return self._sampler.graph.num_nodes

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

    @property
    def num_nodes(self) -> Any:
        return self._sampler.num_nodes

    def _sample(self, seed: Mapping[str, torch.Tensor], seed_time: Any = None, **_: Any) -> HeteroSamplerOutput:  # noqa: ARG002
        sampled = self._sampler.sample(seed)
        for name, places in sampled.seeds.items():
            self._refuse_twice(seed[name], places)
        return HeteroSamplerOutput(
            node=sampled.nodes, row=sampled.rows, col=sampled.cols, edge=sampled.edges,
            num_sampled_nodes={name: list(counts) for name, counts in sampled.num_sampled_nodes.items()},
            num_sampled_edges={kind: list(counts) for kind, counts in sampled.num_sampled_edges.items()},
        )  # fmt: skip


def _refuse_options(loader: type, sampler_name: str, options: Iterable[str]) -> None:
    """Let a loader of PyG's raise an error for options that it would drop, if the sampler is ours.

    With a sampler given, PyG's constructors neither use nor keep these options, and never call the sampler: there is
    no other place in which they can be seen.
    """
    make: Any = loader.__init__  # type: ignore[misc]
    signature = inspect.signature(make)
    defaults = {name: signature.parameters[name].default for name in options if name in signature.parameters}

    @functools.wraps(make)
    def refusing(self: Any, *args: Any, **kwargs: Any) -> None:  # any: PyG's own
        arguments = signature.bind(self, *args, **kwargs).arguments
        sampler = arguments.get(sampler_name)
        if isinstance(sampler, _Base):
            sampler.refuse(loader.__name__, arguments, defaults)
        make(self, *args, **kwargs)

    loader.__init__ = refusing  # type: ignore[misc]


def _differs(value: Any, default: Any) -> bool:
    """Return whether a value is not an option's default; some are a string or the enum's value of that name."""
    value = getattr(value, "value", value)
    return (value is not default) if default is None else bool(value != default)


def _own_options(loader: type, base: type) -> list[str]:
    """Return the options of a loader that its base class does not know: those for the sampler that it makes."""
    known = inspect.signature(base.__init__).parameters  # type: ignore[misc]
    # with ``is_sorted`` PyG's own sampler only saves itself a sort
    names = [name for name in inspect.signature(loader.__init__).parameters if name not in known]  # type: ignore[misc]
    return [name for name in names if name not in ("num_neighbors", "neighbor_sampler", "is_sorted", "replace")]


_refuse_options(NeighborLoader, "neighbor_sampler", _own_options(NeighborLoader, NodeLoader))
_refuse_options(LinkNeighborLoader, "neighbor_sampler", _own_options(LinkNeighborLoader, LinkLoader))
_refuse_options(NodeLoader, "node_sampler", ["input_time"])
_refuse_options(LinkLoader, "link_sampler", ["edge_label_time"])


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
