"""A graph with typed edges, and optionally typed nodes, whose indexes are built when a compiled layer first needs them.

Pairs of a node and an edge type are numbered by type, then by node, so that the rows of one type are contiguous and
need only one product with that type's matrix. Edges keep the caller's order: edge data is never permuted.
"""

import ctypes
import functools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from penstock import native
from penstock.arguments import checked
from penstock.relational._domain import ENDS, Domain
from penstock.relational._registry import Guard, register
from penstock.relational._saved import load_graph, save_graph
from penstock.tiers import Budget, Charges

_Made = TypeVar("_Made")
_OF_THIS_PROCESS = ("number", "name", "_lock", "_charges")


class RelationalGraph:
    """Edges from sources to targets, each with a type.

    ``edge_index``: ``int64 [2, num_edges]``, sources in the first row. ``edge_type``: ``int64 [num_edges]``, from 0;
    ``None`` for one type. ``num_nodes``: a number, or two for a block whose sources and targets are different nodes.
    ``node_type``: ``int64 [num_nodes]`` in ascending order (two of them for a block); ``None`` for one type.
    Sizes that are not given are the largest index plus one. Indexes are checked once, here: ``ValueError``.

    >>> graph = RelationalGraph(torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([0, 1, 0]))
    >>> graph
    RelationalGraph(num_nodes=3, num_edges=3, num_edge_types=2)
    """

    @checked("RelationalGraph(torch.stack([sources, targets]), edge_type)", num_edge_types=1, num_node_types=1)
    def __init__(
        self,
        edge_index: torch.Tensor,
        edge_type: torch.Tensor | None = None,
        *,
        num_nodes: int | tuple[int, int] | None = None,
        num_edge_types: int | None = None,
        node_type: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_node_types: int | None = None,
    ):
        if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.dtype != torch.int64:
            raise ValueError(
                f"edge_index must be int64 of shape [2, num_edges] with sources first, got {edge_index.dtype} of shape "
                f"{list(edge_index.shape)}: torch.stack([sources, targets])"
            )
        self.device = edge_index.device
        self.num_edges = edge_index.shape[1]
        if edge_type is None:
            edge_type = torch.zeros(self.num_edges, dtype=torch.int64, device=self.device)
        _check_ids("edge_type", edge_type, self.num_edges, self.device)
        largest = [int(row.max()) + 1 if self.num_edges else 0 for row in edge_index]
        if num_nodes is None:
            num_nodes = max(largest)
        self.is_block = isinstance(num_nodes, tuple)
        sizes = num_nodes if isinstance(num_nodes, tuple) else (num_nodes, num_nodes)
        self.num_sources, self.num_targets = sizes
        if min(sizes) < 0:
            raise ValueError(
                f"`num_nodes` must be at least 0, got {num_nodes}: RelationalGraph(edge_index, num_nodes=10)"
            )
        for row, size, end in zip(edge_index, sizes, ("source", "target"), strict=True):
            _check_range(f"the {end} of an edge (below `num_nodes`)", row, size)
        found = int(edge_type.max()) + 1 if self.num_edges else 0
        self.num_edge_types = max(found, 1) if num_edge_types is None else num_edge_types
        _check_range("edge_type", edge_type, self.num_edge_types)
        if self.num_edge_types * max(sizes) >= 2**63:
            raise ValueError(
                f"{self.num_edge_types} edge types of {max(sizes)} nodes have more pairs than an int64 can count"
            )
        self._set_node_types(node_type, num_node_types)
        self._edge_index = edge_index.detach().clone()  # the caller may write to the originals
        self._edge_type = edge_type.detach().clone()
        self.node_type_names: tuple[str, ...] = ()
        """Names of the node types, if the graph was made from named types."""
        self.edge_type_names: tuple[tuple[str, str, str], ...] = ()
        """Source type, relation and target type, in order of edge types."""
        self.number = register(self)
        self.name = str(self.number)
        """The graph's number as text, for arguments of operators."""
        self._indexes: dict[tuple[Domain, Domain], torch.Tensor] = {}
        self._lock = Guard()
        """A lock, so that one thread at a time builds indexes."""
        self._charges = Charges(None, "relational")
        self._derived: dict[Hashable, Any] = {}
        self._orders: dict[tuple[Domain, Domain], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._indexes_in_order: dict[tuple[Domain, Domain | None, Domain], torch.Tensor] = {}

    @classmethod
    @checked("RelationalGraph.from_types({('a', 'to', 'b'): edge_index}, {'a': 10, 'b': 20})")
    def from_types(
        cls, edge_index: Mapping[tuple[str, str, str], torch.Tensor], num_nodes: Mapping[str, int]
    ) -> "RelationalGraph":
        """Make a graph from ``int64 [2, num_edges]`` per ``(source type, relation, target type)``.

        Nodes in ``edge_index`` are numbered within their node types. In the graph, nodes and edges are numbered type by
        type, in the order of the mappings; ``node_type_names`` and ``edge_type_names`` have the names.
        """
        starts, total = {}, 0
        for name, count in num_nodes.items():
            starts[name] = total
            total += count
        parts, types = [torch.empty(2, 0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for number, ((source, relation, target), one) in enumerate(edge_index.items()):
            for end, row in zip((source, target), one, strict=True):
                if end not in starts:
                    raise ValueError(
                        f"({source}, {relation}, {target}) names the node type {end!r}, but `num_nodes` has only "
                        f"{list(starts)}"
                    )
                _check_range(f"a node of type {end!r} in {relation!r}", row, num_nodes[end])
            parts.append(one + torch.tensor([[starts[source]], [starts[target]]], device=one.device))
            types.append(torch.full((one.shape[1],), number, dtype=torch.int64, device=one.device))
        sizes = torch.tensor(list(num_nodes.values()))
        graph = cls(
            torch.cat(parts[1:] or parts, dim=1),
            torch.cat(types[1:] or types),
            num_nodes=total,
            num_edge_types=max(1, len(edge_index)),
            node_type=torch.arange(len(sizes)).repeat_interleave(sizes).to(parts[-1].device),
            num_node_types=max(1, len(num_nodes)),
        )
        graph.node_type_names, graph.edge_type_names = tuple(num_nodes), tuple(edge_index)
        return graph

    @classmethod
    def from_pyg(cls, data: Any) -> "RelationalGraph":  # any: torch_geometric.data.HeteroData or Data
        """Make a graph from PyG's ``HeteroData``, or from ``Data`` with ``edge_type``."""
        if hasattr(data, "edge_index_dict"):
            return cls.from_types(data.edge_index_dict, {name: data[name].num_nodes for name in data.node_types})
        return cls(data.edge_index, data.edge_type, num_nodes=data.num_nodes)

    @classmethod
    def from_dgl(cls, graph: Any) -> "RelationalGraph":  # any: dgl.DGLGraph
        """Make a graph from a DGL graph, by its edge types or, if it has only one, by ``edata["etype"]``.

        Blocks stay blocks.
        """
        if graph.is_block:
            if len(graph.canonical_etypes) > 1:
                raise ValueError(
                    "a DGL block with several edge types is not supported; convert it first with dgl.block_to_graph "
                    "and to_homogeneous"
                )
            sizes = (graph.num_src_nodes(), graph.num_dst_nodes())
            return cls(torch.stack(graph.edges()), graph.edata.get("etype"), num_nodes=sizes)
        if len(graph.canonical_etypes) > 1 or len(graph.ntypes) > 1:
            edges = {one: torch.stack(graph.edges(etype=one)) for one in graph.canonical_etypes}
            return cls.from_types(edges, {name: graph.num_nodes(name) for name in graph.ntypes})
        return cls(torch.stack(graph.edges()), graph.edata.get("etype"), num_nodes=graph.num_nodes())

    @checked("graph.to('cuda')")
    def to(self, device: torch.device | str) -> "RelationalGraph":
        """Return the graph on another device, on the same account but without its indexes; itself if already there."""
        device = torch.empty(0, device=device).device  # "cuda" means the current device
        if device == self.device:
            return self
        one, two = (types.to(device) for types in self._node_types)
        found = RelationalGraph(
            self._edge_index.to(device), self._edge_type.to(device),
            num_nodes=self.num_nodes, num_edge_types=self.num_edge_types,
            node_type=(one, two) if self.is_block else one, num_node_types=self.num_node_types,
        )  # fmt: skip
        found.node_type_names, found.edge_type_names = self.node_type_names, self.edge_type_names
        budget = self._charges.budget
        return found if budget is None else found.charge_to(budget)

    @checked("graph.save('graph.pt')")
    def save(self, path: str | Path) -> None:
        """Write the graph and the indexes built so far as safetensors, either completely or not at all."""
        save_graph(self, Path(path))

    @classmethod
    @checked("RelationalGraph.load('graph.pt')")
    def load(cls, path: str | Path) -> "RelationalGraph":
        """Return the graph that `save` wrote, on the CPU. Raises ``ValueError`` for any other file."""
        return load_graph(cls, Path(path))

    @property
    def num_nodes(self) -> int | tuple[int, int]:
        """Number of nodes as given: one number, or two for sources and targets."""
        return (self.num_sources, self.num_targets) if self.is_block else self.num_sources

    def __repr__(self) -> str:
        types = f", num_node_types={self.num_node_types}" if self.num_node_types > 1 else ""
        return (
            f"RelationalGraph(num_nodes={self.num_nodes}, num_edges={self.num_edges}, "
            f"num_edge_types={self.num_edge_types}{types})"
        )

    @checked("graph.charge_to(Budget(host='8GiB'))")
    def charge_to(self, budget: Budget) -> "RelationalGraph":
        """Charge edges, and indexes when layers come to need them, to the device of an account that rooms share.

        The bytes are given back when the graph is garbage-collected. Returns the graph. Raises ``BudgetError`` if they
        do not fit; a layer raises it too if its index does not fit.
        """
        if self._charges.are_of(budget):
            return self
        charges = Charges(budget, "relational")
        with self._lock:
            held = (
                self._edge_index,
                self._edge_type,
                self._indexes,
                self._derived,
                self._orders,
                self._indexes_in_order,
            )
            charges.charge("device", _size_bytes(held))
            self._charges.give_back()
            self._charges = charges
        weakref.finalize(self, charges.give_back).atexit = False
        return self

    @property
    def edge_index(self) -> torch.Tensor:
        """Edges ``int64 [2, num_edges]``, sources first."""
        return self._edge_index

    @property
    def edge_type(self) -> torch.Tensor:
        """Type of each edge, ``int64 [num_edges]``."""
        return self._edge_type

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sources and edge types that occur together, ``int64 [pairs]`` each.

        They are the rows of ``x[e.src, e.etype]``.
        """
        return self._pairs(Domain.SOURCE_AND_TYPE)

    def node_counts(self) -> list[int]:
        """Return the number of sources of each node type."""
        return [int(one) for one in self._node_types[0].bincount(minlength=self.num_node_types).tolist()]

    def in_degrees(self) -> torch.Tensor:
        """Return the number of edges that enter each target, ``int64 [num_targets]``."""
        return self._edge_index[1].bincount(minlength=self.num_targets)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_PROCESS}
            return {name: dict(value) if isinstance(value, dict) else value for name, value in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = Guard()
        self._charges = Charges(None, "relational")
        self.number = register(self)
        self.name = str(self.number)

    def count(self, domain: Domain) -> int:
        """Return the number of rows of the domain."""
        if domain in ENDS:
            return len(self._pairs(domain)[0])
        return {
            Domain.EDGE: self.num_edges,
            Domain.SOURCE: self.num_sources,
            Domain.TARGET: self.num_targets,
            Domain.EDGE_TYPE: self.num_edge_types,
            Domain.SOURCE_TYPE: self.num_node_types,
            Domain.TARGET_TYPE: self.num_node_types,
            Domain.ONE: 1,
        }[domain]

    def index(self, of: Domain, to: Domain) -> torch.Tensor | None:
        """Return the row of ``to`` that each row of ``of`` belongs to, ``int64 [rows of "of"]``.

        ``None`` if all belong to the same row, or each to itself.
        """
        if of is to or to is Domain.ONE:
            return None
        return self._once(self._indexes, (of, to), lambda: self._build(of, to))

    def segments(self, of: Domain, to: Domain) -> Sequence[int] | None:
        """Return where the rows of ``of`` for each row of ``to`` begin, if they are in order, and the last end."""
        if of in ENDS and to is Domain.EDGE_TYPE:
            types, count = self._pairs(of)[1], self.num_edge_types
        elif (of, to) in ((Domain.SOURCE, Domain.SOURCE_TYPE), (Domain.TARGET, Domain.TARGET_TYPE)):
            types, count = self._node_types[of is Domain.TARGET], self.num_node_types
        else:
            return None
        borders = torch.searchsorted(types, torch.arange(count + 1, device=self.device))
        return [int(one) for one in borders.tolist()]

    def order(self, over: Domain, by: Domain) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the rows of ``over`` sorted by the row of ``by`` that they belong to.

        The first result is ``int32 [rows of over]``, or ``None`` if they are in order already. The second is
        ``int64 [rows of by + 1]``, where the rows for each row of ``by`` begin.
        """
        return self._once(self._orders, (over, by), lambda: self._ordered(over, by))

    def index_in_order(self, over: Domain, by: Domain | None, to: Domain) -> torch.Tensor:
        """Return, as ``int32 [rows of over]``, the row of ``to`` of each row of ``over``, in the order of `order`."""
        return self._once(self._indexes_in_order, (over, by, to), lambda: self._in_order(over, by, to))

    def remember(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """Return what an emitter derives from the graph; it is made once."""
        return cast("_Made", self._once(self._derived, key, make))

    def _once(self, known: dict[Any, _Made], key: Any, make: Callable[[], _Made]) -> _Made:
        """Return the known value of a key; the first caller makes it, and no thread sees it before it is complete."""
        found = known.get(key)
        if found is not None:
            return found
        with self._lock:
            if key not in known:
                on_cuda = self.device.type == "cuda"
                if on_cuda and torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        "the index of a graph cannot be built while a CUDA graph is captured; call the layer on this "
                        "graph once before the capture"
                    )
                made = make()
                self._charges.charge("device", _size_bytes(made))
                if on_cuda:
                    torch.cuda.current_stream(self.device).synchronize()  # other streams may read it next
                known[key] = made
            return known[key]

    def _in_order(self, over: Domain, by: Domain | None, to: Domain) -> torch.Tensor:
        index = self.index(over, to)
        assert index is not None
        self._check_int32(over, to)
        positions = None if by is None else self.order(over, by)[0]
        return (index if positions is None else index.index_select(0, positions)).to(torch.int32)

    def _check_int32(self, *domains: Domain) -> None:
        if max(self.count(domain) for domain in domains) >= 2**31:
            raise ValueError(
                f"{self} has more rows than an int32 can count; use PyTorch for it: layer.with_options(emitter='eager')"
            )

    def _ordered(self, over: Domain, by: Domain) -> tuple[torch.Tensor | None, torch.Tensor]:
        self._check_int32(over)
        segments = self.segments(over, by)
        if segments is not None:
            return None, torch.tensor(segments, device=self.device)
        if by is Domain.ONE:
            return None, torch.tensor([0, self.count(over)], device=self.device)
        keys = self.index(over, by)
        assert keys is not None
        return counting_sort(keys, self.count(by))

    def _set_node_types(
        self, given: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None, num_node_types: int | None
    ) -> None:
        sizes = (self.num_sources, self.num_targets)
        if given is None:
            given = (
                torch.zeros(sizes[0], dtype=torch.int64, device=self.device),
                torch.zeros(sizes[1], dtype=torch.int64, device=self.device),
            )
        pair = given if isinstance(given, tuple) else (given, given)
        for types, size in zip(pair, sizes, strict=True):
            _check_ids("node_type", types, size, self.device)
            if len(types) and bool((types[1:] < types[:-1]).any()):
                raise ValueError(
                    "node_type must be in ascending order: number the nodes type by type, as PyG's HeteroData and "
                    "penstock.relational.RelationalGraph.from_pyg do"
                )
        found = max((int(types[-1]) + 1 for types in pair if len(types)), default=1)
        self.num_node_types = max(found, 1) if num_node_types is None else num_node_types
        for types in pair:
            _check_range("node_type", types, self.num_node_types)
        self._node_types = pair

    def _pairs(self, domain: Domain) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the nodes and types of the pairs of a domain, ordered by type, then node."""
        end = ENDS[domain]

        def make() -> torch.Tensor:
            of_edges = self._edge_index[0 if end is Domain.SOURCE else 1]
            nodes, types, rows = pairs_of(of_edges, self._edge_type, self.count(end), self.num_edge_types)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # other threads may find them from here on
            self._indexes[domain, Domain.EDGE_TYPE], self._indexes[Domain.EDGE, domain] = types, rows
            return nodes

        return self._once(self._indexes, (domain, end), make), self._indexes[domain, Domain.EDGE_TYPE]

    def _build(self, of: Domain, to: Domain) -> torch.Tensor:
        if of is Domain.EDGE:
            if to in ENDS:
                self._pairs(to)
                return self._indexes[of, to]
            match to:
                case Domain.SOURCE:
                    return self._edge_index[0]
                case Domain.TARGET:
                    return self._edge_index[1]
                case Domain.EDGE_TYPE:
                    return self._edge_type
                case Domain.SOURCE_TYPE:
                    return self._node_types[0][self._edge_index[0]]
                case _:
                    return self._node_types[1][self._edge_index[1]]
        if of in ENDS:
            end = ENDS[of]
            nodes, types = self._pairs(of)
            if to in (end, Domain.EDGE_TYPE):
                return nodes if to is end else types
            return self._node_types[0 if end is Domain.SOURCE else 1][nodes]
        return self._node_types[0 if of is Domain.SOURCE else 1]


def graph_of(
    edge_index: torch.Tensor, edge_type: torch.Tensor | None, num_nodes: int | tuple[int, int], num_edge_types: int
) -> RelationalGraph:
    """Return the graph of PyG's index tensors, the same one as long as they live and are not written to."""
    if edge_type is None:
        raise ValueError("edge_index is given without edge_type: conv(x, edge_index, edge_type), or conv(x, graph)")
    return _remembered(
        (edge_index, edge_type),
        (num_nodes, num_edge_types),
        lambda: RelationalGraph(edge_index, edge_type, num_nodes=num_nodes, num_edge_types=num_edge_types),
    )


def graph_of_types(
    edge_index: Mapping[tuple[str, str, str], torch.Tensor], num_nodes: Mapping[str, int]
) -> RelationalGraph:
    """Return the graph of PyG's ``edge_index_dict``, cached too; node types are in the order of ``num_nodes``."""
    return _remembered(
        tuple(edge_index.values()),
        (tuple(edge_index), tuple(num_nodes.items())),
        lambda: RelationalGraph.from_types(edge_index, num_nodes),
    )


def _remembered(
    tensors: tuple[torch.Tensor, ...], rest: Hashable, make: Callable[[], RelationalGraph]
) -> RelationalGraph:
    if any(one.is_inference() for one in tensors):  # inference tensors have no version counter
        return make()
    key = (*(id(one) for one in tensors), rest)
    versions = tuple(one._version for one in tensors)
    with _lock:
        found = _known.get(key)
        if (
            found is not None
            and found.versions == versions
            and all(one() is other for one, other in zip(found.tensors, tensors, strict=True))
        ):
            return found.graph
    graph = make()
    references = tuple(weakref.ref(one, functools.partial(_forget, key)) for one in tensors)
    with _lock:
        _known[key] = _Known(references, versions, graph)
    return graph


def _size_bytes(thing: Any) -> int:  # any: whatever emitters derive
    """Return the bytes of all tensors in ``thing``."""
    if isinstance(thing, torch.Tensor):
        return thing.nbytes
    if isinstance(thing, dict):
        return sum(map(_size_bytes, thing.values()))
    return sum(map(_size_bytes, thing)) if isinstance(thing, tuple | list) else 0


def _forget(key: Hashable, _: Any) -> None:
    _known.pop(key, None)


@dataclass(frozen=True, slots=True)
class _Known:
    """A graph, and the tensors it was made from."""

    tensors: tuple["weakref.ref[torch.Tensor]", ...]
    """Weak references to the tensors, which may be freed: the graph has aliases of what it reads."""
    versions: tuple[int, ...]
    """Versions of the tensors, which count writes."""
    graph: RelationalGraph
    """The graph, with the indexes built so far."""


_known: dict[Hashable, _Known] = {}
_lock = Guard()


def _library(device: torch.device) -> ctypes.CDLL | None:
    """Return the compiled loops of `native` for the CPU; ``None`` on other devices."""
    return native.load("relational", openmp=True) if device.type == "cpu" else None


def counting_sort(keys: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions ``int32`` sorted stably by key, and where each key's positions begin, ``int64``."""
    library = _library(keys.device)
    if library is None:
        starts = keys.new_zeros(num_keys + 1)
        starts[1:] = keys.bincount(minlength=num_keys).cumsum(0)
        return keys.argsort(stable=True).to(torch.int32), starts
    keys = keys.contiguous()
    positions, starts = torch.empty_like(keys, dtype=torch.int32), keys.new_empty(num_keys + 1)
    pointers = (ctypes.c_void_p(one.data_ptr()) for one in (positions, starts))
    sizes = ctypes.c_int64(len(keys)), ctypes.c_int64(num_keys)
    if library.penstock_counting_sort(ctypes.c_void_p(keys.data_ptr()), *sizes, *pointers):
        raise MemoryError(f"not enough memory to sort {len(keys)} keys")
    return positions, starts


def pairs_of(
    nodes: torch.Tensor, types: torch.Tensor, num_nodes: int, num_types: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the nodes and types of the pairs that occur, and each edge's pair; all ``int64``.

    Pairs are ordered by type, then node.
    """
    library = _library(nodes.device)
    if library is None or len(nodes) >= 2**31:
        keys, rows = torch.unique(types * num_nodes + nodes, sorted=True, return_inverse=True)
        return keys % max(1, num_nodes), keys // max(1, num_nodes), rows
    nodes, types = nodes.contiguous(), types.contiguous()
    made = [torch.empty_like(nodes) for _ in range(3)]
    given = [ctypes.c_void_p(one.data_ptr()) for one in (nodes, types)]
    sizes = [ctypes.c_int64(one) for one in (len(nodes), num_nodes, num_types)]
    library.penstock_pairs.restype = ctypes.c_int64
    count = library.penstock_pairs(*given, *sizes, *(ctypes.c_void_p(one.data_ptr()) for one in made))
    if count < 0:
        raise MemoryError(f"not enough memory to find the pairs of {len(nodes)} edges")
    return made[0][:count].clone(), made[1][:count].clone(), made[2]


def _check_ids(name: str, ids: torch.Tensor, size: int, device: torch.device) -> None:
    if ids.dtype != torch.int64 or ids.shape != (size,):
        raise ValueError(f"{name} must be int64 of shape [{size}], got {ids.dtype} of shape {list(ids.shape)}")
    if ids.device != device:
        raise ValueError(
            f"{name} must be on the device of edge_index, {device}, got {ids.device}: {name}.to(edge_index.device)"
        )


def _check_range(name: str, ids: torch.Tensor, size: int) -> None:
    if not len(ids):
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise ValueError(f"{name} must be from 0 to {size - 1} (there are {size}), got numbers from {low} to {high}")
