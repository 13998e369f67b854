"""A graph whose edges are in a file, and the blocks of edges in which layers get them.

The file has the edges that enter each node together. So a block is all edges of some consecutive targets, a
`RelationalGraph` of its own: its sources are those that occur, in order. A softmax over the edges of a node lies within
one block. Only a target whose edges are too many for a block of their own is cut into parts (`_stages`).
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from penstock.arguments import checked
from penstock.relational._edges import Edges
from penstock.relational._graph import RelationalGraph
from penstock.relational._registry import Guard, register
from penstock.tiers import Budget, Charges, Footprint, Size
from penstock.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from penstock.unified import Graph

_EXAMPLE = "RelationalGraph.stream('edges.graph', budget='1GiB')"
_MOST_PASSES = 1000
"""The most passes that are remembered."""
_NODES_PER_EDGE = 4
"""How many nodes of the graph there may be for each edge of a block, for a table of all nodes to pay."""


class Cut(NamedTuple):
    """Some consecutive targets, with the edges that enter them."""

    first_target: int
    """The first target."""
    last_target: int
    """The target after the last."""
    first_edge: int
    """Place of the first edge in the file."""
    last_edge: int
    """Place after the last edge's."""
    parts: tuple[tuple[int, int], ...] = ()
    """Places of the first edge, and after the last one, of each part of one target that is too large for a block."""

    def part(self, first_edge: int, last_edge: int) -> "Cut":
        """Return some of the edges of the same targets."""
        return Cut(self.first_target, self.last_target, first_edge, last_edge)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBlock:
    """A block in memory."""

    graph: RelationalGraph
    """Its edges, from the sources that occur to consecutive targets."""
    cut: Cut
    """Its targets and edges."""
    sources: torch.Tensor
    """Numbers of its sources in the whole graph, ``int64 [sources]``, ascending."""
    positions: torch.Tensor | None
    """Number of each edge as it was given to `write_graph`, ``int64 [edges]``, if a layer reads tensors by edge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatistics:
    """The work of a streamed graph so far."""

    num_blocks: int = 0
    """Blocks that were read; each is read once in forward and once in backward."""
    num_edges: int = 0
    """Edges in them."""
    read_bytes: int = 0
    """Bytes of the file in them."""
    prepare_s: float = 0.0
    """Seconds in which the next block was read and indexed, mostly beside the computation."""
    stall_s: float = 0.0
    """Seconds in which the computation waited for a block."""
    compute_s: float = 0.0
    """Seconds of computation."""

    def __str__(self) -> str:
        return (
            f"{self.num_blocks} blocks of {self.num_edges / max(1, self.num_blocks):,.0f} edges, "
            f"{format_bytes(self.read_bytes)} read; computed {self.compute_s:.2f} s, waited {self.stall_s:.2f} s, read "
            f"and indexed {self.prepare_s:.2f} s beside it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEstimate:
    """How long a step on a streamed graph is expected to take."""

    step_s: float
    """Seconds of the step."""
    forward_s: float
    """Seconds of it in forward passes through the edges."""
    backward_s: float
    """Seconds of it in backward passes."""
    num_blocks: int
    """Blocks that are read in the step."""
    read_bytes: int
    """Bytes of the file in them."""

    def __str__(self) -> str:
        return (
            f"a step of about {self.step_s:.2f} s: {self.forward_s:.2f} s forwards and {self.backward_s:.2f} s "
            f"backwards through {self.num_blocks} blocks, {format_bytes(self.read_bytes)} of the file"
        )


class StreamedGraph(RelationalGraph):
    """A graph whose edges stay in a file: `RelationalGraph.stream`.

    It is wide because it answers all that layers ask of a graph in memory.
    """

    def __init__(
        self,
        path: Path,
        budget: Size | Budget,
        node_counts: Sequence[int] | Mapping[str, int] | None,
        device: torch.device,
    ):
        from penstock.unified import open_graph  # so that layers on graphs in memory do not load that room

        self.topology: Graph = open_graph(path)
        """The mapped file."""
        self.device, self.num_edges = device, self.topology.num_edges
        self.num_sources, self.num_targets = self.topology.num_sources, self.topology.num_nodes
        self.is_block = self.num_sources != self.num_targets
        self.num_edge_types = self.topology.num_types
        counts = [self.num_sources] if node_counts is None else _counts_of(node_counts)
        if sum(counts) != self.num_sources or (self.is_block and node_counts is not None):
            raise ValueError(
                f"`node_counts` must have the number of nodes of each type, {self.num_sources} in all, and cannot be "
                f"given if sources and targets are different nodes, got {node_counts}: {_EXAMPLE}"
            )
        self.num_node_types = len(counts)
        self.node_type_names = tuple(node_counts) if isinstance(node_counts, Mapping) else ()
        self.edge_type_names = ()
        self._counts = torch.tensor(counts, device="cpu")
        self.limit_bytes, self._charges = _limit(budget, path)
        weakref.finalize(self, self._charges.give_back).atexit = False
        self.work = StreamWork()
        """Counters."""
        self.num_sampled: int | None = None
        """Number of blocks that a pass goes through, if not all."""
        self.number = register(self)
        self.name = str(self.number)

    @property
    def num_nodes(self) -> int | tuple[int, int]:
        """Number of nodes as given: one number, or two for sources and targets."""
        return (self.num_sources, self.num_targets) if self.is_block else self.num_sources

    def __repr__(self) -> str:
        return (
            f"RelationalGraph.stream({str(self.topology.path)!r}, num_nodes={self.num_nodes}, "
            f"num_edges={self.num_edges}, num_edge_types={self.num_edge_types})"
        )

    def statistics(self) -> StreamStatistics:
        """Return what was read and computed so far."""
        return self.work.so_far

    @checked("graph.estimate(lambda: conv(x, graph).sum().backward())", num_blocks=1)
    def estimate(self, step: Callable[[], object], num_blocks: int = 8) -> StreamEstimate:
        """Predict the time of a step: it runs twice, and each layer goes through a few blocks of the graph only.

        ``step`` calls layers on this graph, and may call backward; all else in it runs as usual. Results and gradients
        are those of the few blocks, so call ``zero_grad()`` afterwards, and leave the optimizer's step out. Blocks are
        spread evenly, ``num_blocks`` for each pass of a layer. The first run compiles, the second is measured.
        """
        self.num_sampled = num_blocks
        try:
            step()
            self.work.passes.clear()
            start_s = time.perf_counter()
            step()
            rest_s = time.perf_counter() - start_s - sum(part.seconds for part in self.work.passes)
            passes = list(self.work.passes)
        finally:
            self.num_sampled = None
        scales = [self.num_edges / max(1, part.num_edges) for part in passes]
        forward_s, backward_s = (
            sum(scale * part.seconds for scale, part in zip(scales, passes, strict=True) if part.is_backward is way)
            for way in (False, True)
        )
        return StreamEstimate(
            step_s=rest_s + forward_s + backward_s, forward_s=forward_s, backward_s=backward_s,
            num_blocks=round(sum(scale * part.num_blocks for scale, part in zip(scales, passes, strict=True))),
            read_bytes=len(passes) * (self.num_edges * self._edge_bytes(with_positions=False) + 8 * self.num_targets),
        )  # fmt: skip

    def node_counts(self) -> list[int]:
        """Return the number of sources of each node type."""
        return [int(count) for count in self._counts.tolist()]

    def in_degrees(self) -> torch.Tensor:
        """Return the number of edges that enter each target, ``int64 [num_targets]``."""
        return self.topology.degrees().to(self.device)

    def to(self, device: torch.device | str) -> RelationalGraph:
        """Return the graph if it is for that device. Raises ``ValueError`` for another."""
        if torch.empty(0, device=device).device == self.device:
            return self
        return self._refuse(f"is for {self.device}: RelationalGraph.stream(path, budget=..., device={str(device)!r})")

    def save(self, path: str | Path) -> None:
        """Raise ``ValueError``: the graph is in a file already."""
        del path
        self._refuse("is in a file already, which can be copied")

    def charge_to(self, budget: Budget) -> RelationalGraph:
        """Raise ``ValueError``: the account is an argument of `RelationalGraph.stream`."""
        del budget
        return self._refuse(f"is charged to the account with which it is opened: {_EXAMPLE}")

    @property
    def edge_index(self) -> torch.Tensor:
        """Raise ``ValueError``: the edges are not in memory."""
        return self._refuse("has its edges in a file: penstock.unified.open_graph(path) maps them")

    @property
    def indexes(self) -> NoReturn:  # type: ignore[override]
        """Raise ``ValueError``: only blocks have indexes."""
        self._refuse("has no indexes in memory: ask a layer about a RelationalGraph of some of the edges")

    @property
    def edge_type(self) -> torch.Tensor:
        """Raise ``ValueError``: the types are not in memory."""
        return self._refuse("has its edges in a file: penstock.unified.open_graph(path).types maps their types")

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Raise ``ValueError``: the pairs are not in memory."""
        return self._refuse(
            "does not know its pairs of a source and a type: for x[e.src, e.etype], give x with a row for every type "
            "and source, types first: [num_edge_types * num_sources, ...]"
        )

    def cut(self, first_target: int, most_edges: int) -> Cut:
        """Return the targets from one on that have, with their edges, at most so many; at least one target."""
        starts = self.topology.starts
        before = int(starts[first_target])
        low, high = min(first_target + 1, self.num_targets), self.num_targets
        while low < high:  # the largest end that fits
            middle = (low + high + 1) // 2
            if int(starts[middle]) - before + middle - first_target <= most_edges:
                low = middle
            else:
                high = middle - 1
        return Cut(first_target, low, before, int(starts[low]))

    def sample(self, num_edges: int) -> Cut:
        """Return at most so many edges, the first ones of the file."""
        first = int(torch.searchsorted(self.topology.starts, 0, right=True)) - 1
        cut = self.cut(min(first, max(0, self.num_targets - 1)), num_edges)
        return cut.part(cut.first_edge, min(cut.last_edge, cut.first_edge + max(1, num_edges)))

    def read(self, cut: Cut, *, with_positions: bool) -> StreamBlock:
        """Read a block: its edges, with sources and targets numbered from 0."""
        start_s, topology = time.perf_counter(), self.topology
        edges = slice(cut.first_edge, cut.last_edge)
        sources, local = _renumbered(topology.sources[edges], self.num_sources)
        starts = topology.starts[cut.first_target : cut.last_target + 1].clamp(cut.first_edge, cut.last_edge)
        targets = torch.arange(len(starts) - 1, device="cpu").repeat_interleave(starts.diff())
        types = torch.zeros_like(local) if topology.types is None else topology.types[edges].long()
        positions = None
        if with_positions:
            numbers = topology.positions
            positions = (
                torch.arange(*edges.indices(self.num_edges), device="cpu") if numbers is None else numbers[edges]
            )
            positions = positions.to(self.device)
        graph = RelationalGraph.of_edges(
            Edges(
                edge_index=torch.stack([local, targets]).to(self.device), edge_type=types.to(self.device),
                node_types=(self._types_of(sources), self._types_of(torch.arange(*cut[:2], device="cpu"))),
                num_sources=len(sources), num_targets=len(starts) - 1, is_block=True,
                num_edge_types=self.num_edge_types, num_node_types=self.num_node_types,
            )
        )  # fmt: skip
        graph.indexes.family = self.number
        self.work.add(
            num_blocks=1, num_edges=len(local), prepare_s=time.perf_counter() - start_s,
            read_bytes=len(local) * self._edge_bytes(with_positions=with_positions) + starts.nbytes,
        )  # fmt: skip
        return StreamBlock(graph=graph, cut=cut, sources=sources.to(self.device), positions=positions)

    def _edge_bytes(self, *, with_positions: bool) -> int:
        arrays = (self.topology.sources, self.topology.types, self.topology.positions if with_positions else None)
        return sum(array.element_size() for array in arrays if array is not None)

    def _types_of(self, nodes: torch.Tensor) -> torch.Tensor:
        """Return the type of each node."""
        if self.num_node_types == 1:
            return torch.zeros_like(nodes, device=self.device)
        return torch.bucketize(nodes, self._counts.cumsum(0), right=True).to(self.device)

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"{self!r} {what}")

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        return {**kept, "work": StreamWork(), "num_sampled": None, "_charges": Charges(None, "relational")}


class TimedPass(NamedTuple):
    """One pass of a layer through the graph."""

    is_backward: bool
    """Whether gradients were computed."""
    num_blocks: int
    """Blocks that it went through."""
    num_edges: int
    """Edges in them."""
    seconds: float
    """Seconds that it took."""


class StreamWork:
    """The work on a streamed graph in this process: its blocks, and counters, which two threads add to."""

    def __init__(self) -> None:
        self.so_far = StreamStatistics()
        self.passes: deque[TimedPass] = deque(maxlen=_MOST_PASSES)
        """The last passes."""
        self.blocks: dict[Any, Any] = {}
        """The blocks of each call that differs from the others in what they depend on."""
        self._lock = Guard()

    def add(self, **counts: float) -> None:
        """Add to counters, by name."""
        with self._lock:
            before = {name: getattr(self.so_far, name) + count for name, count in counts.items()}
            self.so_far = replace(self.so_far, **before)

    def __reduce__(self) -> Any:
        return StreamWork, ()


def _counts_of(node_counts: Sequence[int] | Mapping[str, int]) -> list[int]:
    values = node_counts.values() if isinstance(node_counts, Mapping) else node_counts
    return [int(count) for count in values]


def _limit(budget: Size | Budget, path: Path) -> tuple[int, Charges]:
    """Return the bytes that blocks may take, and the account's charges for them."""
    if not isinstance(budget, Budget):
        return parse_bytes(budget), Charges(None, "relational")
    limit_bytes = budget.room_bytes("device")
    if not limit_bytes:
        raise ValueError(
            f"`budget` must limit the device's memory, and leave some of it free, for {path}, got {budget}: "
            f"Budget(device='4GiB'), or a size, {_EXAMPLE}"
        )
    charges = Charges(budget, "relational")
    charges.enter(Footprint(step_bytes=limit_bytes))
    return limit_bytes, charges


def _renumbered(sources: torch.Tensor, num_sources: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers that occur, ascending, and where among them each is, ``int64`` both."""
    if num_sources > _NODES_PER_EDGE * len(sources):
        occurring, places = sources.unique(return_inverse=True)
        return occurring.long(), places
    occurs = torch.zeros(num_sources, dtype=torch.bool, device="cpu")
    occurs[sources.long()] = True
    numbers = occurs.nonzero()[:, 0]
    places = torch.empty(num_sources, dtype=torch.int64, device="cpu")
    places[numbers] = torch.arange(len(numbers), device="cpu")
    return numbers, places.index_select(0, sources)
