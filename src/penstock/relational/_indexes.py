"""The indexes of a graph, each built when a compiled layer first needs it, and charged to the graph's account.

Pairs of a node and an edge type are numbered by type, then by node, so that the rows of one type are contiguous and
need only one product with that type's matrix. Edges keep the caller's order: edge data is never permuted.
"""

import ctypes
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch

from penstock import native
from penstock.errors import InternalError
from penstock.relational._cover import Cover
from penstock.relational._domain import EDGES, ENDS, OF_COVERS, Domain
from penstock.relational._edges import Edges
from penstock.relational._registry import Guard
from penstock.storages import address
from penstock.tiers import Budget, Charges

_Made = TypeVar("_Made")
_SUBSETS = frozenset(EDGES[pairs] for pairs in OF_COVERS)
"""Domains of some of the edges."""


class Pairs(NamedTuple):
    """The pairs of a node and an edge type that occur, all ``int64``."""

    nodes: torch.Tensor
    """Node of each pair."""
    types: torch.Tensor
    """Edge type of each pair."""
    of_edges: torch.Tensor
    """Pair of each edge."""


class SortedRows(NamedTuple):
    """The rows of a domain, sorted by the row of another domain that they belong to."""

    positions: torch.Tensor | None
    """The rows, ``int32``; ``None`` if they are in order already."""
    starts: torch.Tensor
    """Where the rows for each row of the other domain begin, and the last end, ``int64``."""


class Indexes:
    """How the rows of a graph's domains belong to each other.

    It is wide because each kind of index is built from others when it is needed.
    """

    def __init__(self, edges: Edges):
        self.edges = edges
        self.kept = Kept(edges.device)
        """Built values, by the kind of thing (such as "order") and the domains."""
        self.family: int | None = None
        """Number of the graph whose block this is: its blocks run the same programs; ``None`` for a whole graph."""

    def count(self, domain: Domain) -> int:
        """Return the number of rows of the domain."""
        if domain in ENDS:
            return len(self.pairs(domain).nodes)
        edges = self.edges
        if domain in _SUBSETS:
            return len(self.subset(domain))
        return {
            Domain.EDGE: edges.num_edges,
            Domain.SOURCE: edges.num_sources,
            Domain.TARGET: edges.num_targets,
            Domain.EDGE_TYPE: edges.num_edge_types,
            Domain.SOURCE_TYPE: edges.num_node_types,
            Domain.TARGET_TYPE: edges.num_node_types,
            Domain.ONE: 1,
        }[domain]

    def index(self, of: Domain, to: Domain) -> torch.Tensor | None:
        """Return the row of ``to`` that each row of ``of`` belongs to, ``int64 [rows of "of"]``.

        ``None`` if all belong to the same row, or each to itself.
        """
        if of is to or to is Domain.ONE:
            return None
        if of in _SUBSETS:
            return self._index_of_subset(of, to)
        if of is Domain.EDGE:
            if to in ENDS:
                return self.pairs(to).of_edges
            if to is Domain.EDGE_TYPE:
                return self.edges.edge_type
            if to in (Domain.SOURCE, Domain.TARGET):
                return self.edges.edge_index[int(to is Domain.TARGET)]
        if of in ENDS and to in (ENDS[of], Domain.EDGE_TYPE):
            nodes, types, _ = self.pairs(of)
            return types if to is Domain.EDGE_TYPE else nodes
        if of in ENDS and to in ENDS:
            return self.kept.get(("whole pairs", of, to), lambda: self._whole_pairs(of, to))
        return self.kept.get(("node types", of, to), lambda: self._node_types(of, to))

    def segments(self, of: Domain, to: Domain) -> Sequence[int] | None:
        """Return where the rows of ``of`` for each row of ``to`` begin, if they are in order, and the last end."""
        if of in ENDS and to is Domain.EDGE_TYPE:
            types, count = self.pairs(of).types, self.edges.num_edge_types
        elif (of, to) in ((Domain.SOURCE, Domain.SOURCE_TYPE), (Domain.TARGET, Domain.TARGET_TYPE)):
            types, count = self.edges.node_types[of is Domain.TARGET], self.edges.num_node_types
        else:
            return None
        borders = torch.searchsorted(types, torch.arange(count + 1, device=self.edges.device))
        return [int(border) for border in borders.tolist()]

    @property
    def has_cover(self) -> bool:
        """Whether each edge may choose the end at which it is multiplied."""
        return _library(self.edges.device) is not None

    def cover(self) -> Cover:
        """Return the end at which each edge is multiplied."""
        return self.kept.get(("cover",), self._cover)

    def subset(self, domain: Domain) -> torch.Tensor:
        """Return the edges of a domain with some of them, ``int64``, in order."""
        at_target = self.cover().at_target
        chosen = at_target if domain is Domain.EDGE_AT_TARGET else ~at_target
        return self.kept.get(("edges", domain), lambda: chosen.nonzero()[:, 0])

    def order(self, over: Domain, by: Domain) -> SortedRows:
        """Return the rows of ``over`` sorted by the row of ``by`` that they belong to."""
        return self.kept.get(("order", over, by), lambda: self._sorted(over, by))

    def index_in_order(self, over: Domain, by: Domain | None, to: Domain) -> torch.Tensor:
        """Return, as ``int32 [rows of over]``, the row of ``to`` of each row of ``over``, in the order of `order`."""
        return self.kept.get(("in order", over, by, to), lambda: self._in_order(over, by, to))

    def remember(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """Return what an emitter derives from the graph; it is made once."""
        return self.kept.get(("derived", key), make)

    def pairs(self, domain: Domain) -> Pairs:
        """Return the pairs of a domain of pairs, ordered by type, then node."""
        return self.kept.get(("pairs", domain), lambda: self._pairs(domain))

    def built(self) -> tuple[dict[Domain, Pairs], dict[tuple[Domain, Domain], SortedRows]]:
        """Return the pairs by their domain, and the sorted rows by both domains, that were built so far.

        Those of covers are left out.
        """
        kept = self.kept.snapshot()
        pairs = {key[1]: value for key, value in kept.items() if key[0] == "pairs" and EDGES[key[1]] is Domain.EDGE}
        orders = {key[1:]: value for key, value in kept.items() if key[0] == "order"}
        return pairs, {key: value for key, value in orders.items() if not (OF_COVERS | _SUBSETS) & set(key)}

    def build(self, keys: Iterable[tuple[Any, ...]]) -> None:
        """Build what has these keys in another graph's `Kept`, but for what emitters derive."""
        for kind, *rest in keys:
            match kind:
                case "pairs":
                    self.pairs(*rest)
                case "order":
                    self.order(*rest)
                case "in order":
                    self.index_in_order(*rest)

    def take_pairs(self, domain: Domain, pairs: Pairs) -> None:
        """Take pairs that were built before."""
        self.kept.get(("pairs", domain), lambda: pairs)

    def take_order(self, over: Domain, by: Domain, rows: SortedRows) -> None:
        """Take sorted rows that were built before."""
        self.kept.get(("order", over, by), lambda: rows)

    def _pairs(self, domain: Domain) -> Pairs:
        end, edges = ENDS[domain], self.edges
        nodes, types = edges.edge_index[int(end is Domain.TARGET)], edges.edge_type
        if EDGES[domain] in _SUBSETS:
            chosen = self.subset(EDGES[domain])
            nodes, types = nodes[chosen], types[chosen]
        return Pairs(*pairs_of(nodes, types, self.count(end), edges.num_edge_types))

    def _cover(self) -> Cover:
        sources, targets = self.pairs(Domain.SOURCE_AND_TYPE), self.pairs(Domain.TARGET_AND_TYPE)
        library, edges = _library(self.edges.device), self.edges
        if library is None:
            raise InternalError("covers are found by compiled code: callers ask has_cover first")
        at_target = torch.empty(edges.num_edges, dtype=torch.bool, device=edges.device)
        arrays = [sources.of_edges, targets.of_edges, sources.types, targets.types, at_target]
        sizes = [edges.num_edges, len(sources.types), len(targets.types), edges.num_edge_types]
        library.penstock_cover.restype = ctypes.c_int64
        num_rows = library.penstock_cover(
            *(ctypes.c_void_p(address(array)) for array in arrays), *map(ctypes.c_int64, sizes)
        )
        if num_rows < 0:
            raise MemoryError(f"not enough memory to choose an end for each of {edges.num_edges} edges")
        return Cover(at_target, num_rows)

    def _index_of_subset(self, of: Domain, to: Domain) -> torch.Tensor:
        """Return the row of ``to`` that each edge of a subset belongs to."""
        if to is Domain.EDGE:
            return self.subset(of)
        if to in ENDS and EDGES[to] is of:
            return self.pairs(to).of_edges
        index = self.index(Domain.EDGE, to)
        assert index is not None
        return self.kept.get(("of subset", of, to), lambda: index[self.subset(of)])

    def _whole_pairs(self, of: Domain, to: Domain) -> torch.Tensor:
        """Return the pair of all edges that each pair of a cover is."""
        of_edges = self.pairs(to).of_edges[self.subset(EDGES[of])]
        return of_edges.new_empty(self.count(of)).scatter_(0, self.pairs(of).of_edges, of_edges)

    def _node_types(self, of: Domain, to: Domain) -> torch.Tensor:
        """Return the node type of the source or the target of each edge, of each pair, or of each node."""
        types = self.edges.node_types
        if of is Domain.EDGE:
            end = int(to is Domain.TARGET_TYPE)
            return types[end][self.edges.edge_index[end]]
        if of in ENDS:
            return types[ENDS[of] is Domain.TARGET][self.pairs(of).nodes]
        return types[of is Domain.TARGET]

    def _sorted(self, over: Domain, by: Domain) -> SortedRows:
        self._check_int32(over)
        segments = self.segments(over, by)
        if segments is not None:
            return SortedRows(None, torch.tensor(segments, device=self.edges.device))
        if by is Domain.ONE:
            return SortedRows(None, torch.tensor([0, self.count(over)], device=self.edges.device))
        keys = self.index(over, by)
        assert keys is not None
        return SortedRows(*counting_sort(keys, self.count(by)))

    def _in_order(self, over: Domain, by: Domain | None, to: Domain) -> torch.Tensor:
        index = self.index(over, to)
        assert index is not None
        self._check_int32(over, to)
        positions = None if by is None else self.order(over, by).positions
        return (index if positions is None else index.index_select(0, positions)).to(torch.int32)

    def _check_int32(self, *domains: Domain) -> None:
        if max(self.count(domain) for domain in domains) >= 2**31:
            raise ValueError(
                f"{self.edges} has more rows than an int32 can count; use PyTorch for it: "
                "layer.with_options(emitter='eager')"
            )


class Kept:
    """Values by key, each made once, by the first thread that needs it, and charged to an account.

    No thread sees a value before it is complete. Copies have the values, but no account.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._values: dict[Any, Any] = {}
        self.lock = Guard()
        """A lock, so that one thread at a time makes values."""
        self._charges = Charges(None, "relational")

    @property
    def budget(self) -> Budget | None:
        """The account that values are charged to."""
        return self._charges.budget

    def get(self, key: tuple[Any, ...], make: Callable[[], _Made]) -> _Made:
        """Return the value of a key; ``make`` makes it, if it is not there yet."""
        value = self._values.get(key)
        if value is not None:
            return cast("_Made", value)
        with self.lock:
            if key not in self._values:
                on_cuda = self._device.type == "cuda"
                if on_cuda and torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        "the index of a graph cannot be built while a CUDA graph is captured; call the layer on this "
                        "graph once before the capture"
                    )
                value = make()
                self._charges.charge("device", _size_bytes(value))
                if on_cuda:
                    torch.cuda.current_stream(self._device).synchronize()  # other streams may read it next
                self._values[key] = value
            return cast("_Made", self._values[key])

    def snapshot(self) -> dict[Any, Any]:
        """Return the values made so far."""
        with self.lock:
            return dict(self._values)

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return _size_bytes(self.snapshot())

    def charge_to(self, budget: Budget, *more: torch.Tensor) -> None:
        """Charge the values, and more tensors, to another account, until the object is garbage-collected."""
        if self._charges.are_of(budget):
            return
        charges = Charges(budget, "relational")
        with self.lock:
            charges.charge("device", _size_bytes((*more, self._values)))
            self._charges.give_back()
            self._charges = charges
        weakref.finalize(self, charges.give_back).atexit = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_device": self._device, "_values": self.snapshot()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = Guard()
        self._charges = Charges(None, "relational")


def _size_bytes(value: object) -> int:
    """Return the bytes of all tensors in a value."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_size_bytes, value.values()))
    if is_dataclass(value):
        return sum(_size_bytes(getattr(value, field.name)) for field in fields(value))
    return sum(map(_size_bytes, value)) if isinstance(value, tuple | list) else 0


def _library(device: torch.device) -> ctypes.CDLL | None:
    """Return the compiled loops of `native` for the CPU; ``None`` on other devices."""
    return native.load("indexes") if device.type == "cpu" else None


def counting_sort(keys: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions ``int32`` sorted stably by key, and where each key's positions begin, ``int64``."""
    library = _library(keys.device)
    if library is None:
        starts = keys.new_zeros(num_keys + 1)
        starts[1:] = keys.bincount(minlength=num_keys).cumsum(0)
        return keys.argsort(stable=True).to(torch.int32), starts
    keys = keys.contiguous()
    positions, starts = torch.empty_like(keys, dtype=torch.int32), keys.new_empty(num_keys + 1)
    pointers = (ctypes.c_void_p(address(tensor)) for tensor in (positions, starts))
    sizes = ctypes.c_int64(len(keys)), ctypes.c_int64(num_keys)
    if library.penstock_counting_sort(ctypes.c_void_p(address(keys)), *sizes, *pointers):
        raise MemoryError(f"not enough memory to sort {len(keys)} keys")
    return positions, starts


def pairs_of(
    nodes: torch.Tensor, types: torch.Tensor, num_nodes: int, num_types: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the nodes and types of the pairs that occur, and each edge's pair; all ``int64``.

    Pairs are ordered by type, then node.
    """
    library = _library(nodes.device)
    if library is None or len(nodes) >= 2**31:  # else two counting sorts, which beat one sort of keys
        keys, rows = torch.unique(types * num_nodes + nodes, sorted=True, return_inverse=True)
        return keys % max(1, num_nodes), keys // max(1, num_nodes), rows
    nodes, types = nodes.contiguous(), types.contiguous()
    results = [torch.empty_like(nodes) for _ in range(3)]
    inputs = [ctypes.c_void_p(address(tensor)) for tensor in (nodes, types)]
    sizes = [ctypes.c_int64(size) for size in (len(nodes), num_nodes, num_types)]
    library.penstock_pairs.restype = ctypes.c_int64
    count = library.penstock_pairs(*inputs, *sizes, *(ctypes.c_void_p(address(tensor)) for tensor in results))
    if count < 0:
        raise MemoryError(f"not enough memory to find the pairs of {len(nodes)} edges")
    return results[0][:count].clone(), results[1][:count].clone(), results[2]
